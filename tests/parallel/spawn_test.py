#!/usr/bin/env python3
"""spawn: handles, exit codes, signals, and no process left behind.

usage: spawn_test.py SPAWN_PROGRAM
"""

import os
import signal
import subprocess
import sys
import time

from processes import alive

PROGRAM = sys.argv[1]


def run(case):
    done = subprocess.run([PROGRAM, case], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, (case, done.returncode, done.stdout, done.stderr)
    print(f"{case}: passed", flush=True)
    return done.stderr


for case in ("waits", "fails", "kills", "ends_with_the_handle", "several_at_once", "outlives_its_thread", "cannot_start",
             "ignores_children", "two_threads", "moved_handles", "closed_streams"):
    run(case)
text = run("others_wait")
assert not text or "rank 0 of 1 has ended, and another part of the program that started it has taken the news of how" in text, text
assert "the job has failed: rank 1 of 2 failed with exit code 6" in run("exit_code")
assert "of 2 ended before it came to the call of spawn at " in run("main_ends_early")

for case in ("waits_for_signals", "goes_on_beside"):
    for number in (signal.SIGTERM, signal.SIGKILL):
        program = subprocess.Popen([PROGRAM, case], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        pids = [int(program.stdout.readline()) for _ in range(2)]
        assert all(map(alive, pids))
        program.send_signal(number)
        program.communicate(timeout=60)
        # Whoever waits passes the signal on and returns what it says; one that does not wait dies of it.
        passed_on = case == "waits_for_signals" and number == signal.SIGTERM
        assert program.returncode == (128 + number if passed_on else -number), (case, number, program.returncode)
        end = time.time() + 2
        while any(map(alive, pids)) and time.time() < end:
            time.sleep(0.02)
        assert not any(map(alive, pids)), (case, number)
        print(f"{case} and {number.name}: passed", flush=True)

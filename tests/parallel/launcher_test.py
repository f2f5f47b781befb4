#!/usr/bin/env python3
"""tandem-run: environment, output, exit codes, and no rank left behind.

usage: launcher_test.py TANDEM_RUN
"""

import os
import signal
import subprocess
import sys
import time

RUN = sys.argv[1]


def run(*arguments, **variables):
    return subprocess.run([RUN, *arguments], capture_output=True, text=True, timeout=60, env={**os.environ, **variables})


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


shell = ["sh", "-c"]
done = run("-n", "3", "--", *shell, "echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE; printf end >&2")
assert done.returncode == 0, done
lines = sorted(done.stdout.splitlines())
assert [l for l in lines if "end" not in l] == [f"[{r}] {r} {r} 3 3" for r in range(3)], lines
assert sum(l.endswith("] end") for l in lines) == 3, lines

cores = len(os.sched_getaffinity(0))
environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
done = subprocess.run([RUN, "-n", "2", *shell, "echo $OMP_NUM_THREADS"], capture_output=True, text=True, env=environment)
threads = max(1, cores // 2)
assert done.stderr == (f"tandem: {cores} cores for 2 ranks: {threads} thread{'' if threads == 1 else 's'} each "
                       "(set OMP_NUM_THREADS to change that)\n"), done
assert sorted(done.stdout.splitlines()) == [f"[{r}] {threads}" for r in range(2)], done
done = run("-n", "1", *shell, "echo $OMP_NUM_THREADS", OMP_NUM_THREADS="7")
assert done.stdout == "[0] 7\n" and not done.stderr, done

done = run("-n", "2", *shell, "[ $RANK = 1 ] && exit 5; sleep 30")
assert done.returncode == 5 and "rank 1 of 2 failed with exit code 5" in done.stderr, done
done = run("-n", "2", *shell, "[ $RANK = 0 ] && kill -9 $$; sleep 30")
assert done.returncode == 137 and "rank 0 of 2 was killed by signal 9" in done.stderr, done
with open("/dev/full", "w", encoding="ascii") as full:  # output that cannot be written ends no rank
    done = subprocess.run([RUN, "-n", "2", *shell, "seq 3000"], stdout=full,
                          stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr.count(
        "tandem: the ranks' output cannot be written: No space left on device\n") == 1, done
    done = subprocess.run([RUN, "-n", "2", *shell, "seq 3000; exit $((7 * $RANK))"], stdout=full,
                          stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 7 and "rank 1 of 2 failed with exit code 7" in done.stderr, done
assert run("-n", "1", "/no/such/program").returncode == 127

for arguments, text in [
    (["-n", "x", "true"], "-n needs a number"),
    (["-n", "0", "true"], "-n needs a number"),
    (["--unknown", "true"], "unknown option"),
    (["-n", "2"], "no program"),
]:
    done = run(*arguments)
    assert done.returncode != 0 and text in done.stderr, done
assert "usage" in run("--help").stdout
done = subprocess.run(["sh", "-c", f"ulimit -n 40; exec {RUN} -n 60 true"], capture_output=True, text=True, timeout=60)
assert done.returncode == 1 and "Too many open files; start fewer ranks, or raise `ulimit -n`" in done.stderr, done

# The launcher is killed: its ranks end too.
launcher = subprocess.Popen([RUN, "-n", "2", *shell, "echo $$; exec sleep 60"], stdout=subprocess.PIPE, text=True)
pids = [int(launcher.stdout.readline().split()[1]) for _ in range(2)]
assert all(map(alive, pids))
launcher.send_signal(signal.SIGKILL)
launcher.wait()
end = time.time() + 10
while any(map(alive, pids)) and time.time() < end:
    time.sleep(0.02)
assert not any(map(alive, pids))
print("tandem-run: passed")

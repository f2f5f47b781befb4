#!/usr/bin/env python3
"""Drops one kind of call after the other in a training run over the double of CUDA, as if the backend had forgotten it.
Under ThreadSanitizer each must be reported as a race; without, one of some seeds of delays must give a wrong number or
an error. Arguments: the program, and `thread` where it is built with ThreadSanitizer."""
import os
import subprocess
import sys

PROGRAM, SANITIZER = sys.argv[1], sys.argv[2]
TSAN = "thread" in SANITIZER.split(",")
KINDS = ["records", "waits", "synchronises", "queries"]
SEEDS = range(1, 4) if TSAN else range(1, 7)
FOUND = 66  # what the sanitizer exits with


def run(seed, drop=None):
    env = dict(os.environ, TANDEM_CUDA_DOUBLE_DELAY=str(seed), OMP_NUM_THREADS="1",
               TSAN_OPTIONS=f"halt_on_error=1:exitcode={FOUND}")
    if drop:
        env["TANDEM_CUDA_DOUBLE_DROP"] = drop
    result = subprocess.run([PROGRAM], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60)
    return result.returncode, result.stdout


def caught(code, text):
    if TSAN:
        return code == FOUND and "WARNING: ThreadSanitizer: data race" in text
    return code != 0


failures = 0


def check(good, what, text):
    global failures
    print(("ok      " if good else "FAILED  ") + what, flush=True)
    if not good:
        failures += 1
        print(text[-4000:])


for seed in SEEDS:
    code, text = run(seed)
    check(code == 0, f"nothing dropped, seed {seed}", text)
for kind in KINDS:
    for seed in SEEDS:
        code, text = run(seed, kind)
        if caught(code, text):
            break
    how = "a race" if TSAN else (text.strip().splitlines() or [f"code {code}"])[-1]
    check(caught(code, text), f"{kind} dropped: " + (f"{how}, seed {seed}" if caught(code, text) else "nothing is found"), text)
code, text = run(1, "everything")
check(code != 0 and "'everything', which is not known" in text, "a kind that does not exist is refused", text)
sys.exit(failures > 0)

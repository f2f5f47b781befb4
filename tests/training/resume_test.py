#!/usr/bin/env python3
"""A job that is killed again and again, and started again by the launcher, ends with the weights of one that was not.

usage: resume_test.py FASHION_MNIST TANDEM_RUN BACKENDS [SEED [ROUNDS]]

The moments are drawn from a seed, which is printed: by TANDEM_FAULT at a step, inside backward, inside a collective,
while a file is saved, while the group is made, and from outside at any time. Files are compared byte by byte. What an
earlier job has left under the name of the file is not taken for the job's own.
"""

import contextlib
import os
import pathlib
import random
import signal
import struct
import subprocess
import sys
import tempfile
import time

PROGRAM, RUN = sys.argv[1:3]
BACKENDS = sys.argv[3].split(",")
SEED = int(sys.argv[4]) if len(sys.argv) > 4 else random.SystemRandom().randrange(2**32)
ROUNDS = int(sys.argv[5]) if len(sys.argv) > 5 else 6
ROWS, BATCH, EPOCHS, SAVE_EVERY = 2000, 50, 3, 7
STEPS = EPOCHS * ROWS // BATCH
VARIABLES = ("RANK", "WORLD_SIZE", "TANDEM_CPU_DEVICES", "TANDEM_FAULT", "RESTART_COUNT")
ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in VARIABLES}


def write_data(folder, generator):
    """Images and labels at random, as IDX files."""
    for name, rows in (("train", ROWS), ("t10k", 200)):
        images = generator.randbytes(rows * 28 * 28)
        labels = bytes(generator.randrange(10) for _ in range(rows))
        (folder / f"{name}-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 0x803, rows, 28, 28) + images)
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 0x801, rows) + labels)


def start(data, save, restarts, fault="", backend="shm", before=()):
    command = [RUN, "-n", "2", "--max-restarts", str(restarts), *before, PROGRAM, "--parallel", "ddp", "--backend", backend,
               "--data", data, "--epochs", EPOCHS, "--batch-size", BATCH, "--optimizer", "adam", "--threads", 2, "--save",
               save, "--save-every", SAVE_EVERY, "--log", f"{save}.log"]
    return subprocess.Popen([str(c) for c in command], env=ENVIRONMENT | ({"TANDEM_FAULT": fault} if fault else {}),
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process):
    try:
        output, _ = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert process.returncode == 0, f"ended with {process.returncode}:\n{output}"
    return output


def ranks_of(launcher):
    """The processes of the program below the launcher."""
    parents = {}
    for entry in os.listdir("/proc"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if entry.isdigit():
                name, rest = pathlib.Path(f"/proc/{entry}/stat").read_text().rsplit(")", 1)
                parents[int(entry)] = (int(rest.split()[1]), name.split("(", 1)[1])
    below = {launcher}
    while more := {p for p, (parent, _) in parents.items() if parent in below} - below:
        below |= more
    return sorted(p for p in below - {launcher} if parents[p][1] == pathlib.Path(PROGRAM).name[:15])


def kill_from_outside(process, generator, seconds):
    """Kills a rank at a random time; false when the job had ended before."""
    time.sleep(seconds)
    ranks = ranks_of(process.pid)
    if not ranks or process.poll() is not None:
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(generator.choice(ranks), signal.SIGKILL)
    return True


def draw_fault(generator, restart):
    rank = generator.randrange(2)
    point = generator.choice(["step", "backward", "collective", "save", "group"])
    if point == "save":
        return f"kill rank=0 save={generator.randint(1, STEPS // SAVE_EVERY)} restart={restart}"
    if point == "group":
        return f"kill rank={rank} group restart={restart}"
    last = STEPS - 1 if restart == 0 else SAVE_EVERY * 3  # a job that is resumed may have little left to do
    return f"kill rank={rank} {point}={generator.randint(1, last)} restart={restart}"


# Rank 1 dies in the first start before rank 0 has come to anything.
DIES_FIRST = ("sh", "-c", 'case $RESTART_COUNT$RANK in 01) exit 1;; 00) exec sleep 1000;; esac; exec "$@"', "sh")


def check_other_jobs(data, whole):
    """Files that earlier jobs have left are not this job's; its own are."""
    save = data / "left"
    process = start(data, save, 0, "kill rank=1 step=20")
    process.communicate(timeout=120)
    checkpoint = save.read_bytes()
    for left in (checkpoint, whole, b"no checkpoint"):
        save.write_bytes(left)
        output = finish(start(data, save, 1, before=DIES_FIRST))
        assert "restart 1 of 1" in output and "resumed from" not in output and "nothing is left" not in output, output
        assert save.read_bytes() == whole, output
    save.write_bytes(checkpoint)
    output = finish(start(data, save, 1, "kill rank=0 step=10"))
    assert "resumed from" in output and "batch 7" in output, output
    assert save.read_bytes() == whole and len(pathlib.Path(f"{save}.log").read_text().splitlines()) == EPOCHS, output
    print("what other jobs have left: ok", flush=True)


def main():
    generator = random.Random(SEED)
    print(f"seed {SEED}, {ROUNDS} rounds", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        write_data(folder, generator)
        begin = time.monotonic()
        finish(start(folder, folder / "whole", 0))
        duration = time.monotonic() - begin
        whole = (folder / "whole").read_bytes()
        check_other_jobs(folder, whole)
        restarted = resumed = 0
        for i in range(ROUNDS):
            save = folder / f"killed{i}"
            backend = BACKENDS[-1] if i % 5 == 0 else "shm"
            if i % 3 == 2:
                seconds = generator.uniform(0, duration)
                what = f"a SIGKILL from outside after {seconds:.3f} s"
                process = start(folder, save, 3, backend=backend)
                kill_from_outside(process, generator, seconds)
            else:
                what = "; ".join(draw_fault(generator, restart) for restart in range(generator.randint(1, 3)))
                process = start(folder, save, 3, what, backend)
            output = finish(process)
            same = save.read_bytes() == whole
            print(f"{what}, {backend}: {'the same bytes' if same else 'OTHER BYTES'}", flush=True)
            assert same, output
            restarted += "signal 9" in output
            resumed += "resumed from" in output
        assert restarted >= ROUNDS // 2 and resumed > 0, (restarted, resumed)
    print(f"resume: passed; {restarted} jobs were restarted, {resumed} resumed from a checkpoint")


main()

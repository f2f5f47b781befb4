#!/usr/bin/env python3
"""The backend mpi: its collectives, its messages, ranks that are lost, and what can be wrong with its start.

usage: mpi_test.py MPI_PROGRAM RENDEZVOUS_PROGRAM MODULE
"""

import os
import subprocess
import sys
import tempfile
import time

import mpirun

PROGRAM, RENDEZVOUS, MODULE = sys.argv[1:4]
mpirun.need_mpirun()


def passes(ranks, *arguments, **variables):
    code, out, err = mpirun.run(ranks, [PROGRAM, *arguments], **variables)
    assert code == 0, (arguments, code, out, err)
    assert sorted(out.splitlines()) == [f"rank {r} of {ranks}: passed" for r in range(ranks)], (out, err)


for ranks in (1, 2, 3, 4):
    passes(ranks, "collectives")
with tempfile.TemporaryDirectory() as folder:
    passes(2, "messages", folder, TANDEM_MPI_MODULE=MODULE)
passes(2, "own")
passes(2, "own", "single")
for case, by in [("abandoned", 0), ("truncated", 1), ("late", 0)]:
    with tempfile.TemporaryDirectory() as folder:
        code, out, err = mpirun.run(2, [PROGRAM, case, folder], TANDEM_MPI_MODULE=MODULE)
        assert out == f"rank {by} of 2: passed\n", (case, out, err)
        assert code != 0, (case, code, out, err)  # a rank that gave up has not left well

# A rank is lost: the job ends, not with 0, and mpirun or the others name the rank.
for how, codes, texts in [
    ("killed", [137], ["process rank 2 with PID", "signal 9"]),
    ("code 3", [3], ["Exit code:    3", ",2]"]),
    ("aborts", [134], ["process rank 2 with PID", "signal 6"]),
    ("throws", [1], ["[test] this rank has had enough"]),
    ("stopped", [1], ["waited 2 s in all_reduce (sum, call ", " for rank 2, which is stopped, slow"]),
    ("code 0", [1], ["process rank 2 with PID", "exiting improperly"]),
    ("ends at once", [1], ["process rank 2 with PID", "exiting improperly"]),
    ("returns", [1], ["rank 2 has left the job while this rank waited in all_reduce (sum, call "]),
]:
    begin = time.monotonic()
    code, out, err = mpirun.run(3, [PROGRAM, how])
    took = time.monotonic() - begin
    assert code in codes, (how, code, out, err)
    for text in texts:
        assert text in err, (how, text, out, err)
    # 10 s, after the 2 s that the stopped one is waited for; joining takes a while, too.
    assert took < 15, (how, took)

# What can be wrong at the start.
def check_error(parts, ranks=1, **variables):
    code, out, err = mpirun.run(ranks, [RENDEZVOUS, "env://", "mpi"], **variables)
    assert code == 1, (code, out, err)
    for part in parts:
        assert part in err, (part, err)


alone = subprocess.run([RENDEZVOUS, "env://", "mpi"], env=mpirun.environment(), text=True, capture_output=True, timeout=60,
                       check=False)
assert alone.returncode == 1 and alone.stderr == (
    "[init_process_group] backend 'mpi' needs a process that MPI has started; start the program with `mpirun -n N "
    "program`\n"), alone
check_error(["backend 'mpi' is not built in, or its module cannot be opened: /nowhere", "install libopenmpi-dev"],
            TANDEM_MPI_MODULE="/nowhere")
check_error(["is no module of this version of Tandem: it has no function tandem_make_mpi_mesh_"],
            TANDEM_MPI_MODULE=os.path.join(os.path.dirname(MODULE), "libtandem.so.0"))
check_error(["RANK is 1 and WORLD_SIZE is 2, but MPI has started this process as rank 0 of 1; leave RANK and WORLD_SIZE "
             "out"], RANK=1, WORLD_SIZE=2)
print("mpi: passed")

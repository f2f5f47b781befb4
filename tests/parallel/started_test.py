#!/usr/bin/env python3
"""Programs that mpirun or srun starts, on the other backends: their place in the job, and the file where they meet.
srun is played by this script: a process a rank with the variables that srun sets.

usage: started_test.py RENDEZVOUS_PROGRAM BACKENDS
"""

import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile

import mpirun

PROGRAM, BACKENDS = sys.argv[1], sys.argv[2].split(",")
SUM = {1: "tensor([1, 1, 1])", 2: "tensor([3, 3, 3])", 3: "tensor([6, 6, 6])"}
folder = tempfile.TemporaryDirectory()
runtime = pathlib.Path(folder.name, "runtime")
runtime.mkdir(mode=0o700)
os.environ["TANDEM_CUDA_MODULE"] = "none"  # the default backend is the one of machines without GPUs
os.environ["XDG_RUNTIME_DIR"] = str(runtime)
jobs = 0


def slurm(rank, ranks, job, **variables):
    place = {"SLURM_JOB_ID": job, "SLURM_STEP_ID": 0, "SLURM_PROCID": rank, "SLURM_NTASKS": ranks, "SLURM_LOCALID": rank,
             "SLURM_NNODES": 1, "SLURM_STEP_NUM_NODES": 1}
    return mpirun.environment(**{k: v for k, v in (place | variables).items() if v is not None})


def hydra(rank, ranks):
    return mpirun.environment(PMI_RANK=rank, PMI_SIZE=ranks, MPI_LOCALRANKID=rank, MPI_LOCALNRANKS=ranks)


def start(arguments, environment):
    return subprocess.Popen([PROGRAM, *map(str, arguments)], env=environment, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE)


def srun(ranks, arguments, **variables):
    global jobs
    jobs += 1
    return [start(arguments, slurm(r, ranks, 4000 + jobs, **variables)) for r in reversed(range(ranks))][::-1]


def finish(processes):
    """(exit code, output, errors) of each; none may take longer than a minute."""
    try:
        outputs = [p.communicate(timeout=60) for p in processes]
    finally:
        for p in processes:
            p.kill()
    return [(p.returncode, *o) for p, o in zip(processes, outputs)]


def check_job(processes, backend, times=1):
    ranks = len(processes)
    for rank, (code, out, err) in enumerate(finish(processes)):
        assert code == 0 and out == f"rank {rank} of {ranks}: {SUM[ranks]} by {backend}\n" * times, (rank, code, out, err)


def check_error(parts, arguments, environment):
    [(code, out, err)] = finish([start(arguments, environment)])
    assert code == 1, (code, out, err)
    for part in parts:
        assert part in err, (part, err)


def nothing_left():
    assert not list(runtime.iterdir()), list(runtime.iterdir())


# srun, and the mpiexec of MPICH, which a parent of all ranks stands for.
for backend in BACKENDS:
    for ranks in (1, 2, 3):
        check_job(srun(ranks, ["env://", backend, 3]), backend, 3)
check_job(srun(3, []), "shm")
check_job([start([], hydra(r, 2)) for r in range(2)], "shm")
nothing_left()
for place in (slurm, hydra):  # a fault is for one of them
    ranks = [start(["env://"], place(r, 2, *([4000] if place is slurm else [])) |
                   {"TANDEM_FAULT": "delay rank=1 start seconds=0; delay rank=1 group seconds=0"}) for r in range(2)]
    errors = [err for _, _, err in finish(ranks)]
    assert errors == ["", "tandem: fault injected: delay rank=1 start seconds=0\n"
                      "tandem: fault injected: delay rank=1 group seconds=0\n"], errors
nothing_left()

# An address of one's own, RANK of one's own, and files go before.
with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    port = s.getsockname()[1]
check_job(srun(2, [], MASTER_ADDR="127.0.0.1", MASTER_PORT=port), "shm")
check_job([start([f"file://{folder.name}/meet"], slurm(0, 1, 1, RANK=r, WORLD_SIZE=2)) for r in range(2)], "shm")

# Two jobs at once, and a job that follows one that was killed: they have one number, and the file is left.
both = [srun(2, ["env://", BACKENDS[-1], 5]) for _ in range(2)]
for job in both:
    check_job(job, BACKENDS[-1], 5)
alone = start(["env://", "", 1, 50], slurm(0, 2, 77))
while not (meetings := [f for f in runtime.iterdir() if not f.suffix]):  # one with a suffix is still being written
    assert alone.poll() is None
[meeting] = meetings
assert meeting.stat().st_mode & 0o777 == 0o600
check_error(["another program of this job is starting on this host", "start one after the other"], [], slurm(0, 2, 77))
alone.kill()
alone.communicate()
stale = meeting.read_text()
check_job(srun(2, []), "shm")  # any other job clears up
nothing_left()
meeting.touch(0o600)
meeting.write_text(stale)
late = start([], slurm(1, 2, 77))  # finds the file that is left, and waits for a new one
check_job([start([], slurm(0, 2, 77)), late], "shm")
nothing_left()

# Files that rank 0 has not written.
def hostile(make, part):
    make()
    for rank in range(2):
        check_error([f"'{meeting}', where the ranks meet, {part}; remove it, or set MASTER_ADDR and MASTER_PORT"], [],
                    slurm(rank, 2, 77))
    meeting.unlink()


def write(text, mode=0o600):
    meeting.touch(mode)
    meeting.write_text(text)


secret, writer = "ab" * 32, stale.splitlines()[1]
other = pathlib.Path(folder.name, "other")
other.touch(0o600)
other.write_text(stale)
hostile(lambda: write(stale, 0o640), "is not a file that this user alone may read")
hostile(lambda: meeting.symlink_to(other), "is not a file that this user alone may read")
hostile(lambda: os.mkfifo(meeting, 0o600), "is not a file that this user alone may read")
for text in ("", "junk", f"0 {secret}\n{writer}\n", f"70000 {secret}\n{writer}\n", f"5000 {secret[2:]}\n{writer}\n",
             f"5000 {secret[:-1]}g\n{writer}\n", f"5000 {secret}\n", "5" * 5000):
    hostile(lambda: write(text), "has not been written by rank 0")
if os.geteuid() == 0:
    def foreign():
        write(stale)
        os.chown(meeting, 65534, 65534)
    hostile(foreign, "is not a file that this user alone may read")
write(f"5000 {secret}\n1 1\n")  # process 1 had another start
check_error([f"rank 1 of 2: waited 0.5 s for rank 0 to write '{meeting}'; see that it has started, as the same user"],
            ["env://", "", 1, 0.5], slurm(1, 2, 77))
meeting.unlink()

# Folders: without XDG_RUNTIME_DIR, or where that is somebody else's, it is one in TMPDIR.
place = pathlib.Path(folder.name, f"tandem-{os.geteuid()}")
for given in ("", "/no/such/folder", "/"):
    check_job(srun(2, [], XDG_RUNTIME_DIR=given, TMPDIR=folder.name), "shm")
    assert place.stat().st_mode & 0o777 == 0o700 and not list(place.iterdir())
    place.rmdir()
def hostile_folder(make, remove):
    make()
    for rank in range(2):
        check_error([f"'{place}', for the file where the ranks meet, is not a folder that this user alone may enter"], [],
                    slurm(rank, 2, 77, XDG_RUNTIME_DIR=None, TMPDIR=folder.name))
    remove()


del os.environ["XDG_RUNTIME_DIR"]
hostile_folder(lambda: place.symlink_to(runtime), place.unlink)
hostile_folder(place.touch, place.unlink)
hostile_folder(lambda: (place.mkdir(), place.chmod(0o750)), place.rmdir)
if os.geteuid() == 0:
    hostile_folder(lambda: (place.mkdir(0o700), os.chown(place, 65534, 65534)), place.rmdir)
check_error(["'/no/such/folder/tandem-", "cannot be made: No such file or directory; set TMPDIR to another"], [],
            slurm(0, 2, 77, TMPDIR="/no/such/folder"))
os.environ["XDG_RUNTIME_DIR"] = str(runtime)

# What is missing or wrong.
check_error(["SLURM_PROCID is 5, which is out of range: SLURM_NTASKS is 2"], [], slurm(5, 2, 1))
check_error(["SLURM_PROCID is 'x'; it must be a whole number"], [], slurm("x", 2, 1))
check_error(["SLURM_NTASKS is 0; it must be at least 1"], [], slurm(0, 0, 1))
check_error(["RANK is 4, which is out of range: SLURM_NTASKS is 2"], [], slurm(0, 2, 1, RANK=4))
check_error(["PMI_RANK is 3, which is out of range: PMI_SIZE is 2"], [], hydra(3, 2))
check_error(["MASTER_PORT is not set"], [], slurm(0, 2, 1, MASTER_ADDR="127.0.0.1"))
check_error(["RANK is not set; start the program with `tandem-run"], [], slurm(0, 2, 1, SLURM_STEP_ID=None))  # a script
for environment in (slurm(0, 4, 1, SLURM_STEP_NUM_NODES=2), slurm(0, 4, 1, SLURM_STEP_NUM_NODES=None, SLURM_NNODES=2),
                    hydra(0, 4) | {"MPI_LOCALNRANKS": "2"}):
    check_error(["the job runs on several hosts, and MASTER_ADDR is not set; set, on all ranks, MASTER_ADDR to", "MASTER_PORT",
                 "TANDEM_SECRET_FILE"], [], environment)

# A rank that is killed is named, as under any launcher.
for backend in BACKENDS:
    job = srun(3, ["env://", backend, 0])
    for p in job:
        assert p.stdout.readline()
    job[1].send_signal(signal.SIGKILL)
    for rank, (code, _, err) in enumerate(finish(job)):
        if rank != 1:
            assert code == 1 and err.startswith(f"rank {rank} of 3: rank 1 "), (backend, err)
nothing_left()

if shutil.which("mpirun") is None:
    print("not tried with mpirun, which is not installed")
else:
    for backend in [*BACKENDS, ""]:
        code, out, err = mpirun.run(3, [PROGRAM, "env://", backend, 2])
        expected = [f"rank {r} of 3: {SUM[3]} by {backend or 'shm'}" for r in range(3) for _ in range(2)]
        assert code == 0 and sorted(out.splitlines()) == expected, (code, out, err)
    # Ranks behind a shell each, and several jobs at once.
    started = [mpirun.start(2, ["sh", "-c", f"{PROGRAM} env:// {BACKENDS[-1]} 3; exit $?"]) for _ in range(2)]
    for code, out, err in map(mpirun.finish, started):
        assert code == 0 and out.count(SUM[2]) == 6, (code, out, err)
    nothing_left()
print("started: passed")

"""Starting programs by mpirun. Tests that need it are skipped, with a reason, where it is missing."""

import os
import shutil
import subprocess
import sys

JOB = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LAUNCHERS = ("OMPI_", "PMIX_", "PMI_", "MPI_LOCAL", "SLURM_")


def environment(**variables):
    """This process's, without what belongs to a job."""
    result = {k: v for k, v in os.environ.items() if k not in JOB and not k.startswith(LAUNCHERS)}
    result.setdefault("OMP_NUM_THREADS", "1")
    return result | {k: str(v) for k, v in variables.items()}


def need_mpirun():
    if shutil.which("mpirun") is None:
        print("skipped: mpirun is not installed (openmpi-bin)")
        sys.exit(77)


def start(ranks, command, **variables):
    """mpirun refuses root, and more ranks than cores, unless it is told that they are meant."""
    return subprocess.Popen(["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(ranks), *map(str, command)],
                            env=environment(**variables), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(process, seconds=90):
    """(exit code, output, errors)."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.terminate()  # mpirun ends its ranks then; only its own death would leave them
        try:
            out, err = process.communicate(timeout=15)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
        raise AssertionError(f"not finished after {seconds} s:\n{out}{err}") from None
    return process.returncode, out, err


def run(ranks, command, seconds=90, **variables):
    return finish(start(ranks, command, **variables), seconds)

#!/usr/bin/env python3
"""Compares the table in docs/backends.md with what the backends do, which backend_table finds out by trying. Cells that
cannot be tried here, such as those of a backend that is not built, are left as they are.

usage: backends.py [--write] SOURCE_ROOT BUILD_ROOT
"""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

BEGIN, END = "<!-- The table: backends.py writes it. -->\n", "<!-- The end of the table. -->\n"
BACKENDS = ("thread", "shm", "gloo", "mpi", "nccl")
JOB = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in JOB} | {"OMP_NUM_THREADS": "1"}
HOSTS = "several hosts"
# What is said of several hosts where no test tries them: threads are of one process; an MPI spans hosts in its own way.
UNTRIED = {"thread": "no", "mpi": "yes, untried", "nccl": "yes, untried"}


class Skip(Exception):
    pass


def finish(processes):
    """The output of the first one; all must end well."""
    try:
        done = [(p, *p.communicate(timeout=60)) for p in processes]
    finally:
        for p in processes:
            p.kill()
    for process, out, err in done:
        if "is not built in" in out + err:
            raise Skip("it is not built in")
        if "with a CUDA device each, and there is none" in out + err:
            raise Skip("there is no GPU")
        if process.returncode != 0:
            raise RuntimeError(f"{process.args} ended with {process.returncode}:\n{out}{err}")
    return done[0][1]


def start(command, **variables):
    return subprocess.Popen([str(c) for c in command], env=ENVIRONMENT | variables, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def column(build, backend):
    """What a backend can do: the cell of each row."""
    program = build / "tests" / "parallel" / "backend_table"
    if backend == "thread":
        command = [program, backend]
    elif backend == "mpi":
        if shutil.which("mpirun") is None:
            raise Skip("mpirun is not installed")
        command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", program, backend]
    else:
        command = [build / "tandem-run", "-n", "2", program, backend]
    lines = finish([start(command)]).splitlines()
    # A launcher says whose line it is.
    return dict(line.removeprefix("[0] ").split("\t") for line in lines if "\t" in line)


def works_on_several_hosts(build, backend):
    """A process with a space of process numbers of its own counts as one on another host."""
    apart = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child"]
    try:
        if subprocess.run([*apart, "true"], capture_output=True).returncode != 0:
            raise Skip("a process cannot be set apart here")
    except FileNotFoundError:
        raise Skip("unshare is not installed") from None
    program = build / "tests" / "parallel" / "backend_table"
    with tempfile.TemporaryDirectory() as folder:
        rank = [program, backend, f"file://{folder}/meeting"]
        ranks = [start([*(apart if r == 1 else []), *rank], RANK=str(r), WORLD_SIZE="2") for r in range(2)]
        try:
            return bool(finish(ranks))
        except RuntimeError as e:
            if "on host" in str(e):  # the error of a backend that needs one host
                return False
            raise


def read_table(text):
    """The rows of the table in the docs: the cells by backend."""
    rows = {}
    for line in text.split(BEGIN)[1].split(END)[0].splitlines()[2:]:
        name, *cells = (c.strip() for c in line.strip("|").split("|"))
        rows[name] = dict(zip(BACKENDS, cells))
    return rows


def to_text(rows):
    lines = [["", *BACKENDS], *([name, *(cells[b] for b in BACKENDS)] for name, cells in rows.items())]
    widths = [max(len(line[i]) for line in lines) for i in range(len(BACKENDS) + 1)]
    lines.insert(1, ["-" * w for w in widths])
    return "".join("| " + " | ".join(c.ljust(w) for c, w in zip(line, widths)) + " |\n" for line in lines)


def main():
    write = "--write" in sys.argv
    source, build = (pathlib.Path(a).resolve() for a in sys.argv[-2:])
    path = source / "docs" / "backends.md"
    text = path.read_text()
    known, rows = read_table(text), {}
    for backend in BACKENDS:
        try:
            cells = column(build, backend)
            if backend in UNTRIED:
                cells[HOSTS] = UNTRIED[backend]
            else:
                cells[HOSTS] = "yes" if works_on_several_hosts(build, backend) else "no"
        except Skip as e:
            print(f"{backend}: skipped, {e}")
            continue
        for name, cell in cells.items():
            rows.setdefault(name, {})[backend] = cell
    for name, cells in rows.items():
        rows[name] = {b: cells.get(b, known.get(name, {}).get(b, "not yet")) for b in BACKENDS}
    if write:
        before, after = text.split(BEGIN)[0], text.split(END)[1]
        path.write_text(before + BEGIN + to_text(rows) + END + after)
        return
    differences = [f"{name}, {b}: the docs say '{known.get(name, {}).get(b, '')}', but it is '{cells[b]}'"
                   for name, cells in rows.items() for b in BACKENDS if cells[b] != known.get(name, {}).get(b)]
    differences += [f"{name}: nothing tries this row of the docs" for name in known if name not in rows]
    print(to_text(rows), *differences, sep="\n")
    sys.exit(bool(differences))


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Rendezvous: by environment without a launcher, by address, by file, and everything that can be wrong with them.

usage: rendezvous_test.py PROGRAM TANDEM_RUN BACKENDS
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile

from processes import finish, free_port

PROGRAM, RUN, BACKENDS = sys.argv[1], sys.argv[2], sys.argv[3].split(",")
os.environ["TANDEM_CUDA_MODULE"] = "none"  # the default backend is the one of machines without GPUs
VARIABLES = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
SUM = {2: "tensor([3, 3, 3])", 3: "tensor([6, 6, 6])"}

try:
    socket.gethostbyname("localhost")
    NAME = "localhost"
except OSError:  # a system that knows no names
    NAME = "127.0.0.1"


def start(arguments, **variables):
    environment = {k: v for k, v in os.environ.items() if k not in VARIABLES}
    environment.update({k: str(v) for k, v in variables.items() if v is not None})
    return subprocess.Popen([PROGRAM, *map(str, arguments)], env=environment, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE)


def place(rank, world, port):
    return {"RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def check_job(processes, backend, times=1):
    world = len(processes)
    for rank, (code, out, err) in enumerate(finish(processes)):
        assert code == 0, err
        assert out == f"rank {rank} of {world}: {SUM[world]} by {backend}\n" * times, (out, err)


def check_error(parts, arguments, **variables):
    [(code, out, err)] = finish([start(arguments, **variables)])
    assert code == 1, (code, out, err)
    for part in parts:
        assert part in err, (part, err)


folder = tempfile.TemporaryDirectory()
path = os.path.join(folder.name, "meet")

for backend in BACKENDS:
    port = free_port()
    check_job([start(["env://", backend, 4], **place(r, 3, port)) for r in reversed(range(3))][::-1], backend, 4)
    port = free_port()
    check_job([start([f"tcp://{NAME}:{port}", backend, 2], RANK=r, WORLD_SIZE=2) for r in range(2)], backend, 2)
    check_job([start([f"file://{path}", backend, 3], RANK=r, WORLD_SIZE=3) for r in range(3)], backend, 3)
    assert not os.path.exists(path)
    check_job([start([f"store:{path}", backend], RANK=r, WORLD_SIZE=2) for r in range(2)], backend)
    os.remove(path)
check_job([start(["env://"], **place(r, 2, port)) for r in range(2)], "shm")  # all share this host
port = free_port()  # torchrun's name for the number of restarts is understood too
check_job([start(["env://"], **place(r, 2, port), **{name: 3})
           for r, name in enumerate(["RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"])], "shm")

# Gloo listens on the way to the store, whose address comes from init_method alone.
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    try:
        s.connect(("192.0.2.1", 1))  # sends nothing
        own = s.getsockname()[0]
    except OSError:
        own = None  # there is no other interface than the loopback
if own and "gloo" in BACKENDS:
    with socket.socket() as s:
        s.bind((own, 0))
        port = s.getsockname()[1]
    job = [start([f"tcp://{own}:{port}", "gloo", 0], RANK=r, WORLD_SIZE=2, TANDEM_SECRET="5aa5" * 16) for r in range(2)]
    try:
        for p in job:
            assert p.stdout.readline()
        sockets = {os.readlink(f.path) for f in os.scandir(f"/proc/{job[1].pid}/fd")}
        with open("/proc/net/tcp", encoding="ascii") as lines:
            used = [l.split()[1:3] for l in list(lines)[1:] if f"socket:[{l.split()[9]}]" in sockets]
        # Four bytes of address and two of port, in hexadecimal. The listener is one, a connection to the peer another.
        local = [socket.inet_ntoa(bytes.fromhex(a.split(":")[0])[::-1]) for a, _ in used]
        assert len(local) > 2 and set(local) == {own}, (used, own)
    finally:
        for p in job:
            p.kill()
            p.communicate()

if own:
    check_error([f"a store that listens on {own}, which other hosts may reach, needs the job's secret"],
                [f"tcp://{own}:{free_port()}"], RANK=0, WORLD_SIZE=2)

# Two jobs at once, each with its own address, or with launchers.
ports = [free_port(), free_port()]
jobs = [[start(["env://"], **place(r, 2, p)) for r in range(2)] for p in ports]
for job in jobs:
    check_job(job, "shm")
launched = [subprocess.Popen([RUN, "-n", "2", PROGRAM, "env://", BACKENDS[-1], "3"], text=True, stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE) for _ in range(2)]
for code, out, err in finish(launched):
    assert code == 0 and out.count(SUM[2]) == 6, (out, err)

# What is missing or wrong.
good = place(0, 1, free_port())
for variable in ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]:
    check_error([f"{variable} is not set; start the program with `tandem-run -n N program`, call spawn, or set RANK, "
                 "WORLD_SIZE, MASTER_ADDR and MASTER_PORT"], [], **{**good, variable: None})
check_error(["RANK is 'x'; it must be a whole number"], [], **{**good, "RANK": "x"})
check_error(["WORLD_SIZE is '-2'; it must be a whole number"], [], **{**good, "WORLD_SIZE": "-2"})
check_error(["WORLD_SIZE is 0; it must be at least 1"], [], **{**good, "WORLD_SIZE": "0"})
check_error(["MASTER_ADDR must be an address of the host of rank 0"], [], **{**good, "RANK": "0", "MASTER_ADDR": "192.0.2.1"})
check_error(["RANK is 5, which is out of range: WORLD_SIZE is 2"], [], **{**good, "RANK": 5, "WORLD_SIZE": 2})
check_error(["MASTER_PORT is 99999; it must be 1 to 65535"], [], **{**good, "MASTER_PORT": 99999})
check_error(["init_method is 'http://x'; give \"env://\", \"tcp://host:port\" or \"file:///path\""], ["http://x"], **good)
for address in ["tcp://here", "tcp://:5", "tcp://here:", "tcp://here:0", "tcp://here:7x"]:
    check_error([f"init_method is '{address}'; write it as tcp://host:port"], [address], **good)
check_error(["both a store and init_method 'file:///tmp/x' are given"], ["store:both"], **good)
os.remove("both")
check_error(["backend 'pigeon' is not built in; use \"shm\""], ["env://", "pigeon"], **good)
check_error(["backend 'thread' is for ranks that spawn_threads starts"], ["env://", "thread"], **good)
if "gloo" not in BACKENDS:
    check_error(["backend 'gloo' is not built in", "install libgloo-dev and build again"], ["env://", "gloo"], **good)
check_error(["timeout_seconds is -1; it must be positive"], ["env://", "", 1, -1], **good)
check_error(["timeout_seconds is nan; it must be positive"], ["env://", "", 1, "nan"], **good)
for backend in BACKENDS:
    for forever in ("1e10", "inf"):
        port = free_port()
        check_job([start(["env://", backend, 1, forever], **place(r, 2, port)) for r in range(2)], backend)
        check_job([start([f"file://{path}", backend, 1, forever], RANK=r, WORLD_SIZE=2) for r in range(2)], backend)
check_error(["cannot be opened"], ["file:///no/such/folder/file"], **good)
with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    s.listen()
    check_error([f"cannot listen on 127.0.0.1:{s.getsockname()[1]}: Address already in use", "MASTER_PORT"], [],
                **{**good, "MASTER_PORT": s.getsockname()[1]})

# Ranks that do not come, or were told something else.
port = free_port()
for rank, (code, _, err) in enumerate(finish([start(["env://", "", 1, 2], **place(r, 3, port)) for r in range(2)])):
    assert code == 1 and f"rank {rank} of 3: " in err and "rank 2" in err, err
port = free_port()
results = finish([start(["env://", "", 1, 1], **place(r, 4, port)) for r in (0,)])
assert "waited 1 s in init_process_group for rank 1 and 2 and 3, which did not come; see that 4 processes" in results[0][2]
check_error([f"rank 1 of 2: waited 0.5 s for the store at 127.0.0.1:{port}: Connection refused"], ["env://", "", 1, 0.5],
            **place(1, 2, port))
port = free_port()
results = finish([start(["env://", "", 1, 5], **place(0, 2, port)), start(["env://", "", 1, 5], **place(1, 3, port))])
assert all(code == 1 for code, _, _ in results)
assert "the ranks disagree: this rank was told 2 ranks and backend '', rank 1 was told 3 ranks and" in results[0][2], results

# A rank is killed: the others say which. Then rank 0, which holds the store.
for backend in BACKENDS:
    for victim in (1, 0):
        port = free_port()
        job = [start(["env://", backend, 0], **place(r, 3, port)) for r in range(3)]
        for p in job:
            assert p.stdout.readline()
        job[victim].send_signal(signal.SIGKILL)
        for rank, (code, _, err) in enumerate(finish(job)):
            if rank != victim:
                assert code == 1 and err.startswith(f"rank {rank} of 3: rank {victim} "), (backend, victim, err)

# pytorch/gloo#520, horovod/horovod#2564: rank 0 is stopped, and with it the store. The other rank says whom it waited
# for, and does not wait for ten answers of the store.
for backend in BACKENDS:
    port = free_port()
    job = [start(["env://", backend, 0, 2], **place(r, 2, port)) for r in range(2)]
    for p in job:
        assert p.stdout.readline()
    job[0].send_signal(signal.SIGSTOP)
    try:
        _, err = job[1].communicate(timeout=15)
    finally:
        for p in job:
            p.kill()
    assert job[1].returncode == 1 and "rank 1 of 2: waited 2 s in all_reduce (sum, call " in err, (backend, err)
    assert " for rank 0" in err and ", which is stopped, slow, or in another part of the program" in err, (backend, err)
    if backend == "gloo":
        assert f"; the store at 127.0.0.1:{port} does not answer: rank 0, which holds it, is stopped" in err, err
    job[0].communicate()

# A file that an earlier run left.
job = [start([f"file://{path}", "", 0], RANK=r, WORLD_SIZE=2) for r in range(2)]
for p in job:
    assert p.stdout.readline()
for p in job:
    p.send_signal(signal.SIGKILL)
finish(job)
check_error([f"'{path}' is left from an earlier run, in which rank 0 was; remove it"], [f"file://{path}"], RANK=2,
            WORLD_SIZE=3)
check_error([f"'{path}' is left from an earlier run; remove it"], [f"file://{path}"], RANK=0, WORLD_SIZE=2)
print("rendezvous: passed")

"""What the tests of processes share: ports, and how processes end."""

import socket
import subprocess


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def finish(processes):
    """(exit code, output, errors) of each; none may take longer than a minute."""
    try:
        outputs = [p.communicate(timeout=60) for p in processes]
    except subprocess.TimeoutExpired:
        for p in processes:
            p.kill()
        raise
    return [(p.returncode, *o) for p, o in zip(processes, outputs)]


def alive(pid):
    """Whether a process is there and has not ended."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False

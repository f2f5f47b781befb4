#!/usr/bin/env python3
"""Strangers flood the port of the store: the job neither notices nor runs out of file descriptors.

usage: store_flood_test.py PROGRAM
"""

import os
import secrets
import socket
import struct
import subprocess
import sys
import threading
import time

from processes import free_port

PROGRAM = sys.argv[1]
STRANGERS, TIMES = 3000, 20
MOST_UNPROVED = 256
VARIABLES = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RESTART_COUNT"]

# What they send: nothing, noise, a huge length, too little, and a greeting whose proof is wrong.
GREETINGS = [lambda: b"", lambda: secrets.token_bytes(500), lambda: struct.pack("<I", 0xFFFFFFFF) * 100, lambda: b"t",
             lambda: b"tandem store 03\n" + secrets.token_bytes(92), lambda: b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"]


class Flood:
    """Some thousand connections a second, of which the last ones stay open."""

    def __init__(self, port):
        self.port, self.made, self.stop, self.lock = port, 0, False, threading.Lock()
        self.threads = [threading.Thread(target=self.run, args=(i,)) for i in range(3)]
        for t in self.threads:
            t.start()

    def run(self, number):
        kept = []
        while not self.stop:
            try:
                s = socket.create_connection(("127.0.0.1", self.port), 5)
                kept.append(s)
                s.sendall(GREETINGS[(len(kept) + number) % len(GREETINGS)]())
                if len(kept) % 3 == 0:
                    s.shutdown(socket.SHUT_WR)  # half of it is closed
            except OSError:
                continue  # it does not listen yet, or has closed this one
            with self.lock:
                self.made += 1
            if len(kept) > 250:
                for s in kept[:50]:
                    s.close()
                del kept[:50]
                time.sleep(0.02)  # the job shares the processors
        for s in kept:
            s.close()

    def end(self):
        self.stop = True
        for t in self.threads:
            t.join()


def start(rank, port, secret, *arguments):
    environment = {k: v for k, v in os.environ.items() if k not in VARIABLES}
    environment |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                    "TANDEM_SECRET": secret}
    return subprocess.Popen([PROGRAM, "env://", *arguments], env=environment, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE)


# The ranks join, make groups, sum and leave many times; every time they connect to the store anew.
port, secret = free_port(), secrets.token_hex(32)
flood = Flood(port)
most_files = 0
try:
    for _ in range(50):
        job = [start(r, port, secret, "shm", str(TIMES)) for r in range(2)]
        outputs = [None, None]

        def read(rank):
            outputs[rank] = job[rank].communicate(timeout=100)

        readers = [threading.Thread(target=read, args=(r,)) for r in range(2)]
        for t in readers:
            t.start()
        while any(t.is_alive() for t in readers):
            try:
                most_files = max(most_files, len(os.listdir(f"/proc/{job[0].pid}/fd")))
            except OSError:
                pass  # it has ended
            readers[1].join(0.01)
        for rank in range(2):
            out, err = outputs[rank]
            assert job[rank].returncode == 0, (rank, err)
            assert out == f"rank {rank} of 2: tensor([3, 3, 3]) by shm\n" * TIMES, (rank, out, err)
        if flood.made >= STRANGERS:
            break
    assert flood.made >= STRANGERS, flood.made

    # A rank that ends while strangers come ends in order.
    last = start(0, port, secret, "shm", "1", "3")
    out, err = last.communicate(timeout=60)
    assert last.returncode == 1 and "waited 3 s in init_process_group for rank 1" in err, (last.returncode, err)
finally:
    flood.end()
assert 0 < most_files < MOST_UNPROVED + 60, most_files
print(f"store flood: passed; {flood.made} strangers, at most {most_files} files open")

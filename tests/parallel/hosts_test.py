#!/usr/bin/env python3
"""Several hosts, made of network namespaces: training over Gloo, a restart, and a host that is cut off in the middle.

usage: hosts_test.py TANDEM_RUN HOSTS_PROGRAM
"""

import contextlib
import ctypes
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time

RUN, PROGRAM = map(os.path.abspath, sys.argv[1:3])
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
CLEAN = {k: v for k, v in os.environ.items() if not re.match("OMP_NUM_THREADS|TANDEM_|RANK|WORLD_SIZE|GLOO_", k)}
CLEAN["TANDEM_CUDA_MODULE"] = "none"  # the default backend is the one of machines without GPUs


def ip(*arguments, check=True):
    return subprocess.run(["ip", *arguments], check=check, capture_output=True, text=True, timeout=30).stdout


def end_with_the_test():
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def end(number, _):
    sys.exit(128 + number)


class Hosts:
    """Namespaces 10.77.0.1, 10.77.0.2, ... on one switch, which is a namespace too."""

    def __init__(self, count):
        self.names = [f"tandem-{os.getpid()}-{k}" for k in range(count)]
        self.switch = f"tandem-{os.getpid()}-switch"

    def __enter__(self):
        try:
            ip("netns", "add", self.switch)
            ip("-n", self.switch, "link", "add", "bridge", "type", "bridge")
            ip("-n", self.switch, "link", "set", "bridge", "up")
            for k, name in enumerate(self.names):
                ip("netns", "add", name)
                ip("-n", name, "link", "set", "lo", "up")
                ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", f"port{k}", "netns", self.switch)
                ip("-n", self.switch, "link", "set", f"port{k}", "master", "bridge", "up")
                ip("-n", name, "address", "add", f"10.77.0.{k + 1}/24", "dev", "eth0")
                ip("-n", name, "link", "set", "eth0", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)  # what is begun here comes to its end
        for name in [*self.names, self.switch]:
            for pid in self.pids(name):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            ip("netns", "delete", name, check=False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)

    def pids(self, name):
        return [int(pid) for pid in ip("netns", "pids", name, check=False).split()]

    def left_behind(self):
        end = time.time() + 2
        while any(map(self.pids, self.names)) and time.time() < end:
            time.sleep(0.05)
        return [pid for name in self.names for pid in self.pids(name)]


class Node:
    """A launcher on a host. Notes when each line of its output has come."""

    def __init__(self, hosts, node, ranks, arguments, program):
        command = ["ip", "netns", "exec", hosts.names[node], RUN, "-n", str(ranks), "--nnodes", str(len(hosts.names)),
                   "--node-rank", str(node), "--master-addr", "10.77.0.1", "--master-port", "29500", *arguments, PROGRAM,
                   *program]
        self.process = subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                        env={**CLEAN, "OMP_NUM_THREADS": "1", "TANDEM_SECRET_FILE": SECRET.name},
                                        preexec_fn=end_with_the_test)
        self.lines = []
        self.reader = threading.Thread(target=self.read)
        self.reader.start()

    def read(self):
        for line in self.process.stdout:
            self.lines.append((time.time(), line.rstrip("\n")))

    def when(self, pattern):
        return next((at for at, line in list(self.lines) if re.search(pattern, line)), None)

    def wait_for(self, pattern, seconds=60):
        end = time.time() + seconds
        while self.when(pattern) is None:
            assert time.time() < end, f"'{pattern}' did not come:\n{self}"
            time.sleep(0.02)

    def finish(self):
        try:
            code = self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        finally:
            self.reader.join(timeout=10)
        return code

    def __str__(self):
        return "\n".join(f"{at:.2f} {line}" for at, line in self.lines)


def start(hosts, ranks, arguments, *program):
    return [Node(hosts, k, n, arguments, [str(p) for p in program]) for k, n in enumerate(ranks)]


def weights(text):
    return sorted(re.findall(r"weights (\w+) by (\w+)", text))


def on_one_host():
    done = subprocess.run([RUN, "-n", "4", PROGRAM, "12"], capture_output=True, text=True, timeout=60,
                          env={**CLEAN, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done
    found = weights(done.stdout)
    assert len(found) == 4 and set(found) == {(found[0][0], "shm")}, done
    return found[0][0]


def check_same_bits(ranks, expected):
    with Hosts(len(ranks)) as hosts:
        nodes = start(hosts, ranks, [], 12)
        codes = [n.finish() for n in nodes]
        text = "\n".join(map(str, nodes))
        assert not any(codes) and weights(text) == [(expected, "gloo")] * 4, text
        assert all(n.when(f"tandem: node {k} of {len(ranks)} ends with exit code 0") for k, n in enumerate(nodes)), text
        assert not hosts.left_behind()
    print(f"{ranks} ranks on {len(ranks)} hosts: the same bits as on one", flush=True)


def check_restart(expected):
    with Hosts(2) as hosts:
        nodes = start(hosts, [2, 2], ["--max-restarts", "1"], 12, 0, 3)
        codes = [n.finish() for n in nodes]
        text = "\n".join(map(str, nodes))
        assert not any(codes) and weights(text) == [(expected, "gloo")] * 4, text
        for n in nodes:
            assert n.when(r"the job has failed: rank 3 of 4 failed with exit code 5 \(host .*, node 1\)"), text
            assert n.when("restart 1 of 1"), text
        assert not hosts.left_behind()
    print("a restart on two hosts: the same bits", flush=True)


def check_cut_off():
    timeout = 5
    with Hosts(3) as hosts:
        nodes = start(hosts, [2, 1, 1], ["--timeout", str(timeout), "--max-restarts", "3"], 1000000, 5)
        for n in nodes:
            n.wait_for("step 20$")
        cut = time.time()
        ip("-n", hosts.names[2], "link", "set", "eth0", "down")
        codes = [n.finish() for n in nodes]
        text = "\n".join(map(str, nodes))
        assert all(codes), text
        limit = cut + timeout + 2
        for k, ranks in enumerate(([0, 1], [2])):
            for r in ranks:
                assert (nodes[k].when(rf"\[{r}\] rank {r} of 4: .*rank 3") or limit + 1) < limit, (r, text)
            assert (nodes[k].when(r"tandem: node 2 of 3 with rank 3 is gone or cut off: nothing was heard from its "
                                  rf"launcher for {timeout} s") or limit + 1) < limit, text
            assert nodes[k].when("the job has failed: node 2 of 3 with rank 3 is gone"), text
        assert (nodes[2].when(r"\[3\] rank 3 of 4: ") or limit + 1) < limit, text
        assert (nodes[2].when("tandem: node 0 of 3 with ranks 0 to 1 is gone or cut off") or limit + 1) < limit, text
        assert "restart" not in text and not hosts.left_behind(), text
    print("a host that is cut off: named by all others", flush=True)


def check_lost_launcher():
    with Hosts(2) as hosts:
        nodes = start(hosts, [1, 1], ["--timeout", "5"], 1000000, 5)
        for n in nodes:
            n.wait_for("step 20$")
        lost = time.time()
        nodes[0].process.kill()  # ip netns exec has become the launcher
        nodes[0].finish()
        assert nodes[1].finish() != 0 and time.time() < lost + 7, nodes[1]
        assert nodes[1].when("the job has failed: node 0 of 2 with rank 0 "), nodes[1]
        assert nodes[1].when(r"\[1\] rank 1 of 2: "), nodes[1]
        assert not hosts.left_behind(), nodes[1]
    print("a launcher that is killed: named by the other, and its ranks end", flush=True)


for number in ENDING:
    signal.signal(number, end)
if os.geteuid() != 0:
    print("skipped: network namespaces need root")
    sys.exit(77)
try:
    with Hosts(1):
        pass
except (OSError, subprocess.CalledProcessError) as e:
    print(f"skipped: network namespaces cannot be made here: {getattr(e, 'stderr', None) or e}")
    sys.exit(77)
with tempfile.NamedTemporaryFile("w") as SECRET:
    SECRET.write(secrets.token_hex(32))
    SECRET.flush()
    bits = on_one_host()
    check_same_bits([2, 2], bits)
    check_same_bits([2, 1, 1], bits)
    check_restart(bits)
    check_cut_off()
    check_lost_launcher()

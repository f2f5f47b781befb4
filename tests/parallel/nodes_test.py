#!/usr/bin/env python3
"""Launchers of one job, as on several hosts, that meet on loopback: places, restarts, failures, signals, and errors.

usage: nodes_test.py TANDEM_RUN
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time

from processes import finish, free_port

RUN = sys.argv[1]
SHELL = ["sh", "-c"]
CLEAN = {k: v for k, v in os.environ.items() if not re.match("OMP_NUM_THREADS|TANDEM_|RANK|WORLD_SIZE", k)}


def start(port, node, nodes, *arguments, secret=None):
    place = ["--nnodes", nodes, "--node-rank", node, "--master-addr", "127.0.0.1", "--master-port", port]
    return subprocess.Popen([RUN, *map(str, [*place, *arguments])], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            text=True, env={**CLEAN, "OMP_NUM_THREADS": "1", "TANDEM_SECRET_FILE": secret or SECRET})


def job(ranks, *arguments):
    """A launcher for each number of ranks."""
    port = free_port()
    return [start(port, k, len(ranks), "-n", n, *arguments) for k, n in enumerate(ranks)]


def check_places():
    done = finish(job([1, 3, 2], *SHELL, "echo $RANK $LOCAL_RANK $GROUP_RANK $ROLE_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE "
                                         "$ROLE_WORLD_SIZE; echo id $TORCHELASTIC_RUN_ID at $MASTER_PORT"))
    lines = [l for _, out, _ in done for l in out.splitlines()]
    places = [(0, 0, 0, 1), (1, 0, 1, 3), (2, 1, 1, 3), (3, 2, 1, 3), (4, 0, 2, 2), (5, 1, 2, 2)]
    expected = [f"[{r}] {r} {local} {node} {r} 6 {count} 6" for r, local, node, count in places]
    assert sorted(l for l in lines if "id" not in l) == expected, done
    assert len({l.split("id")[1] for l in lines if "id" in l}) == 1, done
    for k, (code, _, err) in enumerate(done):
        assert code == 0 and err == f"tandem: node {k} of 3 ends with exit code 0\n", done


def check_restarts():
    program = "echo try $RESTART_COUNT; echo job $TORCHELASTIC_RUN_ID; [ $RANK = 2 ] && exit $((2 - RESTART_COUNT)); sleep 0.3; exit 0"
    done = finish(job([1, 2], "--max-restarts", 2, *SHELL, program))
    for (code, out, err), ranks in zip(done, ([0], [1, 2])):
        tries = sorted(line for line in out.splitlines() if "try" in line)
        assert code == 0 and tries == [f"[{r}] try {k}" for r in ranks for k in range(3)], done
        assert "rank 2 of 3 failed with exit code 2" in err and "tandem: restart 2 of 2\n" in err, done
    jobs = re.findall(r"^\[\d\] job (\w+)$", "".join(out for _, out, _ in done), re.MULTILINE)
    assert len(jobs) == 9 and len(set(jobs)) == 1, done
    done = finish(job([1, 2], "--max-restarts", 1, *SHELL, "[ $RANK = 0 ] && exit $((7 + RESTART_COUNT)); sleep 0.3"))
    assert [code for code, _, _ in done] == [8, 8] and all(err.count("restart 1 of 1\n") == 1 for _, _, err in done)


def check_failures():
    done = finish(job([2, 1], *SHELL, "[ $RANK = 2 ] && echo last words && kill -9 $$; exec sleep 1000"))
    for code, _, err in done:
        assert code == 137 and "tandem: rank 2 of 3 was killed by signal 9 (Killed); the other ranks are ended\n" in err
        assert re.search(r"the job has failed: rank 2 of 3 was killed by signal 9 \(Killed\) \(host .*, node 1\); its "
                         r"last lines:\n  \| last words\n", err), done
    # What others make of the first failure does not come before it.
    for _ in range(3):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "pid")
            done = finish(job([1, 1], *SHELL, f"[ $RANK = 0 ] && {{ echo $$ > {path}.new; mv {path}.new {path}; sleep 0.3; exit 3; }}; "
                                              f"until [ -e {path} ]; do sleep 0.01; done; "
                                              f"while kill -0 $(cat {path}); do :; done 2> /dev/null; sleep 0.02; exit 9"))
        assert [code for code, _, _ in done] == [3, 3], done
    # One that fails when the ranks of another node have ended already.
    done = finish(job([1, 1], *SHELL, "[ $RANK = 0 ] || { sleep 1; exit 3; }"))
    assert [code for code, _, _ in done] == [3, 3] and "rank 1 of 2 failed with exit code 3" in done[0][2], done


def check_signals():
    for receiver in (0, 1):
        launchers = job([1, 1], "--max-restarts", 3, *SHELL, "echo up; trap 'exit 0' TERM; while true; do sleep 0.1; done")
        for l in launchers:
            assert l.stdout.readline().endswith("up\n")
        launchers[receiver].send_signal(signal.SIGTERM)
        done = finish(launchers)
        assert [code for code, _, _ in done] == [143, 143], done
        assert all("the launcher got signal 15 (Terminated); the " in err and "restart" not in err for *_, err in done), done
    alone = start(free_port(), 0, 2, "true")  # while it waits for the others
    time.sleep(0.5)
    alone.send_signal(signal.SIGINT)
    assert finish([alone])[0][0] == 130


def check_lost():
    for victim, other in ((0, 1), (1, 0)):
        launchers = job([1, 1], "--timeout", 30, *SHELL, "echo up; exec sleep 1000")
        for l in launchers:
            assert l.stdout.readline().endswith("up\n")
        begin = time.time()
        launchers[victim].kill()
        done = finish(launchers)
        assert done[other][0] == 1 and time.time() - begin < 10, done
        how = ("has ended, and with it the job's store" if victim == 0
               else "has lost its launcher")
        assert f"the job has failed: node {victim} of 2 with rank {victim} {how} (host " in done[other][2], done
        assert f"then rank {other} of 2 was ended by the launcher" in done[other][2], done


def check_stopped():
    launchers = job([1, 1], "--timeout", 2, *SHELL, "echo up; exec sleep 1000")
    for l in launchers:
        assert l.stdout.readline().endswith("up\n")
    launchers[1].send_signal(signal.SIGSTOP)
    time.sleep(3)
    launchers[1].send_signal(signal.SIGCONT)
    done = finish(launchers)
    assert done[0][0] == 1 and done[1][0] != 0, done
    assert "node 1 of 2 with rank 1 is gone or cut off: nothing was heard from its launcher for 2 s" in done[0][2], done
    assert "node 0 of 2 with rank 0 is gone" not in done[1][2], "it was this one that was stopped"


def check_errors():
    (code, out, err), = finish([start(free_port(), 0, 3, "--timeout", 1, "echo")])
    assert code == 1 and not out and err == (
        "tandem: node 0 of 3: waited 1 s for nodes 1 and 2, which did not come; start tandem-run there with the same --nnodes, "
        "--master-addr and --master-port; a longer wait is set by --timeout\n"), err
    port = free_port()
    (code, out, err), = finish([start(port, 1, 2, "--timeout", 1, "echo")])
    assert code == 1 and not out and err == (
        f"tandem: node 1 of 2: waited 1 s for the launcher of node 0 at 127.0.0.1:{port}, which did not come; see that it runs, "
        "and that --master-addr and --master-port are the same on every node\n"), err
    port = free_port()
    done = finish([start(port, k, 2, "--timeout", 3, "--max-restarts", k, "echo") for k in range(2)])
    assert any(f"node {k} of 2: the nodes disagree: this one was given --nnodes 2 --max-restarts {k}, node {1 - k} was "
               f"given --nnodes 2 --max-restarts {1 - k}\n" in done[k][2] for k in range(2)), done
    assert all(code == 1 and not out for code, out, _ in done), done
    port = free_port()
    done = finish([start(port, k, 3, "--timeout", 3, "echo") for k in (0, 1, 1)])
    assert any(re.search("node 1 of 3: host .* has come as node 1 already; give each node its own --node-rank", err)
               for *_, err in done[1:]), done
    with tempfile.NamedTemporaryFile("w") as other:
        other.write("another secret, which is not the job's")
        other.flush()
        port = free_port()
        done = finish([start(port, 0, 2, "--timeout", 3, "echo"),
                       start(port, 1, 2, "--timeout", 3, "echo", secret=other.name)])
        assert "node 1 of 2: " in done[1][2] and "did not accept this process's secret" in done[1][2], done
        assert all(code == 1 and not out for code, out, _ in done), done
        os.chmod(other.name, 0o644)
        (code, out, err), = finish([start(port, 0, 2, "echo", secret=other.name)])
        assert code == 1 and "protect it with: chmod 600" in err, err


with tempfile.TemporaryDirectory() as folder:
    SECRET = os.path.join(folder, "secret")
    subprocess.run([*SHELL, f"umask 077; head -c 20 /dev/urandom | od -An -tx1 | tr -d ' \\n' > {SECRET}"], check=True)
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            begin = time.time()
            check()
            print(f"{name[6:].replace('_', ' ')}: passed in {time.time() - begin:.1f} s", flush=True)

#!/usr/bin/env python3
"""tandem-run: its options, the environment and output of ranks, failures, restarts, signals, and nothing left behind.

usage: launcher_test.py TANDEM_RUN
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time

from processes import alive

RUN = sys.argv[1]
SHELL = ["sh", "-c"]
CLEAN = {k: v for k, v in os.environ.items() if not re.match("OMP_NUM_THREADS|TANDEM_|RANK|WORLD_SIZE", k)}
CORES = len(os.sched_getaffinity(0))


def start(*arguments, **variables):
    return subprocess.Popen([RUN, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            env={**CLEAN, "OMP_NUM_THREADS": "1", **variables})


def finish(process):
    try:
        out, err = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def run(*arguments, **variables):
    return finish(start(*arguments, **variables))


def all_end(pids, seconds=10):
    end = time.time() + seconds
    while any(map(alive, pids)) and time.time() < end:
        time.sleep(0.02)
    return not any(map(alive, pids))


def numbers(process, count):
    """The numbers in so many lines of output, such as the ids of processes."""
    return [int(process.stdout.readline().split()[-1]) for _ in range(count)]


def text_of(*path):
    with open(os.path.join(*path), encoding="utf-8") as file:
        return file.read()


def check_environment():
    names = ("RANK LOCAL_RANK GROUP_RANK ROLE_RANK WORLD_SIZE LOCAL_WORLD_SIZE ROLE_WORLD_SIZE MASTER_ADDR RESTART_COUNT "
             "TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS TANDEM_TIMEOUT").split()
    echo = "echo " + " ".join("$" + n for n in names) + "; printf end >&2"
    done = run("-n", 3, "--max-restarts", 4, "--timeout", 7.5, *SHELL, echo)
    assert done.returncode == 0, done
    lines = sorted(done.stdout.splitlines())
    assert [l for l in lines if "end" not in l] == [f"[{r}] {r} {r} 0 {r} 3 3 3 127.0.0.1 0 0 4 7.5" for r in range(3)]
    assert sum(l.endswith("] end") for l in lines) == 3, lines
    done = run("-n", 2, *SHELL, "echo $TANDEM_TIMEOUT $MASTER_PORT $TORCHELASTIC_RUN_ID ${#TANDEM_SECRET} $TANDEM_SECRET")
    own, other = (l.split()[1:] for l in done.stdout.splitlines())
    assert own == other and own[0] == "30" and int(own[1]) > 0 and len(own[2]) == 16 and own[3] == "64", done
    again = run("-n", 1, *SHELL, "echo $TANDEM_SECRET", TANDEM_TIMEOUT="12").stdout.split()[1]
    assert again != own[4], "each job has a secret of its own"
    assert run("-n", 1, *SHELL, "echo $TANDEM_TIMEOUT", TANDEM_TIMEOUT="12").stdout == "[0] 12\n"
    with tempfile.NamedTemporaryFile("w") as secret:  # made with mode 0600
        secret.write("secret" * 6)
        secret.flush()
        done = run("-n", 1, *SHELL, "echo \"$TANDEM_SECRET_FILE ${TANDEM_SECRET-none}\"", TANDEM_SECRET_FILE=secret.name)
        assert done.stdout == f"[0] {secret.name} none\n", done


def check_cores():
    def announced(*arguments):
        environment = {k: v for k, v in CLEAN.items()}
        return subprocess.run([RUN, *arguments], capture_output=True, text=True, env=environment, timeout=60)
    done = announced("-n", "2", *SHELL, "echo $OMP_NUM_THREADS")
    threads = max(1, CORES // 2)
    assert done.stderr == (f"tandem: {CORES} cores for 2 ranks: {threads} thread{'' if threads == 1 else 's'} each "
                           "(set OMP_NUM_THREADS to change that)\n"), done
    assert sorted(done.stdout.splitlines()) == [f"[{r}] {threads}" for r in range(2)], done
    done = announced("-n", "cpu", *SHELL, "echo $WORLD_SIZE")
    assert len(done.stdout.splitlines()) == CORES and f"[0] {CORES}\n" in done.stdout, done
    done = run("-n", 1, *SHELL, "echo $OMP_NUM_THREADS", OMP_NUM_THREADS="")
    assert done.stdout == f"[0] {CORES}\n", "an empty text is no number"
    done = run("-n", 1, *SHELL, "echo $OMP_NUM_THREADS", OMP_NUM_THREADS="7")
    assert done.stdout == "[0] 7\n" and not done.stderr, done


def check_command_line():
    done = run("-n", 2, *SHELL, "echo \"$@\"", "x", "--", "-n", "3", "--help")
    assert sorted(done.stdout.splitlines()) == ["[0] -- -n 3 --help", "[1] -- -n 3 --help"], done
    assert run("--nproc-per-node=2", "--", *SHELL, "echo $RANK").stdout.count("\n") == 2
    for arguments, text in [
        (["-n", "x", "true"], "-n is 'x'; it must be a number of processes from 1 up, cpu (one a core), or gpu"),
        (["-n", "0", "true"], "-n is '0'"),
        (["-n", "-3", "true"], "-n is '-3'"),
        (["-n", "2x", "true"], "-n is '2x'"),
        (["-n", "5000", "true"], "5000 processes on a host were asked for; give 1 to 4096"),
        (["--unknown", "true"], "there is no option --unknown"),
        (["-n", "2"], "there is no program to start"),
        (["-n", "2", "--"], "there is no program to start"),
        (["-n"], "-n"),
        (["--max-restarts", "-1", "true"], "-1 restarts were asked for"),
        (["--max-restarts", "many", "true"], "--max-restarts"),
        (["--timeout", "-1", "true"], "timeout_seconds is -1; it must be positive"),
        (["--timeout", "1e-9", "true"], "a timeout of 1e-09 s was asked for; give 0.1 s or more"),
        (["--log-dir", "", "true"], "--log-dir is empty"),
        (["--nnodes", "1000000", "--node-rank", "999999", "true"], "1000000 nodes were asked for; give 1 to 65536"),
        (["--timeout", "nan", "true"], "timeout_seconds is nan; it must be positive"),
        (["--nnodes", "0", "true"], "0 nodes were asked for"),
        (["--node-rank", "1", "true"], "node rank 1 is out of range: give 0 to 0"),
        (["--master-port", "70000", "true"], "port 70000 is out of range"),
        (["--nnodes", "2", "true"], "several nodes need --master-addr"),
        (["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", "1", "true"],
         "several nodes need a secret, so that nobody else can join; make one with: (umask 077; openssl rand -hex 32 > "),
        (["--tee", "true"], "give --log-dir too"),
    ]:
        done = run(*arguments)
        assert done.returncode == 2 and text in done.stderr and not done.stdout, done
        assert done.stderr.endswith("\ntandem-run --help lists the options\n"), done
        dry = run("--dry-run", *arguments)
        assert dry.returncode == 2 and text in dry.stderr, dry
    done = run("true", TANDEM_TIMEOUT="soon")
    assert done.returncode == 2 and "TANDEM_TIMEOUT is 'soon'; it must be a positive number of seconds" in done.stderr
    done = run("-n", "gpu", *SHELL, "exit 0")
    assert done.returncode == 0 or "-n gpu starts one process a GPU, and there is none here" in done.stderr, done
    done = run("--help")
    for option in ("--nproc-per-node", "--nnodes", "--node-rank", "--master-addr", "--master-port", "--max-restarts",
                   "--log-dir", "--tee", "--timeout", "--dry-run"):
        assert option in done.stdout, option
    assert done.returncode == 0 and "Usage: tandem-run [OPTIONS] PROGRAM [ARGUMENTS...]" in done.stdout, done
    limited = subprocess.run([*SHELL, f"ulimit -n 40; exec {RUN} -n 60 true"], capture_output=True, text=True, timeout=60)
    assert limited.returncode == 1 and "Too many open files; start fewer ranks, or raise `ulimit -n`" in limited.stderr


def check_dry_run():
    done = run("-n", 2, "--nnodes", 2, "--node-rank", 1, "--master-addr", "10.0.0.1", "--master-port", 29500, "--dry-run",
               "--max-restarts", 3, "--timeout", 5, "./no such program", "it's", TANDEM_SECRET_FILE="/no/file")
    expected = ["RANK={0} LOCAL_RANK={1} GROUP_RANK=1 ROLE_RANK={0} WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 ROLE_WORLD_SIZE=4 "
                "MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 TANDEM_LAUNCHER_STORE=1 RESTART_COUNT=0 "
                "TORCHELASTIC_RESTART_COUNT=0 TORCHELASTIC_MAX_RESTARTS=3 TORCHELASTIC_RUN_ID='(random)' "
                "TANDEM_TIMEOUT=5 TANDEM_LAUNCHER_ID='(random)' './no such program' 'it'\\''s'".format(2 + r, r) for r in range(2)]
    expected.append("# if each of the 2 nodes has 2 ranks (-n)")
    assert done.returncode == 0 and done.stdout.splitlines() == expected, done
    done = run("--dry-run", "true")
    assert "MASTER_ADDR=127.0.0.1 MASTER_PORT='(given by the system)'" in done.stdout, done
    assert done.stdout.endswith("TANDEM_SECRET='(random)' TANDEM_LAUNCHER_ID='(random)' true\n"), done


def check_failures():
    done = run("-n", 2, *SHELL, "[ $RANK = 1 ] && { seq 20; exit 5; }; trap 'echo asked to end; exit 4' TERM; sleep 30 & wait")
    assert done.returncode == 5 and "[0] asked to end\n" in done.stdout, done
    first, report = "tandem: rank 1 of 2 failed with exit code 5", "tandem: the job has failed: rank 1 of 2 failed with exit code 5"
    assert done.stderr.startswith(first + "; the other ranks are ended\n" + report + " (host "), done
    assert done.stderr.split(report)[1].startswith(f" (host {os.uname().nodename}); its last lines:\n" +
                                                   "".join(f"  | {i}\n" for i in range(11, 21))), done
    assert "\ntandem: then rank 0 of 2 ended with exit code 4\n" in done.stderr, done
    done = run("-n", 2, *SHELL, "[ $RANK = 0 ] && kill -9 $$; sleep 30")
    assert done.returncode == 137 and "tandem: rank 0 of 2 was killed by signal 9 (Killed);" in done.stderr, done
    assert "\ntandem: then rank 1 of 2 was ended by the launcher\n" in done.stderr, done
    begin = time.time()  # a rank that does not want to end
    done = run("-n", 2, *SHELL, "[ $RANK = 0 ] && exit 3; trap '' TERM; while true; do sleep 0.1; done")
    assert done.returncode == 3 and time.time() - begin >= 6, done
    # Ranks that have ended early with 0 end nobody; what the others make of it is their affair.
    done = run("-n", 2, *SHELL, "[ $RANK = 0 ] && exit 0; sleep 4; echo through")
    assert done.returncode == 0 and done.stdout == "[1] through\n" and not done.stderr, done
    done = run("-n", 1, "/no/such/program")
    assert done.returncode == 127 and "tandem: cannot start /no/such/program: no such program" in done.stdout, done
    assert "  | tandem: cannot start /no/such/program: no such program\n" in done.stderr, done
    with tempfile.TemporaryDirectory() as folder:
        script = os.path.join(folder, "no-interpreter")
        with open(script, "w", encoding="ascii") as file:
            file.write("#!/no/such/interpreter\n")
        os.chmod(script, 0o755)
        for name in (script, "no-interpreter"):
            done = run("-n", 1, name, PATH=CLEAN["PATH"] + ":" + folder)
            assert done.returncode == 127 and f"tandem: cannot start {name}: the interpreter that its first line (#!)" in done.stdout, done
    done = run("-n", 1, "/etc/passwd")
    assert done.returncode == 127 and "tandem: cannot start /etc/passwd: it is not an executable file" in done.stdout, done


def check_output():
    with open("/dev/full", "w", encoding="ascii") as full:  # output that cannot be written ends no rank
        for program, code in [("seq 3000", 1), ("seq 3000; exit $((7 * $RANK))", 7)]:
            done = subprocess.run([RUN, "-n", "2", *SHELL, program], stdout=full, stderr=subprocess.PIPE, text=True,
                                  timeout=60)
            assert done.returncode == code and done.stderr.count(
                "tandem: the ranks' output cannot be written: No space left on device\n") == 1, done
    done = run("-n", 1, *SHELL, "head -c 200000 /dev/zero | tr '\\0' x; echo; echo end")
    assert done.stdout.count("x") == 200000 and done.stdout.endswith("[0] end\n"), "a very long line"
    done = subprocess.run([RUN, "-n", "2", *SHELL, "cat; readlink /proc/self/fd/0"], input="text", capture_output=True,
                          text=True, timeout=60)
    assert sorted(done.stdout.splitlines()) == ["[0] /dev/null", "[1] /dev/null"], "standard input is empty"
    done = run("-n", 2, *SHELL, "ls /proc/self/fd | wc -l")
    assert done.stdout.split()[1::2] == ["4", "4"], "ranks inherit the standard streams alone"


def check_closed_output():
    # A long line whose rest would be a message to another process, if that had got the descriptor.
    line = "[ $RANK = 0 ] && head -c 4092 /dev/zero | tr '\\0' x && echo; sleep 0.3; exit $((7 * $RANK))"
    for ranks, code in [(1, 1), (2, 7)]:
        done = run_closed("-n", ranks, *SHELL, line)
        assert done.returncode == code and "tandem: the ranks' output cannot be written: Bad file descriptor\n" in done.stderr, done
    assert run_closed("--dry-run", "true").returncode == 1
    with tempfile.TemporaryDirectory() as folder:
        assert run_closed("-n", 1, "--log-dir", folder, *SHELL, "echo text").returncode == 0
        assert text_of(folder, "rank-0.log") == "text\n"


def run_closed(*arguments):
    return subprocess.run([*SHELL, 'exec "$@" >&-', "sh", RUN, *map(str, arguments)], stderr=subprocess.PIPE, text=True,
                          timeout=60, env={**CLEAN, "OMP_NUM_THREADS": "1"}, check=False)


def check_unread_output():
    # Nobody reads: deaths, graces and signals are seen to all the same.
    job = start("-n", 2, "--max-restarts", 1, *SHELL, "[ $RANK = 0 ] && { sleep 0.5; exit 3; }; exec yes")
    deaf = threading.Timer(30, job.kill)
    deaf.start()
    assert any("restart 1 of 1" in line for line in job.stderr), "the launcher did not act"
    deaf.cancel()
    job.send_signal(signal.SIGTERM)
    assert job.wait(timeout=20) == 143
    job.stdout.close()
    job.stderr.close()
    # Whoever reads late gets all of it.
    job = start("-n", 1, *SHELL, "seq 200000")
    time.sleep(1)
    assert job.poll() is None
    done = finish(job)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 200000, done.returncode


def check_logs():
    with tempfile.TemporaryDirectory() as folder:
        logs = os.path.join(folder, "a", "logs")
        done = run("-n", 2, "--log-dir", logs, "--max-restarts", 1, *SHELL,
                   "echo rank $RANK try $RESTART_COUNT; echo error >&2; [ $RESTART_COUNT = 1 ] || exit 4")
        assert done.returncode == 0 and done.stdout == "" and "  | error\n" in done.stderr, done
        for rank in range(2):
            assert text_of(logs, f"rank-{rank}.log") == f"rank {rank} try 0\nerror\n"
            assert text_of(logs, "restart-1", f"rank-{rank}.log") == f"rank {rank} try 1\nerror\n"
        done = run("-n", 2, "--log-dir", logs, "--tee", *SHELL, "printf no-newline")
        assert sorted(done.stdout.splitlines()) == ["[0] no-newline", "[1] no-newline"], done
        assert text_of(logs, "rank-1.log") == "no-newline\n" and done.returncode == 0, done
        # Where logs cannot be written, that is said, the lines go to the terminal, and no rank ends.
        done = run("-n", 2, "--log-dir", "/proc/logs", *SHELL, "echo text; sleep 0.2; echo through")
        assert done.returncode == 1 and done.stdout.count("] through") == 2, done
        assert re.fullmatch("tandem: the folder '/proc/logs' for logs cannot be made: .*; the ranks' output goes to the "
                            "terminal\n", done.stderr), done
        os.remove(os.path.join(logs, "rank-0.log"))
        os.symlink("/dev/full", os.path.join(logs, "rank-0.log"))
        done = run("-n", 2, "--log-dir", logs, *SHELL, "echo text; sleep 0.2; echo through")
        assert done.returncode == 1 and "[0] through" in done.stdout and "[1]" not in done.stdout, done
        assert done.stderr == (f"tandem: the log '{logs}/rank-0.log' cannot be written: No space left on device; the "
                               "rank's output goes to the terminal\n"), done
        os.remove(os.path.join(logs, "rank-0.log"))
        os.mkdir(os.path.join(logs, "rank-0.log"))
        done = run("-n", 1, "--log-dir", logs, *SHELL, "echo through")
        assert done.returncode == 1 and done.stdout == "[0] through\n" and "Is a directory" in done.stderr, done


def check_restarts():
    done = run("-n", 3, "--max-restarts", 3, *SHELL,
               "echo $RANK $RESTART_COUNT $TORCHELASTIC_RESTART_COUNT; echo job $TORCHELASTIC_RUN_ID; "
               "[ $RANK = 1 ] && exit $((2 - RESTART_COUNT)); sleep 0.2; exit 0")
    assert done.returncode == 0, done
    jobs = [line.split()[-1] for line in done.stdout.splitlines() if "job" in line]
    assert len(jobs) == 9 and len(set(jobs)) == 1, jobs
    assert sorted(line for line in done.stdout.splitlines() if "job" not in line) == sorted(f"[{r}] {r} {k} {k}" for r in range(3) for k in range(3)), done
    assert done.stderr.count("the job has failed: rank 1 of 3 failed with exit code") == 2, done
    assert "tandem: restart 1 of 3\n" in done.stderr and "tandem: restart 2 of 3\n" in done.stderr, done
    done = run("-n", 2, "--max-restarts", 2, *SHELL, "echo $RESTART_COUNT; exit $((10 + RESTART_COUNT))")
    assert done.returncode == 12 and len(done.stdout.splitlines()) == 6 and done.stderr.count("restart ") == 2, done


def check_signals():
    job = start("-n", 2, *SHELL, "trap 'echo got USR1' USR1; trap 'echo got USR2; exit 0' USR2; echo $$; "
                                 "while true; do sleep 0.05; done")
    numbers(job, 2)
    job.send_signal(signal.SIGUSR1)
    assert sorted(job.stdout.readline() for _ in range(2)) == ["[0] got USR1\n", "[1] got USR1\n"]
    job.send_signal(signal.SIGUSR2)
    done = finish(job)
    assert done.returncode == 0 and sorted(done.stdout.splitlines()) == ["[0] got USR2", "[1] got USR2"], done
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        name = number.name[3:]
        job = start("-n", 2, "--max-restarts", 3, *SHELL, f"trap 'echo got {name}; exit 9' {name}; echo $$; "
                                                          "while true; do sleep 0.05; done")
        pids = numbers(job, 2)
        job.send_signal(number)
        done = finish(job)
        assert done.returncode == 128 + number and done.stdout.count("got " + name) == 2, done
        assert "restart" not in done.stderr and f"the launcher got signal {int(number)} (" in done.stderr, done
        assert not any(map(alive, pids))
    # A second one does not wait.
    job = start("-n", 2, *SHELL, "trap '' TERM INT; echo $$; while true; do sleep 0.05; done")
    pids = numbers(job, 2)
    begin = time.time()
    job.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    job.send_signal(signal.SIGTERM)
    assert finish(job).returncode == 143 and time.time() - begin < 3 and not any(map(alive, pids))
    # Another one comes from a launcher around this one, which has its own times.
    job = start("-n", 1, *SHELL, "trap 'echo got INT' INT; trap 'sleep 0.3; echo got TERM; exit 0' TERM; echo $$; "
                                 "while true; do sleep 0.05; done")
    numbers(job, 1)
    job.send_signal(signal.SIGINT)
    assert job.stdout.readline() == "[0] got INT\n"
    job.send_signal(signal.SIGTERM)
    done = finish(job)
    assert done.returncode == 130 and done.stdout.endswith("[0] got TERM\n"), done
    # What is ignored, as under nohup, stays ignored.
    job = subprocess.Popen([*SHELL, f"trap '' HUP; exec {RUN} -n 1 sh -c 'echo $$; sleep 1; echo through'"],
                           stdout=subprocess.PIPE, text=True)
    numbers(job, 1)
    job.send_signal(signal.SIGHUP)
    assert "through" in job.communicate(timeout=60)[0] and job.returncode == 0


def check_nothing_is_left():
    # A wrapper, whose child is not the launcher's; a child in the background; one that holds the output open.
    wrapper, background = "sh -c 'echo $$; exec sleep 1000'; true", "sleep 1000 & echo $!; "
    for number in (signal.SIGKILL, signal.SIGTERM):
        job = start("-n", 2, *SHELL, background + wrapper)
        pids = numbers(job, 4)
        assert all(map(alive, pids)), pids
        job.send_signal(number)
        job.wait(timeout=60)
        assert all_end(pids, 2), (number, pids)
        job.communicate(timeout=60)
    job = start("-n", 2, *SHELL, background + "[ $RANK = 0 ] || sleep 1; exit 0")
    pids = numbers(job, 2)
    assert finish(job).returncode == 0 and all_end(pids, 2), "what a rank leaves ends with it"
    job = start("-n", 2, *SHELL, background + "[ $RANK = 1 ] && exit 2; sleep 1000")
    pids = numbers(job, 2)
    assert finish(job).returncode == 2 and all_end(pids, 2)
    # Groups and sessions of its own, as timeout and setsid make them, change nothing.
    own = "timeout 1000 sh -c 'echo $$; exec sleep 1000' & setsid sh -c 'echo $$; exec sleep 1000' & sleep 1; "
    for end in ("exit 0", "exit 3"):
        job = start("-n", 1, *SHELL, own + end)
        pids = numbers(job, 2)
        assert finish(job).returncode == int(end[-1]) and all_end(pids, 2), end
    # A guardian that somebody has killed is replaced.
    job = start("-n", 1, *SHELL, own + "sleep 1000")
    pids = numbers(job, 2)
    first = guardian_of(job.pid)
    os.kill(first, signal.SIGKILL)
    end = time.time() + 10
    while guardian_of(job.pid) in (None, first) and time.time() < end:
        time.sleep(0.02)
    job.kill()
    job.wait(timeout=60)
    assert all_end(pids, 5), pids
    job.communicate(timeout=60)


def guardian_of(launcher):
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as command, open(f"/proc/{pid}/stat", encoding="ascii") as stat:
                if b"tandem-guardian" in command.read() and int(stat.read().rsplit(")", 1)[1].split()[1]) == launcher:
                    return int(pid)
        except OSError:
            pass
    return None


def check_two_jobs():
    jobs = [start("-n", 2, *SHELL, f"sleep 0.3; echo $MASTER_PORT {k}") for k in range(2)]
    done = [finish(j) for j in jobs]
    ports = [{l.split()[1] for l in d.stdout.splitlines()} for d in done]
    assert all(d.returncode == 0 for d in done) and len(ports[0]) == 1 and ports[0] != ports[1], done
    job = start("-n", 1, *SHELL, "echo $MASTER_PORT; exec sleep 1000")
    port = numbers(job, 1)[0]
    done = run("-n", 1, "--master-port", port, "true")
    assert done.returncode == 1 and f"cannot listen on 127.0.0.1:{port}: Address already in use" in done.stderr, done
    job.send_signal(signal.SIGTERM)
    assert finish(job).returncode == 143


for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, signal.SIG_DFL)  # a shell cannot trap what nohup has made ignored
signal.signal(signal.SIGINT, signal.default_int_handler)
for name, check in list(globals().items()):
    if name.startswith("check_"):
        begin = time.time()
        check()
        print(f"{name[6:].replace('_', ' ')}: passed in {time.time() - begin:.1f} s", flush=True)

#!/usr/bin/env python3
"""What breaks in a job, and what every rank then says: real processes, real signals, at the points of TANDEM_FAULT.

usage: failure_test.py PROGRAM TANDEM_RUN BACKEND|faults

Here are: a rank killed before init, in init, between steps, inside a collective, inside backward, while saving; stopped;
ending early with 0; throwing; late; calling another collective, another order, another shape; the launcher gone; shared
memory full. Each where it applies: under the launcher, without one (rank 0 holds the store), and with threads as ranks.
"faults" tests how TANDEM_FAULT is read.
A port in use and two jobs at once are in rendezvous_test.py, and so are rank 0 stopped with the store, and ranks that do
not come. shm_program and gloo_program have ranks lost beside others that are busy, pausing or unwinding. The launcher's
own part is in launcher_test.py, what is left of a run that is killed and started again in resume_test.py.
"""

import concurrent.futures
import contextlib
import dataclasses
import os
import pathlib
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time

from processes import free_port

PROGRAM, RUN, BACKEND = sys.argv[1:4]
RANKS = 3
VARIABLES = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TANDEM_FAULT",
             "RESTART_COUNT", "TANDEM_SECRET", "TANDEM_LAUNCHER_STORE"]
BASE = {k: v for k, v in os.environ.items() if k not in VARIABLES} | {"OMP_NUM_THREADS": "1"}
SLACK = 1.0  # seconds beyond what is promised, for a machine that is busy

NOT_COME = r"(waited 3 s in init_process_group for rank 1, which did not come|rank 1 did not come while this rank waited)"
IN_CALL = r"while this rank waited in \w+ \(.*call \d+\)"
JOINING = r"(while this rank waited (for the key '.*' in the store|in init_process_group for rank \d)|before it made the " \
          r"group|while this rank made the group|while this rank waited in barrier \(call 0\))"
DISAGREE = r"the ranks disagree: rank \d calls .* \(.*call \d+\).*, rank \d calls .*; every rank must call the same"
LATE = r"(has given up on rank \d|came to .*\(.*call \d+\).* after the other ranks had given up|" \
       rf"rank \d has (ended|left the job|left the group) {IN_CALL})"


@dataclasses.dataclass
class Case:
    name: str
    fault: str = ""
    victim: int = 1
    how: str = ""          # the end of the victim, as the launcher tells it
    where: str = IN_CALL   # what the survivors were doing
    program: tuple = ("train", "6")
    timeout: float = 30    # of the group
    silent: bool = False   # the victim lives, so that only the timeout tells
    on: str = "launcher hand"
    backends: str = "shm gloo"
    error: str = ""        # of every rank, in place of a loss
    victim_says: str = ""
    no_files: tuple = ()   # ranks that may not make large files
    harmless: bool = False


KILLED = r"was killed by signal 9 \(Killed\)"
SUMS = ("sums",)
CASES = [
    Case("nothing", program=("train", "6"), backends="shm gloo thread"),
    Case("a save that is longer than the timeout", "delay rank=0 save=2 seconds=4", timeout=2, harmless=True,
         program=("train", "3", "FILE"), backends="shm gloo thread"),
    # Killed.
    Case("before init", "kill rank=1 start", 1, KILLED, JOINING, on="launcher"),
    Case("in init", "delay rank=1 init seconds=0.5; kill rank=1 init", 1, KILLED, JOINING),
    Case("the group is made", "kill rank=2 group", 2, KILLED, JOINING),
    Case("between steps", "kill rank=1 step=3", 1, KILLED),
    Case("rank 0 between steps", "kill rank=0 step=3", 0, KILLED),
    Case("inside backward", "kill rank=2 backward=3", 2, KILLED),
    Case("inside a collective", "kill rank=1 collective=4", 1, KILLED, program=SUMS),
    Case("rank 0 inside a collective", "kill rank=0 collective=4", 0, KILLED, program=SUMS),
    Case("while saving", "kill rank=0 save=3", 0, KILLED, program=("train", "6", "FILE")),
    Case("inside the step of a divided optimizer", "kill rank=1 step=3", 1, KILLED, program=("zero", "6")),
    Case("while shadowing others", "kill rank=0 backward=4", 0, KILLED, program=("join", "6")),
    Case("beside a rank that shadows", "kill rank=1 step=4", 1, KILLED, program=("join", "6")),
    Case("while saving a divided optimizer", "kill rank=0 save=3", 0, KILLED, program=("zero", "6", "FILE"), on="launcher"),
    # Silent. A rank that never came to a store is one of these, where no launcher watches it.
    Case("no launcher, and killed before init", "kill rank=1 start", 1, silent=True, timeout=3, on="hand",
         where=NOT_COME, program=("train", "6", "", "at-once")),
    Case("stopped in init", "stop rank=1 init", 1, silent=True, timeout=3, on="hand",
         where=NOT_COME, program=("train", "6", "", "at-once")),
    Case("stopped between steps", "stop rank=1 step=3", 1, silent=True, timeout=2),
    Case("stopped inside backward", "stop rank=2 backward=3", 2, silent=True, timeout=2, on="hand"),
    Case("stopped inside a collective", "stop rank=1 collective=5", 1, silent=True, timeout=2, program=SUMS, on="hand"),
    Case("late", "delay rank=1 step=3 seconds=4", 1, silent=True, timeout=2, victim_says=f"lost \\d .*{LATE}",
         backends="shm gloo thread"),
    Case("late in backward", "delay rank=2 backward=3 seconds=4", 2, silent=True, timeout=2, on="hand",
         victim_says=f"lost \\d .*{LATE}", backends="shm gloo thread"),
    # Ending early, with success or not.
    Case("ends with 0", "exit rank=1 step=3", 1, "ended with exit code 0"),
    Case("ends with 0 in init", "exit rank=2 group", 2, "ended with exit code 0", JOINING),
    Case("ends with 3 in backward", "exit rank=2 backward=2 code=3", 2, "ended with exit code 3"),
    # Throwing.
    Case("throws", "throw rank=1 step=3", 1, "(ended with exit code 1|has failed|has left the (job|group))", victim_says="error .*fault injected: throw",
         backends="shm gloo thread"),
    Case("throws in init", "throw rank=1 group", 1, "(ended with exit code 1|has failed|has left the (job|group))", JOINING,
         victim_says="error .*fault injected: throw", backends="shm gloo thread"),
    Case("throws in a collective", "throw rank=1 collective=4", 1, "(ended with exit code 1|has failed|has left the (job|group))", program=SUMS,
         victim_says="error .*fault injected: throw", backends="shm gloo thread"),
    Case("throws in backward", "throw rank=2 backward=3", 2, r"cannot take part in all_reduce \(",
         r"rank 2 of 3: its backward ended with an error", victim_says="error .*fault injected: throw",
         backends="shm gloo thread"),
    Case("throws in the step of a divided optimizer", "throw rank=2 step=3", 2, r"cannot take part in all_gather \(",
         "fault injected: throw", program=("zero", "6"), victim_says="error .*fault injected: throw",
         backends="shm gloo thread"),
    Case("throws in a join", "throw rank=1 step=4", 1, r"cannot take part in join \(",
         r"rank 1 of 3: its part of the join ended with an error: .*fault injected: throw", program=("join", "6"),
         victim_says="error .*fault injected: throw", backends="shm gloo thread"),
    # Doing something else.
    Case("another collective", error=f"lost [02] .*{DISAGREE}", program=("another-collective",), backends="shm gloo thread"),
    Case("another order", error=f"lost [02] .*{DISAGREE}", program=("another-order",), backends="shm gloo thread"),
    Case("another shape", error=f"lost [02] .*{DISAGREE}", program=("another-shape",), backends="shm gloo thread"),
    Case("its GPU behind", "kill rank=0 step=1", 0, KILLED, program=("behind",), backends="nccl"),
    Case("a call less", error=f"lost [02] .*{DISAGREE}", program=("one-less",), backends="shm gloo thread"),
    # Shared memory full: as a limit on the size of files, which it is to the system.
    Case("no memory for a group", error=r"error \[shm\] \d+ bytes of shared memory for 3 ranks cannot be had: File too large",
         no_files=(0, 1, 2), backends="shm", on="launcher"),
    Case("no memory for a bucket", no_files=(2,), backends="shm", on="hand",
         error=r"error \[allocate\] \d+ bytes of shared memory on each of 3 ranks cannot be had: File too large on rank 2"),
]


class Job:
    """The processes of a job, and when they said what."""

    def __init__(self, folder):
        self.folder = folder  # of this job alone, and in the environment of its ranks
        self.processes, self.readers, self.lines = [], [], []  # lines: (time, text)
        self.changed = threading.Condition()

    def start(self, command, environment, no_files=False):
        limit = (lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))) if no_files else None
        p = subprocess.Popen(command, env=BASE | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                             preexec_fn=limit)
        self.processes.append(p)
        self.readers.append(threading.Thread(target=self.read, args=(p.stdout,), daemon=True))
        self.readers[-1].start()

    def read(self, stream):
        for line in stream:
            with self.changed:
                self.lines.append((time.monotonic(), line.rstrip("\n")))
                self.changed.notify()

    def find(self, pattern):
        return next(((t, m) for t, line in self.lines if (m := re.search(pattern, line))), None)

    def wait_for(self, pattern, seconds):
        """(time, match) of the first such line."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.find(pattern), seconds), f"no line '{pattern}' in {seconds} s"
            return self.find(pattern)

    def finish(self, seconds=30):
        """The exit codes."""
        end = time.monotonic() + seconds
        codes = [p.wait(max(0.1, end - time.monotonic())) for p in self.processes]
        for reader in self.readers:
            reader.join(5)
        return codes

    def pids(self):
        return {int(m["rank"]): int(m["pid"]) for _, line in self.lines
                if (m := re.search(r"@(?P<rank>\d) pid (?P<pid>\d+)", line))}

    def living(self):
        """Descriptors of the ranks that live. A number may be another process's by now, whose environment differs."""
        for pid in self.pids().values():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                descriptor = os.pidfd_open(pid)
                if f"TMPDIR={self.folder}\0".encode() in pathlib.Path(f"/proc/{pid}/environ").read_bytes():
                    yield descriptor
                os.close(descriptor)

    def end(self):
        for p in self.processes:
            if p.poll() is None:
                p.kill()
                p.wait()
        for descriptor in self.living():  # a launcher has lost them
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)

    def text(self):
        return "\n".join(f"  {t:.3f} {line}" for t, line in self.lines)


def start(case, launch, folder):
    job = Job(folder)
    program = [str(folder / "file") if a == "FILE" else a for a in case.program]
    command = [PROGRAM, BACKEND, str(case.timeout), *program]
    environment = {"TMPDIR": str(folder)} | ({"TANDEM_FAULT": case.fault} if case.fault else {})
    if launch == "launcher":
        job.start([RUN, "-n", str(RANKS), *command], environment, bool(case.no_files))
    elif launch == "threads":
        job.start(command, environment)
    else:
        place = {"BY_HAND_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        for r in range(RANKS):
            job.start(command, environment | place | {"BY_HAND_RANK": str(r)}, r in case.no_files)
    return job


def end_of(case, launch):
    """What the survivors say of the victim."""
    if case.silent:
        waited = rf"(waited {case.timeout:g} s in .* for rank {case.victim}\b|rank \d has given up on rank {case.victim} " \
                 rf"{IN_CALL})"
        return case.where if case.where != IN_CALL else waited
    how = case.how if launch != "hand" or "cannot take part" in case.how else "has (ended|left the job|left the group)"
    # A store that goes with its holder says so itself.
    gone = r"|the store at \S+ is lost: .*; rank 0, which held it, has ended" if case.victim == 0 and launch == "hand" else ""
    return rf"(rank {case.victim} {how}.* {case.where}{gone})"


def check(case, launch, job, folder):
    survivors = [r for r in range(RANKS) if r != case.victim]
    if not case.fault or case.harmless:
        result = case.error or "done"
        for r in range(RANKS):
            job.wait_for(rf"@{r} {result}", 40)
        codes = job.finish()
        assert all(c == (1 if case.error else 0) for c in codes), codes
        return
    thrown = case.fault.startswith("throw")
    broke, _ = job.wait_for(rf"@{case.victim} error " if thrown else "fault injected: (?!delay .*init)", 40)
    limit = (case.timeout if case.silent else 0) + 2 + SLACK
    for r in survivors:
        seen, _ = job.wait_for(rf"@{r} (lost|error|done)", limit + 10)
        text = rf"@{r} lost {case.victim} rank {r} of {RANKS}: .*{end_of(case, launch)}"
        if thrown and launch == "hand" and case.where == JOINING:  # rank 0 may have left with the store for that reason
            text += rf"|@{r} lost 0 rank {r} of {RANKS}: the store at \S+ is lost: .*; rank 0, which held it, has ended"
        if launch == "threads" and case.where == JOINING:  # who comes later hears of one that has failed for that reason
            text += rf"|@{r} lost \d .*\(rank \d of {RANKS}: rank {case.victim} has failed"
        assert job.find(text), f"not as expected: {text}"
        assert seen - broke < limit, f"rank {r} took {seen - broke:.2f} s, more than {limit}"
    if case.victim_says:
        job.wait_for(f"@{case.victim} {case.victim_says}", 20)
    if launch == "hand" and case.fault.startswith("stop"):
        job.processes[case.victim].kill()
    codes = job.finish()
    if launch == "hand":
        for r in survivors:
            assert codes[r] == 1, f"rank {r} ended with {codes[r]}"
    elif launch == "threads":
        assert codes == [1], codes
    else:
        assert codes == [137] if "kill" in case.fault else codes[0] > 0, codes
        if "kill" in case.fault:
            assert job.find(rf"tandem: .*rank {case.victim}\b.*signal 9"), "the launcher does not name the rank"
    assert not list(job.living()), "a process is left"


def check_saved(case, folder):
    """A kill while a file is saved leaves the one before: after two steps."""
    files = sorted(f.name for f in folder.iterdir())
    assert len(files) == 2 and files[0] == "file" and files[1].startswith("file.tmp-"), files
    whole = folder / "whole"
    job = start(dataclasses.replace(case, fault="", program=(case.program[0], "2", str(whole))), "launcher", folder)
    assert job.finish() == [0], job.text()
    assert (folder / "file").read_bytes() == whole.read_bytes(), "the file is not that of two steps"
    for f in folder.iterdir():
        f.unlink()


def run(case, launch):
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        job = start(case, launch, folder)
        try:
            check(case, launch, job, folder)
            if case.harmless:
                (folder / "file").unlink()
            elif "FILE" in case.program:
                check_saved(case, folder)
            left = sorted(f.name for f in folder.iterdir())
            assert not left, f"files are left: {left}"
        except (AssertionError, subprocess.TimeoutExpired) as e:
            raise AssertionError(f"FAULT in '{case.name}' ({BACKEND}, {launch}): {e}\n{job.text()}") from None
        finally:
            job.end()
    print(f"{case.name}, {launch}: ok", flush=True)


def launcher_gone():
    """No rank outlives a launcher that is killed while they train."""
    with tempfile.TemporaryDirectory() as name:
        job = start(Case("", program=("train", "1000000")), "launcher", pathlib.Path(name))
        try:
            for r in range(RANKS):
                job.wait_for(f"@{r} joined", 30)
            assert len(list(job.living())) == RANKS, job.text()
            job.processes[0].send_signal(signal.SIGKILL)
            end = time.monotonic() + 10
            while list(job.living()) and time.monotonic() < end:
                time.sleep(0.02)
            assert not list(job.living()), f"ranks outlive their launcher:\n{job.text()}"
        finally:
            job.end()
    print("the launcher gone: ok")


def reading_faults():
    """A text that cannot be understood is an error at the first point, with the grammar; others are ignored."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}

    def once(text, **more):
        return subprocess.run([PROGRAM, "shm", "30", "train", "3"], env=BASE | alone | more | {
            "MASTER_PORT": str(free_port()), "TANDEM_FAULT": text}, capture_output=True, text=True, timeout=60)

    grammar = "write ACTION rank=R POINT, with ; between several. ACTION is kill, stop, exit code=C"
    for text, why in [
        (" ; ", "it names no fault"),
        ("kil rank=0 start", "there is no action 'kil'"),
        ("rank=0 kill start", "there is no action 'rank=0'"),
        ("kill start", "it names no rank"),
        ("kill rank=0", "it names no point"),
        ("kill rank=0 start step=1", "it has two points"),
        ("kill rank=0 rank=1 start", "it has two words 'rank='"),
        ("kill rank=0 start restart=0 restart=1", "it has two words 'restart='"),
        ("exit rank=0 start code=1 code=1", "it has two words 'code='"),
        ("delay rank=0 start seconds=1 seconds=1", "it has two words 'seconds='"),
        ("kill rank=0 step", "write 'step=N'"),
        ("kill rank=0 start=1", "write 'start'"),
        ("kill rank=0 step=0", "'step=0' needs a number from 1 to"),
        ("kill rank=0 step=x", "'step=x' needs a number"),
        ("kill rank=-1 start", "'rank=-1' needs a number from 0"),
        ("kill rank=0 start code=3", "'code=3' means nothing here"),
        ("exit rank=0 start code=256", "'code=256' needs a number from 0 to 255"),
        ("delay rank=0 start", "it does not say how many seconds"),
        ("delay rank=0 start seconds=-1", "'seconds=-1' needs a number from 0 to 1000000"),
        ("delay rank=0 start seconds=nan", "'seconds=nan' needs a number"),
        ("kill rank=0 start soon", "'soon' means nothing here"),
        ("kill rank=7 start; kil rank=0 start", "'kil rank=0 start': there is no action 'kil'"),
    ]:
        done = once(text)
        assert done.returncode == 1 and "@0 error [TANDEM_FAULT] '" in done.stdout, (text, done)
        assert why in done.stdout and grammar in done.stdout, (text, done)

    for text, code, said in [
        ("", 0, "@0 done"),
        ("kill rank=1 step=1", 0, "@0 done"),
        ("kill rank=0 step=4", 0, "@0 done"),
        ("exit rank=0 step=3 code=9", 9, ""),
        ("exit rank=0 step=3 restart=1", 0, "@0 done"),
        ("  exit  rank=0   code=4 step=1 ; kill rank=0 step=2", 4, ""),
        ("delay rank=0 step=1 seconds=0.01; exit rank=0 step=1 code=5", 5, ""),
        ("throw rank=0 start", 1, "@0 error [TANDEM_FAULT] fault injected: throw rank=0 start"),
    ]:
        done = once(text)
        assert done.returncode == code and said in done.stdout, (text, done)
    done = once("exit rank=0 step=3 code=8 restart=2", RESTART_COUNT="2")
    assert done.returncode == 8 and done.stderr == "tandem: fault injected: exit rank=0 step=3 code=8 restart=2\n", done
    assert once("kill rank=0 step=3", RESTART_COUNT="1").returncode == 0
    print("TANDEM_FAULT: ok")


if BACKEND == "faults":
    reading_faults()
else:
    # With nccl all is as over a group of processes; what its own memory lacks is tested elsewhere.
    like = "gloo" if BACKEND == "nccl" else BACKEND
    runs = [(case, launch) for case in CASES if {like, BACKEND} & set(case.backends.split())
            for launch in (["threads"] if BACKEND == "thread" else case.on.split())]
    for case, launch in runs:
        if not case.silent:
            run(case, launch)
    with concurrent.futures.ThreadPoolExecutor(5) as pool:  # these wait for most of their time
        for done in [pool.submit(run, *r) for r in runs if r[0].silent]:
            done.result()
    if BACKEND != "thread":
        launcher_gone()
print(f"failures {BACKEND}: passed")

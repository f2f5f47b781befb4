#!/usr/bin/env python3
"""Runs examples/fashion_mnist as a user does.

usage: program_test.py CHECK FASHION_MNIST TANDEM_RUN [CUDA_MODULE]
"""

import json
import os
import pathlib
import resource
import signal
import subprocess
import sys
import tempfile
import time

sys.path.append(str(pathlib.Path(__file__).parents[1] / "support"))
from fashion_mnist import first_rows

CHECK, PROGRAM, TANDEM_RUN = sys.argv[1:4]
ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "TANDEM_CPU_DEVICES")}


def run(*arguments, launcher=(), expect=0, **more):
    command = [*launcher, PROGRAM, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT | more, timeout=240)
    assert done.returncode == expect, f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def epochs(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def bars(path, track):
    """The names of what a timeline has on a track."""
    events = json.loads(path.read_text())["traceEvents"]
    tracks = {e["tid"] for e in events if e["name"] == "thread_name" and e["args"]["name"] == track}
    return {e["name"] for e in events if e["ph"] == "X" and e["tid"] in tracks}


def quickstart(folder):
    """PyTorch's tutorial prints 64.6 and 65.4 % for these settings, and losses of 1.087 and 1.066. Every mode goes the
    same way."""
    log = folder / "log"
    settings = ["--no-shuffle", "--lr", 1e-3, "--log", log]
    run("--epochs", 5, "--threads", 1, *settings)
    last = epochs(log)[-1]
    assert last["epoch"] == 5 and 0.640 <= last["test_accuracy"] <= 0.665, last
    assert 1.05 <= last["test_loss"] <= 1.11, last
    settings += ["--epochs", 1, "--data", first_rows(folder, 18000, 2000)]
    run(*settings, "--threads", 1)
    first = epochs(log)[-1]
    for n in (2, 4):
        for mode in (("--parallel", "dp", "--devices", n), ("--parallel", "ddp", "--nproc", n)):
            run(*settings, *mode)
            found = epochs(log)[-1]
            for kind in ("train_loss", "test_loss"):
                assert abs(found[kind] - first[kind]) < 1e-4, (mode, found, first)


def adam(folder):
    log = folder / "log"
    run("--epochs", 5, "--threads", 1, "--optimizer", "adam", "--log", log)
    last = epochs(log)[-1]
    assert last["test_accuracy"] > 0.865, last
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    assert peak < 150, f"peak memory {peak:.0f} MiB"


def modes(folder):
    """One device, DP and DDP go the same way."""
    losses = []
    settings = ["--epochs", 1, "--data", first_rows(folder, 18000, 2000), "--lr", 0.1]
    for i, mode in enumerate([("--threads", 1), ("--parallel", "dp", "--devices", 2), ("--parallel", "ddp", "--nproc", 2)]):
        log = folder / f"log{i}"
        run(*settings, "--batch-size", 256, "--log", log, *mode)
        losses.append(epochs(log)[-1])
    three = (TANDEM_RUN, "-n", "3")
    output = run(*settings, "--batch-size", 256, "--parallel", "ddp", launcher=three, expect=1)
    assert "256 cannot be divided evenly among 3 processes; give a multiple of 3" in output, output
    log = folder / "log3"
    run(*settings, "--batch-size", 258, "--log", log, "--parallel", "ddp", launcher=three)
    for e in losses[1:]:
        assert abs(e["train_loss"] - losses[0]["train_loss"]) < 1e-3, losses
        assert abs(e["test_accuracy"] - losses[0]["test_accuracy"]) < 0.01, losses
    assert abs(epochs(log)[-1]["test_accuracy"] - losses[0]["test_accuracy"]) < 0.03


def comm_hooks(folder):
    """Gradients that are compressed train as well, within 1 %, as documented. A run with PowerSGD can be resumed."""
    settings = ["--epochs", 1, "--batch-size", 256, "--parallel", "ddp", "--nproc", 2]
    for optimizer, enough, rank, hooks in ((["--lr", 0.1], 0.76, 1, ["none", "fp16", "bf16", "powersgd"]),
                                           (["--optimizer", "adam"], 0.83, 4, ["none", "powersgd"])):
        accuracy = {}
        for hook in hooks:
            log = folder / f"{hook}{rank}"
            more = ["--powersgd-rank", rank] if hook == "powersgd" else []
            run(*settings, *optimizer, "--comm-hook", hook, *more, "--log", log)
            accuracy[hook] = epochs(log)[-1]["test_accuracy"]
        assert accuracy["none"] > enough, accuracy
        assert all(abs(a - accuracy["none"]) < 0.01 for a in accuracy.values()), accuracy
    large = ["--data", first_rows(folder, 12000, 1000), "--batch-size", 2000, "--parallel", "ddp", "--nproc", 2, "--comm-hook", "powersgd"]
    run("--epochs", 2, *large, "--save", folder / "whole")
    run("--epochs", 1, *large, "--save", folder / "part")
    run("--epochs", 2, *large, "--save", folder / "part", "--resume", folder / "part")
    assert (folder / "whole").read_bytes() == (folder / "part").read_bytes()


def same_bits(folder):
    """Two runs with two threads write the same file."""
    data = first_rows(folder, 12000, 1000)
    for name in "ab":
        run("--epochs", 1, "--data", data, "--threads", 2, "--optimizer", "adam", "--save", folder / name)
    assert (folder / "a").read_bytes() == (folder / "b").read_bytes()


def zero(folder):
    """An optimizer that is divided among the processes writes the file of one that is not, and goes on from either."""
    data = first_rows(folder, 12000, 1000)
    settings = ["--data", data, "--batch-size", 600, "--optimizer", "adam", "--threads", 2, "--parallel", "ddp"]
    for name, more in (("plain", []), ("zero", ["--zero"])):
        output = run("--epochs", 1, *settings, "--nproc", 2, *more, "--save", folder / name)
        assert ("optimizer divided" in output) == (name == "zero"), output
    assert (folder / "plain").read_bytes() == (folder / "zero").read_bytes()
    for name, more in (("a", []), ("b", ["--zero"])):
        run("--epochs", 2, *settings, "--nproc", 3, *more, "--resume", folder / "zero", "--save", folder / name)
    assert (folder / "a").read_bytes() == (folder / "b").read_bytes()


def check_every(folder):
    """The guard finds nothing, and changes nothing."""
    data = first_rows(folder, 12000, 1000)
    for mode in (["--parallel", "dp", "--devices", 2], ["--parallel", "ddp", "--nproc", 2]):
        for name, guard in (("a", []), ("b", ["--check-every", 7])):
            run("--epochs", 1, "--data", data, "--batch-size", 256, "--threads", 2, "--save", folder / name, *mode, *guard)
        assert (folder / "a").read_bytes() == (folder / "b").read_bytes(), mode


def resume(folder):
    """A run that is killed in the middle of an epoch and resumed ends with the same bits as one that is not."""
    data = first_rows(folder, 9000, 1000)
    modes = [(), ("--parallel", "dp", "--devices", 2), ("--parallel", "ddp", "--nproc", 2)]
    for i, mode in enumerate(modes):
        settings = ["--epochs", 3, "--data", data, "--batch-size", 64, "--optimizer", "adam", "--threads", 2, *mode]
        whole, part = folder / f"whole{i}", folder / f"part{i}"
        run(*settings, "--save", whole)
        process = subprocess.Popen([PROGRAM, *map(str, settings), "--save", str(part), "--save-every", "31"],
                                   env=ENVIRONMENT, stdout=subprocess.DEVNULL)
        seen = set()
        while len(seen) < 3:  # three checkpoints: in the middle of the first epoch
            assert process.poll() is None, "the run ended before it could be killed"
            if part.exists():
                seen.add(part.stat().st_mtime_ns)
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        process.wait()
        output = run(*settings, "--save", part, "--resume", part)
        assert "resumed from" in output, output
        assert whole.read_bytes() == part.read_bytes(), mode


def reproducible(folder):
    """With --reproducible, every mode writes the same file; also when it goes on from the file of another."""
    data = first_rows(folder, 12000, 1000)
    settings = ["--data", data, "--reproducible", 4, "--batch-size", 250, "--optimizer", "sgd", "--momentum", 0.9, "--lr", 0.05]
    modes = [("--threads", 2), ("--parallel", "dp", "--devices", 2), ("--parallel", "ddp", "--nproc", 2)]
    for epochs_done in (1, 2):
        files = []
        for i, mode in enumerate(modes):
            files.append(folder / f"file{epochs_done}{i}")
            before = ["--resume", folder / f"file1{(i + 1) % len(modes)}"] if epochs_done == 2 else []
            output = run("--epochs", epochs_done, *settings, *mode, *before, "--save", files[-1])
            assert "the same bits in every mode: 4 parts" in output, output
        for file, mode in zip(files, modes):
            assert file.read_bytes() == files[0].read_bytes(), (epochs_done, mode)
    settings = ["--epochs", 1, "--data", data, "--reproducible", 4, "--batch-size", 600, "--optimizer", "adam"]
    run(*settings, "--threads", 2, "--save", folder / "alone")
    run(*settings, "--parallel", "ddp", "--nproc", 2, "--zero", "--save", folder / "zero")
    assert (folder / "alone").read_bytes() == (folder / "zero").read_bytes()


def cuda(folder):
    """GPUs give the CPU's losses in every mode, and a rank that dies is named. The environment names the modules, which
    may be those of a double of CUDA, and so slow: few rows."""
    first_rows(folder, 90, 20)
    settings = ["--epochs", 2, "--batch-size", 30, "--data", folder]
    two = (TANDEM_RUN, "-n", "2")
    dp, ddp = ["--device", "cuda", "--parallel", "dp"], ["--device", "cuda", "--parallel", "ddp"]
    modes = [([], (), ""), (["--device", "cuda"], (), ": cuda:0"), (["--device", "cuda:1", "--graph"], (), ": cuda:1"),
             ([*dp, "--devices", 2], (), "DataParallel on 2 devices"),
             (ddp, two, "DistributedDataParallel on 2 processes (nccl)")]
    for optimizer, tried in ((["--lr", 0.05, "--momentum", 0.9], modes[:2]), (["--optimizer", "adam"], modes)):
        losses = []
        for mode, launcher, shown in tried:
            log, file, trace = folder / "log", folder / "file", folder / "trace"
            output = run(*settings, *optimizer, *mode, "--log", log, "--save", file, "--trace", trace, launcher=launcher)
            assert shown in output, output
            if shown.endswith(("cuda:0", "devices")):
                assert bars(trace, "cuda:0") >= {"forward", "backward", "optimizer step"}, bars(trace, "cuda:0")
            losses.append([e[kind] for e in epochs(log) for kind in ("train_loss", "test_loss")])
        assert losses[0][2] < losses[0][0], losses
        for found in losses:
            assert all(abs(a - b) < 1e-5 * b for a, b in zip(found, losses[0], strict=True)), losses
    output = run(*settings, *ddp, launcher=two, expect=137, TANDEM_FAULT="kill rank=1 step=4")
    assert "[0] rank 0 of 2: rank 1 was killed by signal 9 (Killed) while this rank waited in " in output, output
    # A file of one device goes on on another.
    done = run("--epochs", 3, *settings[2:], "--optimizer", "adam", "--resume", file, "--log", folder / "log")
    assert "resumed from" in done and epochs(folder / "log")[-1]["epoch"] == 3, done
    output = run(*settings, *dp, "--devices", 60, expect=1)
    assert "--devices 60: there are" in output and "CUDA devices; give 1 to" in output, output
    output = run(*settings, "--device", "cuda:60", expect=1)
    assert "cuda:60 does not exist: CUDA devices are cuda:0 to cuda:" in output, output
    output = run(*settings, *dp, "--reproducible", 4, expect=2)
    assert "--reproducible: is for --device cpu" in output, output
    ENVIRONMENT["TANDEM_CUDA_MODULE"] = str(folder / "none.so")
    output = run(*settings, "--device", "cuda", expect=1)
    assert "cuda:0 does not exist: " in output and "none.so" in output and 'use "cpu"' in output, output


def cuda_module(folder):
    """The module that nvcc has built, with NVIDIA's libraries: without a GPU it says so, and the CPU trains."""
    first_rows(folder, 90, 20)
    ENVIRONMENT["TANDEM_CUDA_MODULE"] = sys.argv[4]
    ENVIRONMENT["CUDA_VISIBLE_DEVICES"] = ""  # also where there is one
    settings = ["--epochs", 2, "--batch-size", 30, "--lr", 0.05, "--data", folder]
    output = run(*settings, "--device", "cuda", expect=1)
    reasons = ["no NVIDIA driver is installed", "the NVIDIA driver finds no device (CUDA_VISIBLE_DEVICES is '')"]
    assert any(f'cuda:0 does not exist: {reason}; use "cpu"' in output for reason in reasons), output
    log = folder / "log"
    run(*settings, "--log", log)
    first, last = epochs(log)
    assert last["train_loss"] < first["train_loss"], (first, last)


def mistakes(folder):
    """Every mistake is a sentence that says what to do."""
    ENVIRONMENT["TANDEM_CUDA_MODULE"] = str(folder / "none.so")  # also where there is a GPU
    cases = [
        (["--data", folder], 1, "dataset-fashion-mnist"),
        (["--device", "cuda"], 1, 'use "cpu"'),
        (["--device", "gpu"], 2, "--device: is gpu; give cpu, cuda, or one of several as cuda:1"),
        (["--device", "cuda:1", "--parallel", "dp"], 2, "cuda:1 is one device, and --parallel dp takes several"),
        (["--device", "cuda:0", "--parallel", "ddp", "--nproc", 2], 2, "in CUDA_VISIBLE_DEVICES"),
        (["--device", "cpu:7"], 1, "cpu:7 does not exist"),
        (["--parallel", "ddp"], 1, "tandem-run -n 2"),
        (["--nproc", 2], 2, "--parallel ddp"),
        (["--comm-hook", "fp16"], 2, "--parallel ddp"),
        (["--powersgd-rank", 1], 2, "--comm-hook powersgd"),
        (["--devices", 2], 2, "--parallel dp"),
        (["--zero"], 2, "--parallel ddp"),
        (["--backend", "shm"], 2, "--parallel ddp"),
        (["--parallel", "ddp", "--nproc", 2, "--backend", "pigeon"], 1, "pigeon"),
        (["--momentum", 0.9, "--optimizer", "adam"], 2, "--optimizer sgd"),
        (["--optimizer", "lion"], 2, "lion"),
        (["--batch-size", 0], 2, "--batch-size"),
        (["--batch-size", 60001], 2, "--batch-size: is 60001; give 1 to 60000"),
        (["--epochs", "x"], 2, "--epochs: is x; give a number"),
        (["--lr", -1], 2, "--lr: is -1; give 0 or more"),
        (["--reproducible", 3], 2, "--reproducible: is 3; give a power of two"),
        (["--reproducible", 0], 2, "--reproducible: is 0; give 1 to 2048"),
        (["--save-every", 0, "--save", folder / "file"], 2, "--save-every: is 0; give 1 or more"),
        (["--save-every", 5], 2, "--save"),
        (["--check-every", 5], 2, "is for --parallel dp and ddp"),
        (["--parallel", "dp", "--check-every", -5], 2, "--check-every"),
        (["--resume", folder / "none"], 1, "none"),
        (["--log", folder / "no" / "log"], 1, "cannot be written"),
        (["--save", folder / "no" / "file"], 1, "folder that exists"),
        (["--save", folder], 1, "folder that exists"),
        (["--seed", -1], 2, "--seed"),
        (["--save", folder / "x", "--trace", folder / "a" / ".." / "x"], 2, "--trace: names the file of --save"),
        (["--save", folder / "x", "--log", folder / "x"], 2, "--log: names the file of --save"),
        (["--trace", folder / "x", "--log", folder / "y", "--save", folder / "link"], 2, "--log: names the file of --save"),
        (["--trace", "x", "--log", "./x"], 2, "--trace: names the file of --log"),
        (["--trace", "/proc/x.json"], 1, "/proc/x.json cannot be written"),
        (["--save", "/dev/full"], 1, "/dev/full exists and is not a regular file"),
    ]
    (folder / "y").touch()
    (folder / "link").symlink_to(folder / "y")
    for arguments, code, text in cases:
        output = run(*arguments, expect=code)
        assert text in output, f"{arguments}: {output}"
    (folder / "junk").write_bytes(b"x" * 100)
    assert "junk" in run("--resume", folder / "junk", expect=1)
    assert "--parallel" in run("--help")
    run("--epochs", 1, "--batch-size", 5000, "--save", folder / "file")
    for other in (["--batch-size", 100], ["--seed", 3], ["--no-shuffle"], ["--optimizer", "adam"]):
        output = run("--epochs", 2, "--batch-size", 5000, *other, "--resume", folder / "file", expect=1)
        assert "same settings" in output or "optimizer" in output, output
    assert "nothing is left" in run("--epochs", 1, "--batch-size", 5000, "--resume", folder / "file")
    assert "give --parallel ddp" in run("--epochs", 1, launcher=(TANDEM_RUN, "-n", "2"), expect=1)


with tempfile.TemporaryDirectory() as name:
    globals()[CHECK](pathlib.Path(name))
print(f"{CHECK}: passed")

#!/usr/bin/env python3
"""fashion_mnist --trace in every mode: the file has the documented tracks, and its spans are what they say.

usage: trace_test.py CHECK FASHION_MNIST TANDEM_RUN PLOT_TRACE
CHECK is none, dp, shm, gloo, clocks, failures or plot. Exit code 77: it cannot run here, and says why.
"""

import collections
import json
import os
import pathlib
import struct
import subprocess
import sys
import tempfile

CHECK, PROGRAM, TANDEM_RUN, PLOT = sys.argv[1:5]
ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "TANDEM_CPU_DEVICES", "TANDEM_FAULT")}
ROWS, BATCH = 640, 64
STEPS = 2 * ROWS // BATCH  # of two epochs


def skip(why):
    print(why)
    sys.exit(77)


def write_data(folder):
    """A small set in the files of Fashion-MNIST: the label is where a row is bright."""
    for kind, rows in (("train", ROWS), ("t10k", 100)):
        labels = bytes(i % 10 for i in range(rows))
        images = b"".join(bytes(28 * 28 - 28) + bytes([20 * label] * 28) for label in labels)
        (folder / f"{kind}-labels-idx1-ubyte").write_bytes(struct.pack(">ii", 2049, rows) + labels)
        (folder / f"{kind}-images-idx3-ubyte").write_bytes(struct.pack(">iiii", 2051, rows, 28, 28) + images)


def command(folder, *arguments):
    return [PROGRAM, "--data", folder, "--epochs", 2, "--batch-size", BATCH, "--threads", 2, "--quiet", *arguments]


def run(words, expect=0, **environment):
    done = subprocess.run([str(w) for w in words], capture_output=True, text=True, env=ENVIRONMENT | environment, timeout=120)
    assert done.returncode == expect, f"{words} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


class Trace:
    """The events of each track, by rank and name, in nanoseconds."""

    def __init__(self, path):
        whole = json.loads(path.read_text())
        self.about = whole["otherData"]
        self.tracks = collections.defaultdict(list)
        self.processes = {}
        names = {}
        for e in whole["traceEvents"]:
            if e["name"] == "process_name":
                self.processes[e["pid"]] = e["args"]["name"]
            elif e["name"] == "thread_name":
                names[e["pid"], e["tid"]] = e["args"]["name"]
            elif e["ph"] != "M":
                begin = round(e["ts"] * 1000)
                e |= {"begin": begin, "end": begin + round(e.get("dur", 0) * 1000)}
                self.tracks[e["pid"], names[e["pid"], e["tid"]]].append(e)

    def named(self, rank, track, name):
        return [e for e in self.tracks[rank, track] if e["name"] == name]


def check_nesting(trace):
    """Spans of a track lie one after the other or one in the other."""
    for track, events in trace.tracks.items():
        around = []
        for e in sorted((e for e in events if e["ph"] == "X"), key=lambda e: (e["begin"], -e["end"])):
            while around and around[-1]["end"] <= e["begin"]:
                around.pop()
            assert not around or e["end"] <= around[-1]["end"], (track, e, around[-1])
            around.append(e)


def check_sums(trace, rank):
    """The spans directly in the steps are all but a tenth of them."""
    steps = trace.named(rank, "main", "step")
    assert len(steps) == STEPS, (rank, len(steps))
    whole = sum(s["end"] - s["begin"] for s in steps)
    parts = end = 0
    for e in sorted((e for e in trace.tracks[rank, "main"] if e["ph"] == "X" and e["name"] != "step"),
                    key=lambda e: (e["begin"], -e["end"])):
        if e["begin"] < end or not any(s["begin"] <= e["begin"] and e["end"] <= s["end"] for s in steps):
            continue
        parts += e["end"] - e["begin"]
        end = e["end"]
    assert 0.9 * whole <= parts <= whole, (rank, parts, whole)
    return steps


def inside(inner, outer):
    return any(o["begin"] <= inner["begin"] and inner["end"] <= o["end"] for o in outer)


def check_tracks(trace, expected):
    """Each rank has these tracks and no other, with these names on them."""
    found = {track: {e["name"] for e in events} for track, events in trace.tracks.items()}
    assert found == expected, f"{found}\nis not\n{expected}"


def one_process(folder, *mode):
    path = folder / "trace.json"
    run(command(folder, "--trace", path, *mode))
    trace = Trace(path)
    assert trace.about == {"left_out": 0}, trace.about
    assert trace.processes == {0: "process"}
    check_nesting(trace)
    check_sums(trace, 0)
    return trace


MAIN = {"step", "load batch", "forward", "backward", "optimizer step"}
DEVICE = {"forward", "backward", "optimizer step"}


def none(folder):
    check_tracks(one_process(folder), {(0, "main"): MAIN | {"evaluate"}, (0, "cpu:0"): DEVICE})


def dp(folder):
    guarded = one_process(folder, "--parallel", "dp", "--devices", 2, "--check-every", 4)
    assert len(guarded.named(0, "main", "check_every")) == STEPS // 4
    trace = one_process(folder, "--parallel", "dp", "--devices", 2)
    main = MAIN | {"evaluate", "scatter", "replicate", "loss", "reduce"}
    check_tracks(trace, {(0, "main"): main, (0, "cpu:0"): DEVICE | {"reduce"}, (0, "cpu:1"): DEVICE | {"reduce"}})
    for device in ("cpu:0", "cpu:1"):
        for name in DEVICE | {"reduce"}:
            spans = trace.named(0, device, name)
            assert len(spans) == STEPS, (device, name, len(spans))
            for e in spans:
                assert inside(e, trace.named(0, "main", name)), e
    assert all(inside(e, trace.named(0, "main", "backward")) for e in trace.named(0, "main", "reduce"))


def check_ranks(trace, communication):
    """A trace of DDP(2)."""
    assert trace.processes == {0: "rank 0 of 2", 1: "rank 1 of 2"}
    check_nesting(trace)
    main = MAIN | {"exposed wait", "wait for normalizer"}
    expected = {}
    for rank in (0, 1):
        expected |= {(rank, "main"): main | ({"evaluate"} if rank == 0 else set()),
                     (rank, "cpu:0"): DEVICE | {"rebuild buckets"},
                     (rank, "bucket 0"): {"ready", "in flight"}, (rank, "bucket 1"): {"ready", "in flight"}}
        if communication:
            expected[rank, "communication"] = communication
    check_tracks(trace, expected)
    of_rank = [check_sums(trace, rank) for rank in (0, 1)]
    # A backward ends when both ranks have gone through it: on one clock each step overlaps the same one of the other.
    for a, b in zip(*of_rank):
        assert a["args"] == b["args"] and a["begin"] < b["end"] and b["begin"] < a["end"], (a, b)
    for rank in (0, 1):
        backwards = trace.named(rank, "main", "backward")
        assert all(inside(e, backwards) for e in trace.named(rank, "main", "exposed wait"))
        for bucket in ("bucket 0", "bucket 1"):
            ready, flights = trace.named(rank, bucket, "ready"), trace.named(rank, bucket, "in flight")
            assert len(ready) == len(flights) == STEPS
            for moment, flight in zip(ready, flights):
                assert moment["begin"] <= flight["begin"] and inside(flight, backwards), (moment, flight)
        sizes = {e["args"]["bytes"] for e in trace.named(rank, "bucket 0", "in flight")[1:]}
        assert len(sizes) == 1, sizes


def ddp(folder, backend, launcher=(), more=(), **environment):
    path = folder / "trace.json"
    run([*launcher, *command(folder, "--trace", path, "--parallel", "ddp", "--backend", backend, *more)], **environment)
    return Trace(path)


def shm(folder):
    trace = ddp(folder, "shm", (TANDEM_RUN, "-n", 2))
    assert [r["clock_ahead_ns"] for r in trace.about["ranks"]] == [0, 0], trace.about
    check_ranks(trace, None)
    trace = ddp(folder, "shm", (TANDEM_RUN, "-n", 2), ("--zero", "--check-every", 4))
    for rank in (0, 1):
        shared, guards = (trace.named(rank, "main", name) for name in ("share parameters", "check_every"))
        assert len(shared) == STEPS and len(guards) == STEPS // 4, (len(shared), len(guards))
        steps = trace.named(rank, "main", "step")
        assert all(inside(e, steps) for e in shared + guards)


def gloo(folder):
    trace = ddp(folder, "gloo", (TANDEM_RUN, "-n", 2))
    names = {e["name"] for e in trace.tracks[0, "communication"]}
    assert {"all_reduce", "broadcast"} <= names, names
    check_ranks(trace, names)


def clocks(folder):
    """Rank 1 in a time namespace, whose clock is a day ahead."""
    ahead = 86_400
    away = ["unshare", "--fork", "--kill-child", "--time", "--monotonic", str(ahead)]
    if subprocess.run([*away, "true"], capture_output=True, check=False).returncode != 0:
        skip("needs the right to make a time namespace")
    script = folder / "rank"
    script.write_text(f'#!/bin/sh\n[ "$RANK" = 0 ] && exec "$@"\nexec {" ".join(away)} "$@"\n')
    script.chmod(0o755)
    trace = ddp(folder, "gloo", (TANDEM_RUN, "-n", 2, script))
    first, second = trace.about["ranks"]
    assert first["clock_ahead_ns"] == first["clock_round_trip_ns"] == 0
    assert second["clock_round_trip_ns"] > 0
    # As far as two readings of the same clock by the kernel's offset can be told apart by a message.
    assert abs(second["clock_ahead_ns"] - ahead * 10**9) <= second["clock_round_trip_ns"] // 2 + 1, second
    check_ranks(trace, {e["name"] for e in trace.tracks[0, "communication"]})


def failures(folder):
    path = folder / "trace.json"
    launch = [TANDEM_RUN, "-n", 2, *command(folder, "--parallel", "ddp", "--trace", path)]
    path.write_text("an older file")
    said = run(launch, expect=137, TANDEM_FAULT="kill rank=1 step=5")
    assert "rank 1" in said, said
    assert path.read_text() == "an older file"
    run(launch, expect=137, TANDEM_FAULT="kill rank=0 save=1")  # its bytes are written, and it has not got its name
    assert path.read_text() == "an older file"
    nowhere = folder / "no" / "trace.json"
    for mode in (), ("--parallel", "dp"):
        said = run(command(folder, "--trace", nowhere, *mode), expect=1)
        assert f"--trace {nowhere} cannot be written: give a file in a folder that exists" in said, said


def plot(folder):
    python = next((p for p in (sys.executable, "/usr/bin/python3")
                   if subprocess.run([p, "-c", "import matplotlib"], capture_output=True, check=False).returncode == 0), None)
    if python is None:
        skip("needs matplotlib for Python")
    trace, picture = folder / "trace.json", folder / "trace.png"
    run(command(folder, "--trace", trace, "--parallel", "dp"))
    run([python, PLOT, trace, picture])
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size < 150_000
    run([python, PLOT, trace, picture, "--steps", "3:6", "--title", "three"])
    said = run([python, PLOT, trace, picture, "--steps", f"3:{STEPS + 1}"], expect=1)
    assert f"there are steps 0 to {STEPS - 1}" in said, said
    run(command(folder, "--trace", trace, "--epochs", 1, "--batch-size", ROWS))  # of one step
    run([python, PLOT, trace, picture])
    assert "3 is no A:B" in run([python, PLOT, trace, picture, "--steps", "3"], expect=2)
    for text in "[]", "{", '{"traceEvents":[{}]}', '{"traceEvents":3}':
        trace.write_text(text)
        said = run([python, PLOT, trace, picture], expect=1)
        assert f"plot_trace: {trace} is not a timeline" in said and "Traceback" not in said, said
    said = run([python, PLOT, folder / "none", picture], expect=1)
    assert "none cannot be read: No such file or directory" in said and "Traceback" not in said, said
    trace.write_text('{"traceEvents":[]}')
    assert "the file has no events" in run([python, PLOT, trace, picture], expect=1)


with tempfile.TemporaryDirectory() as name:
    data = pathlib.Path(name)
    write_data(data)
    {"none": none, "dp": dp, "shm": shm, "gloo": gloo, "clocks": clocks, "failures": failures, "plot": plot}[CHECK](data)

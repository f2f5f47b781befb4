#!/usr/bin/env python3
"""Runs dp_vs_ddp --advise and --check-every on a small model: they end, say what to do, and their numbers fit together.

usage: advise_test.py DP_VS_DDP
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "TANDEM_CPU_DEVICES")}
SMALL = ["--layers", "6", "--width", "64", "--rounds", "1", "--batch-size", "7"]


def run(*arguments, expect=0):
    done = subprocess.run([sys.argv[1], *arguments], capture_output=True, text=True, env=ENVIRONMENT, timeout=280)
    assert expect in (None, done.returncode), f"{arguments} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def close(a, b):
    return abs(a - b) <= 1e-6 * max(1, abs(a))


with tempfile.TemporaryDirectory() as folder:
    file = pathlib.Path(folder) / "records"
    output = run("--advise", *SMALL, "--devices", "2,3", "--optimizer", "adam", "--json", str(file))
    assert "\nUse " in output or "\nStay on one device" in output, output
    assert "measured" in output and "limited by" in output, output
    assert "Of what was run" in output or "\nNothing that was run was faster" in output, output
    assert "DDP (shm)" in output and ", which computing cannot hide.\n" in output, output
    records = json.loads(file.read_text())
    assert [r["mode"] for r in records][0] == "one" and {r["devices"] for r in records[1:]} == {2, 3}, records
    assert sum(r.get("chosen", False) for r in records) == 1, records
    for r in records:
        assert close(r["predicted_us"], sum(r["parts_us"].values())) and r["predicted_us"] > 0, r
        assert close(r["predicted_speed_up"], records[0]["predicted_us"] / r["predicted_us"]), r
        assert close(r["error"], r["predicted_us"] / r["measured_us"] - 1), r
        assert close(r["measured_speed_up"], records[0]["measured_us"] / r["measured_us"]), r
        if r["mode"] == "one":
            assert r["parts_us"]["waiting"] == r["parts_us"]["exchange"] == r["parts_us"]["wrapper"] == 0, r
    assert [r["bucket_mb"] for r in records if r["mode"] == "ddp"] == [25, 25], records  # no size divides this model
    other = run("--advise", "--layers", "3", "--width", "256", "--rounds", "1", "--batch-size", "8", "--devices", "2",
                "--backend", "gloo", "--json", str(file), expect=None)
    if "'gloo' is not built in" not in other:
        assert "of which computing hides" in other, other
        assert [r["bucket_mb"] for r in json.loads(file.read_text())] == [0, 0, 25, 0.25], other
    assert "compared every 10 steps" in run("--check-every", "10", *SMALL)
    assert "--advise compares one device with more" in run("--advise", *SMALL, "--devices", "1", expect=1)
MISTAKES = [
    (["--advise", "--trace", file], "--trace: is for a run without --advise"),
    (["--advise", "--modes", "dp"], "--modes: is for a run without --advise"),
    (["--advise", "--check-every", 5], "--check-every: is for a run without --advise"),
    (["--advise", "--devices", "2,3,2"], "--devices: has a number twice"),
    (["--check-every", 5, "--trace", file], "--trace: is for a run without --check-every"),
    (["--check-every", 5, "--json", file], "--json: is for a run without --check-every"),
    (["--check-every", 5, "--devices", "2,3"], "--devices: takes one number with --check-every"),
    (["--check-every", 5_000_000_000], "--check-every: is 5000000000; give 1 to 1000"),
    (["--devices", "2,3", "--trace", file], "--devices: takes one number with --trace"),
    (["--modes", "one,dp", "--backend", "shm"], "--backend: is for the mode ddp"),
    (["--trace", "x", "--json", "./x"], "--trace: names the file of --json"),
    (["--rounds", 0], "--rounds: is 0; give 1 or more"),
    (["--width", "x"], "--width: is x; give a number"),
    (["--check-every", -1], "--check-every: is -1; give 1 to 1000"),
]
for arguments, text in MISTAKES:
    output = run(*map(str, arguments), expect=105)
    assert text in output, (arguments, output)
print("passed")

"""Prints a table of training logs (--log of examples/fashion_mnist), one row a file, against the first."""

import json
import math
import pathlib
import sys


def last_epoch(path):
    records = [json.loads(line) for line in path.read_text().splitlines()]
    epochs = [r for r in records if r["event"] == "epoch"]
    if not epochs:
        sys.exit(f"{path.stem}: no epoch was trained, so there is nothing to compare")
    return {key: math.nan if value is None else value for key, value in epochs[-1].items()}


def main():
    paths = [pathlib.Path(p) for p in sys.argv[1:]]
    epochs = [last_epoch(p) for p in paths]
    width = max(len(p.stem) for p in paths)
    print(f"{'mode':<{width}}  {'samples/s':>10}  {'speed-up':>8}  {'train loss':>10}  {'test loss':>9}  {'accuracy':>8}")
    for path, e in zip(paths, epochs):
        speed_up = e["samples_per_s"] / epochs[0]["samples_per_s"]
        print(
            f"{path.stem:<{width}}  {e['samples_per_s']:>10,.0f}  {speed_up:>8.2f}  {e['train_loss']:>10.4f}"
            f"  {e['test_loss']:>9.4f}  {e['test_accuracy']:>8.2%}"
        )


if __name__ == "__main__":
    main()

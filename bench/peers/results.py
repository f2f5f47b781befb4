"""What the scripts of this folder have in common: options, medians, and the table with its file."""

import argparse
import json
import statistics


def numbers(text):
    return [int(n) for n in text.split(",")]


def options(description, batch_sizes):
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=numbers, default=batch_sizes, help="rows of a step, of all processes together")
    parser.add_argument("--optimizer", type=lambda text: text.split(","), default=["sgd", "adam"])
    parser.add_argument("--rounds", type=int, default=11, help="times that are taken of each")
    parser.add_argument("--json", help="write the results to this file")
    return parser


def summary(times):
    """Of microseconds."""
    times = sorted(times)
    return {
        "median_us": statistics.median(times),
        "p10_us": times[len(times) // 10],
        "p90_us": times[-1 - len(times) // 10],
    }


class Table:
    """Prints a row for each result and writes them all to a file, also what there is when the script is ended."""

    def __init__(self, path, columns, digits=0, more=""):
        self.path, self.columns, self.digits, self.records = path, columns, digits, []
        print(self.left({c: c for c in columns}) + f" {'median (us)':>12} {'p10':>9} {'p90':>9}{more}", flush=True)

    def left(self, setting):
        return " ".join(f"{setting[c]:>{max(len(c), 8)}}" for c in self.columns)

    def add(self, setting, result, more="", **further):
        us = [f"{result[key]:.{self.digits}f}" for key in ("median_us", "p10_us", "p90_us")]
        print(self.left(setting) + f" {us[0]:>12} {us[1]:>9} {us[2]:>9}{more}", flush=True)
        self.records.append({**setting, **result, **further})
        if self.path:
            with open(self.path, "w", encoding="utf-8") as file:
                json.dump(self.records, file, indent=1)

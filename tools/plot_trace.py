#!/usr/bin/env python3
"""Draws a timeline that trace::write or parallel::write_trace has written: a row for each track, its spans as bars.

usage: plot_trace.py TRACE OUT.png [--steps A:B] [--title TEXT]
"""

import argparse
import collections
import json
import sys

# What most spans are; the others are grey. Colours that differ for colour-blind people too.
COLOURS = {"forward": "#0072b2", "backward": "#56b4e9", "in flight": "#e69f00", "exposed wait": "#d55e00",
           "wait for normalizer": "#d55e00", "reduce": "#e69f00", "optimizer step": "#009e73", "load batch": "#f0e442",
           "make batch": "#f0e442", "scatter": "#cc79a7", "gather": "#cc79a7", "loss": "#cc79a7", "all_reduce": "#e69f00"}
OTHER = "#bbbbbb"
STEP = "step"


def read(path):
    """The rows, as (process, track, events), and the process that comes first."""
    processes, tracks, recorded = {}, {}, collections.defaultdict(list)
    try:
        with open(path, encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
        for e in events:
            if e["name"] == "process_name":
                processes[e["pid"]] = e["args"]["name"]
            elif e["name"] == "thread_name":
                tracks[e["pid"], e["tid"]] = e["args"]["name"]
            elif e["ph"] in "Xi":
                recorded[e["pid"], e["tid"]].append(e)
    except OSError as e:
        sys.exit(f"plot_trace: {path} cannot be read: {e.strerror}")
    except (ValueError, TypeError, KeyError):
        sys.exit(f"plot_trace: {path} is not a timeline that trace::write or parallel::write_trace has written")
    return [(processes[pid], name, recorded[pid, tid]) for (pid, tid), name in sorted(tracks.items())]


def window(rows, chosen):
    """Begin and end of the steps that are drawn, of the first process that has steps."""
    for _, _, events in rows:
        steps = [e for e in events if e["name"] == STEP]
        if not steps:
            continue
        middle = max(0, min(len(steps) // 2, len(steps) - 2))
        first, last = chosen if chosen else (middle, min(middle + 2, len(steps)))
        if not 0 <= first < last <= len(steps):
            sys.exit(f"plot_trace: there are steps 0 to {len(steps) - 1}; --steps {first}:{last} asks for others")
        return steps[first]["ts"], steps[last - 1]["ts"] + steps[last - 1]["dur"]
    every = [(e["ts"], e["ts"] + e.get("dur", 0)) for _, _, events in rows for e in events]
    if not every:
        sys.exit("plot_trace: the file has no events")
    return min(b for b, _ in every), max(e for _, e in every)


def depths(spans):
    """Each span with the number of spans around it."""
    around = []
    for e in sorted(spans, key=lambda e: (e["ts"], -e["dur"])):
        while around and around[-1] <= e["ts"] + 1e-4:
            around.pop()
        yield e, len(around)
        around.append(e["ts"] + e["dur"])


def draw(rows, begin, end, title, path):
    try:
        import matplotlib
    except ModuleNotFoundError:
        sys.exit("plot_trace: matplotlib is missing; on Debian, apt-get install python3-matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    seen = [(p, t, [e for e in events if e["ts"] < end and e["ts"] + e.get("dur", 0) > begin]) for p, t, events in rows]
    seen = [row for row in seen if row[2]]
    figure, axes = pyplot.subplots(figsize=(9, 1.3 + 0.42 * len(seen)), dpi=100)
    height, shown, labels, previous = 0.8, {}, [], None
    for row, (process, track, events) in enumerate(seen):
        if previous not in (None, process):
            axes.axhline(row - 0.5, color="black", linewidth=0.6)
        labels.append(f"{process}: {track}" if process != previous and len({p for p, _, _ in seen}) > 1 else track)
        previous = process
        deepest = max((d for _, d in depths([e for e in events if e["ph"] == "X"])), default=0)
        for e, depth in depths([e for e in events if e["ph"] == "X"]):
            left, right = max(e["ts"], begin), min(e["ts"] + e["dur"], end)
            colour = COLOURS.get(e["name"], OTHER)
            outer = e["name"] == STEP
            thick = height * (1 - depth / (deepest + 1))  # a span inside another is thinner, from below
            axes.barh(row + (height - thick) / 2, (right - left) / 1000, left=(left - begin) / 1000, height=thick,
                      color="white" if outer else colour, edgecolor="black" if outer else colour, linewidth=0.5)
            if not outer:
                label = e["name"] if e["name"] in COLOURS else "other"
                shown.setdefault(colour, [])
                if label not in shown[colour]:
                    shown[colour].append(label)
        moments = [(e["ts"] - begin) / 1000 for e in events if e["ph"] == "i" and begin <= e["ts"] <= end]
        if moments:
            axes.plot(moments, [row] * len(moments), "|", color="black", markersize=11, markeredgewidth=1.2)
            shown.setdefault("black", ["ready"])
    axes.set_yticks(range(len(seen)), labels, fontsize=9)
    axes.set_ylim(len(seen) - 0.5, -0.5)
    axes.set_xlim(0, (end - begin) / 1000)
    axes.set_xlabel("milliseconds")
    if title:
        axes.set_title(title, fontsize=10)
    marks = [pyplot.Line2D([], [], color=c, marker="|", linestyle="", markersize=11) if c == "black" else
             pyplot.Rectangle((0, 0), 1, 1, facecolor=c) for c in shown]
    axes.legend(marks, [", ".join(names) for names in shown.values()], loc="upper center", ncols=4, fontsize=8,
                bbox_to_anchor=(0.5, -0.5 / (0.42 * len(seen))), frameon=False)
    figure.savefig(path, bbox_inches="tight")


def main():
    def steps(text):
        try:
            first, last = map(int, text.split(":"))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text} is no A:B, such as 3:5") from None
        return first, last

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace")
    parser.add_argument("out")
    parser.add_argument("--steps", type=steps, metavar="A:B", help="steps A to B-1, counted from 0 (default: two in the middle)")
    parser.add_argument("--title", default="")
    arguments = parser.parse_args()
    rows = read(arguments.trace)
    draw(rows, *window(rows, arguments.steps), arguments.title, arguments.out)


if __name__ == "__main__":
    main()

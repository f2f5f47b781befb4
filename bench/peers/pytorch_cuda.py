#!/usr/bin/env python3
"""The training step of bench/cuda_step in PyTorch: eager, as a user writes it, and captured in a CUDA graph.

The captured step has the optimizers' fused, capturable forms. TF32 is off, as in ours.

usage: pytorch_cuda.py [--width 512,4096] [--batch-size 64,4096] [--optimizer sgd,adam] [--layers 2] [--rounds 11] [--json FILE]
"""

import argparse
import json
import statistics
import sys
import time


def seconds_of(torch, calls, call):
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(torch, call, rounds, round_s):
    seconds_of(torch, 5, call)
    calls = max(3, int(round_s / (seconds_of(torch, 3, call) / 3)))
    times = sorted(seconds_of(torch, calls, call) / calls * 1e6 for _ in range(rounds))
    return {"median_us": statistics.median(times), "p10_us": times[len(times) // 10], "p90_us": times[-1 - len(times) // 10]}


def make_step(torch, width, batch_size, optimizer, layers, captured):
    sizes = [784, *[width] * layers]
    parts = [m for a, b in zip(sizes, sizes[1:]) for m in (torch.nn.Linear(a, b), torch.nn.ReLU())]
    model = torch.nn.Sequential(*parts, torch.nn.Linear(sizes[-1], 10)).cuda()
    if optimizer == "adam":
        optim = torch.optim.Adam(model.parameters(), lr=1e-6, **({"fused": True, "capturable": True} if captured else {}))
    else:
        optim = torch.optim.SGD(model.parameters(), lr=1e-6, **({"fused": True} if captured else {}))
    loss_fn = torch.nn.CrossEntropyLoss()
    x, y = torch.rand(batch_size, 784, device="cuda"), torch.randint(0, 10, (batch_size,), device="cuda")

    def step():
        loss_fn(model(x), y).backward()
        optim.step()
        optim.zero_grad(set_to_none=True)

    if not captured:
        return step
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def numbers(text):
    return [int(n) for n in text.split(",")]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=numbers, default=[512, 4096])
    parser.add_argument("--batch-size", type=numbers, default=[64, 4096])
    parser.add_argument("--optimizer", type=lambda s: s.split(","), default=["sgd", "adam"])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--round-ms", type=float, default=100)
    parser.add_argument("--json", help="write the records to this file")
    args = parser.parse_args()
    try:
        import torch
    except ImportError:
        sys.exit("PyTorch is not installed")
    if not torch.cuda.is_available():
        sys.exit("PyTorch finds no CUDA device")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    print(f"PyTorch {torch.__version__}, {torch.cuda.get_device_name()}, {args.layers} hidden layers, float32")
    print(f"{'width':>6} {'batch':>6} {'optimizer':>9} {'way':>8} {'median (us)':>12} {'p10':>9} {'p90':>9}")
    records = []
    for width in args.width:
        for batch_size in args.batch_size:
            for optimizer in args.optimizer:
                for way in ("eager", "captured"):
                    try:
                        step = make_step(torch, width, batch_size, optimizer, args.layers, way == "captured")
                        r = measure(torch, step, args.rounds, args.round_ms / 1e3)
                    except (RuntimeError, TypeError) as e:  # an optimizer's form that this version lacks
                        print(f"{width:>6} {batch_size:>6} {optimizer:>9} {way:>8} failed: {e}", flush=True)
                        continue
                    print(f"{width:>6} {batch_size:>6} {optimizer:>9} {way:>8} {r['median_us']:>12.1f} {r['p10_us']:>9.1f} "
                          f"{r['p90_us']:>9.1f}", flush=True)
                    records.append({"width": width, "batch_size": batch_size, "optimizer": optimizer, "way": way, **r})
                    if args.json:  # also what there is when time runs out
                        with open(args.json, "w", encoding="utf-8") as file:
                            json.dump(records, file, indent=1)


if __name__ == "__main__":
    main()

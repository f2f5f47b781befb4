#!/usr/bin/env python3
"""The training step of bench/step_limit in PyTorch, with the default allocator and with raised malloc thresholds.

Debian's packages python3-torch and libopenblas0-pthread bring PyTorch and a fast BLAS for it. Most of the time of its Adam on the CPU is glibc's malloc returning
memory to the system and faulting it in again; a fair comparison shows both settings.

usage: pytorch_step.py [--batch-size 8,64,512] [--optimizer sgd,adam] [--threads 1,2] [--rounds 11] [--json FILE]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

RAISED = {
    "MALLOC_MMAP_THRESHOLD_": "1000000000",
    "MALLOC_TRIM_THRESHOLD_": "4000000000",
    "MALLOC_TOP_PAD_": "200000000",
}


def measure(batch_size, optimizer, threads, rounds):
    import torch

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(784, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10)
    )
    kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[optimizer]
    optim = kind(model.parameters(), lr=1e-6)
    loss_fn = torch.nn.CrossEntropyLoss()
    x, y = torch.rand(batch_size, 784), torch.randint(0, 10, (batch_size,))

    def step():
        loss_fn(model(x), y).backward()
        optim.step()
        optim.zero_grad(set_to_none=True)

    for _ in range(10):
        step()
    times = []
    for _ in range(rounds):
        start, calls = time.perf_counter(), 0
        while time.perf_counter() - start < 0.05 or calls < 3:
            step()
            calls += 1
        times.append((time.perf_counter() - start) / calls * 1e6)
    times.sort()
    return {
        "median_us": statistics.median(times),
        "p10_us": times[len(times) // 10],
        "p90_us": times[-1 - len(times) // 10],
    }


def numbers(text):
    return [int(n) for n in text.split(",")]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=numbers, default=[8, 64, 512])
    parser.add_argument("--optimizer", type=lambda s: s.split(","), default=["sgd", "adam"])
    parser.add_argument("--threads", type=numbers, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", help="write the records to this file")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        batch_size, optimizer, threads = args.one.split(",")
        print(json.dumps(measure(int(batch_size), optimizer, int(threads), args.rounds)))
        return
    try:
        import torch
    except ImportError:
        sys.exit("PyTorch is not installed: apt-get install python3-torch")
    print(f"PyTorch {torch.__version__}")
    print(f"{'batch':>6} {'optimizer':>9} {'threads':>7} {'malloc':>8} {'median (us)':>12} {'p10':>8} {'p90':>8}")
    records = []
    for threads in args.threads:
        for batch_size in args.batch_size:
            for optimizer in args.optimizer:
                for malloc in ("default", "raised"):
                    environment = {**os.environ, **(RAISED if malloc == "raised" else {})}
                    # A BLAS with threads of its own would not keep to torch.set_num_threads.
                    environment |= {"OPENBLAS_NUM_THREADS": str(threads), "OMP_NUM_THREADS": str(threads)}
                    one = [sys.executable, __file__, "--one", f"{batch_size},{optimizer},{threads}"]
                    done = subprocess.run([*one, "--rounds", str(args.rounds)], env=environment, capture_output=True,
                                          text=True, check=True)
                    r = json.loads(done.stdout)
                    print(f"{batch_size:>6} {optimizer:>9} {threads:>7} {malloc:>8} {r['median_us']:>12.0f} "
                          f"{r['p10_us']:>8.0f} {r['p90_us']:>8.0f}", flush=True)
                    records.append({"batch_size": batch_size, "optimizer": optimizer, "threads": threads,
                                    "malloc": malloc, **r})
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(records, file, indent=1)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""The training step of bench/step_limit in PyTorch, with the default allocator and with raised malloc thresholds.

It needs PyTorch: Debian's packages python3-torch and libopenblas0-pthread bring it and a fast BLAS. Most of the time of
its Adam on the CPU is glibc's malloc returning memory to the system and faulting it in again; a fair comparison shows both
settings.

usage: pytorch_step.py [--batch-size 8,64,512] [--optimizer sgd,adam] [--threads 1,2] [--rounds 11] [--json FILE]
"""

import argparse
import json
import os
import subprocess
import sys
import time

from results import Table, numbers, options, summary

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
    return summary(times)


def main():
    parser = options(__doc__, [8, 64, 512])
    parser.add_argument("--threads", type=numbers, default=[1, 2])
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
    table = Table(args.json, ["batch_size", "optimizer", "threads", "malloc"])
    settings = [(t, b, o, m) for t in args.threads for b in args.batch_size for o in args.optimizer
                for m in ("default", "raised")]
    for threads, batch_size, optimizer, malloc in settings:
        environment = {**os.environ, **(RAISED if malloc == "raised" else {})}
        # A BLAS with threads of its own would not keep to torch.set_num_threads.
        environment |= {"OPENBLAS_NUM_THREADS": str(threads), "OMP_NUM_THREADS": str(threads)}
        one = [sys.executable, __file__, "--one", f"{batch_size},{optimizer},{threads}", "--rounds", str(args.rounds)]
        done = subprocess.run(one, env=environment, capture_output=True, text=True, check=True)
        table.add({"batch_size": batch_size, "optimizer": optimizer, "threads": threads, "malloc": malloc},
                  json.loads(done.stdout))


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""The distributed step of bench/dp_vs_ddp in PyTorch: DistributedDataParallel over Gloo, one thread a process, and its
all-reduce.

It needs PyTorch: Debian's packages python3-torch and libopenblas0-pthread bring it and a fast BLAS. Each setting is measured
with the default allocator and with raised malloc thresholds, as in pytorch_step.py. With --ours build/bench our dp_vs_ddp
and all_reduce are run right after each, so that both sides meet the same state of the machine.

usage: pytorch_ddp.py [--batch-size 8,64,512] [--optimizer sgd,adam] [--nproc 2] [--rounds 11] [--ours build/bench] [--json FILE]
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time

from pytorch_step import RAISED
from results import Table, options, summary

REDUCED = 669_706  # elements of the all-reduce: the gradients of the MLP, 2.68 MB


def median_of_rounds(rounds, call, sync):
    """Microseconds a call. All ranks make the same number of calls, which rank 0's clock has chosen."""
    import torch

    for _ in range(10):
        call()
    start = time.perf_counter()
    for _ in range(10):
        call()
    calls = torch.tensor([max(3, int(0.05 / ((time.perf_counter() - start) / 10)))])
    sync(calls)
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(int(calls)):
            call()
        times.append((time.perf_counter() - start) / int(calls) * 1e6)
    return summary(times)


def measure(batch_size, optimizer, rounds):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    sync = lambda t: dist.broadcast(t, 0)
    if optimizer == "all_reduce":
        data = torch.rand(REDUCED)
        source = torch.rand(REDUCED)

        def step():
            data.copy_(source)  # freshly written, as gradients are
            dist.all_reduce(data)

    else:
        torch.manual_seed(0)
        model = torch.nn.parallel.DistributedDataParallel(
            torch.nn.Sequential(
                torch.nn.Linear(784, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512), torch.nn.ReLU(),
                torch.nn.Linear(512, 10)
            ),
        )
        kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[optimizer]
        optim = kind(model.parameters(), lr=1e-6)
        loss_fn = torch.nn.CrossEntropyLoss()
        rows = batch_size * (rank + 1) // size - batch_size * rank // size
        x, y = torch.rand(rows, 784), torch.randint(0, 10, (rows,))

        def step():
            loss_fn(model(x), y).backward()
            optim.step()
            optim.zero_grad(set_to_none=True)

    result = median_of_rounds(rounds, step, sync)
    if rank == 0:
        print(json.dumps(result), flush=True)
    dist.destroy_process_group()


def run_ranks(args, batch_size, optimizer, malloc):
    """Starts the ranks of one measurement; the result of rank 0."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    environment = {**os.environ, **(RAISED if malloc == "raised" else {}), "OPENBLAS_NUM_THREADS": "1",
                   "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                   "WORLD_SIZE": str(args.nproc), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, __file__, "--one", f"{batch_size},{optimizer}", "--rounds", str(args.rounds)]
    ranks = [subprocess.Popen(command, env={**environment, "RANK": str(r)}, text=True,
                              stdout=subprocess.PIPE if r == 0 else None) for r in range(args.nproc)]
    output = ranks[0].communicate(timeout=600)[0]
    if any(process.wait(timeout=60) for process in ranks):
        sys.exit("a rank has failed")
    return json.loads(output)


def ours(args, batch_size, optimizer):
    """Median of our own step, or all-reduce, in microseconds."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        if optimizer == "all_reduce":
            command = ["all_reduce", "-n", args.nproc, "--backend", "shm", "--bytes", REDUCED * 4, "--fresh"]
        else:
            command = ["dp_vs_ddp", "--modes", "ddp", "--devices", args.nproc, "--batch-size", batch_size, "--optimizer",
                       optimizer, "--rounds", args.rounds]
        command = [os.path.join(args.ours, command[0]), *map(str, command[1:]), "--json", file.name]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return json.load(file)[-1]["median_us"]


def main():
    parser = options(__doc__, [8, 64, 512])
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--ours", help="folder of our benchmarks, to run beside")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        batch_size, optimizer = args.one.split(",")
        measure(int(batch_size), optimizer, args.rounds)
        return
    try:
        import torch
    except ImportError:
        sys.exit("PyTorch is not installed: apt-get install python3-torch")
    print(f"PyTorch {torch.__version__}, Gloo, {args.nproc} processes of 1 thread")
    table = Table(args.json, ["batch_size", "optimizer", "malloc"], more=f" {'ours (us)':>10} {'ratio':>6}")
    settings = [(b, o) for b in args.batch_size for o in args.optimizer] + [(0, "all_reduce")]
    for batch_size, optimizer in settings:
        for malloc in ("default", "raised"):
            result = run_ranks(args, batch_size, optimizer, malloc)
            mine = ours(args, batch_size, optimizer) if args.ours else None
            compared = f" {mine:>10.0f} {result['median_us'] / mine:>6.2f}" if mine else f" {'-':>10} {'-':>6}"
            table.add({"batch_size": batch_size, "optimizer": optimizer, "malloc": malloc}, result, compared,
                      nproc=args.nproc, **({"ours_us": mine} if mine else {}))


if __name__ == "__main__":
    main()

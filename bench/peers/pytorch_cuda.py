#!/usr/bin/env python3
"""The training step of bench/cuda_step in PyTorch: eager, as a user writes it, and captured in a CUDA graph.

It needs PyTorch 2 with CUDA, and a GPU. The captured step has the optimizers' fused, capturable forms. TF32 is off, as in
ours.

usage: pytorch_cuda.py [--width 512,4096] [--batch-size 64,4096] [--optimizer sgd,adam] [--layers 2] [--rounds 11] [--json FILE]
"""

import sys
import time

from results import Table, numbers, options, summary


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
    return summary(seconds_of(torch, calls, call) / calls * 1e6 for _ in range(rounds))


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


def main():
    parser = options(__doc__, [64, 4096])
    parser.add_argument("--width", type=numbers, default=[512, 4096], help="of the hidden layers")
    parser.add_argument("--layers", type=int, default=2, help="hidden layers")
    parser.add_argument("--round-ms", type=float, default=100, help="about how long a round is")
    args = parser.parse_args()
    try:
        import torch
    except ImportError:
        sys.exit("PyTorch is not installed")
    if not torch.cuda.is_available():
        sys.exit("PyTorch finds no CUDA device")
    torch.set_float32_matmul_precision("highest")  # no TF32
    torch.manual_seed(0)
    print(f"PyTorch {torch.__version__}, {torch.cuda.get_device_name()}, {args.layers} hidden layers, float32")
    table = Table(args.json, ["width", "batch_size", "optimizer", "way"], digits=1)
    settings = [(w, b, o, way) for w in args.width for b in args.batch_size for o in args.optimizer
                for way in ("eager", "captured")]
    for width, batch_size, optimizer, way in settings:
        try:
            step = make_step(torch, width, batch_size, optimizer, args.layers, way == "captured")
            result = measure(torch, step, args.rounds, args.round_ms / 1e3)
        except (RuntimeError, TypeError) as e:  # an optimizer's form that this version lacks
            print(f"{width} {batch_size} {optimizer} {way} failed: {e}", flush=True)
            continue
        table.add({"width": width, "batch_size": batch_size, "optimizer": optimizer, "way": way}, result)


if __name__ == "__main__":
    main()

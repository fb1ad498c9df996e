"""python -m benchmarks.pytorch.device JSON: examples/s of a transformer in bfloat16.

It prints a line of JSON for each way. The argument has the keys `name`, `tiny`, `seconds`
and `micro`, the number of examples in a batch; that of the workload if null.
"""

from __future__ import annotations

import dataclasses
import json
import sys

import torch
from torch import nn

from benchmarks.call_rate import calls_per_second
from benchmarks.pytorch import networks
from benchmarks.workloads import LEARNING_RATE, Workload, on_gpu


def main() -> None:
    arguments = json.loads(sys.argv[1])
    workload = on_gpu(arguments["name"], arguments["tiny"])
    if arguments["micro"] is not None and not arguments["tiny"]:
        workload = dataclasses.replace(workload, micro=arguments["micro"])
    _print_rates(workload, arguments["seconds"], compiled=False)
    if torch.cuda.is_available():
        _print_rates(workload, arguments["seconds"], compiled=True)


def _print_rates(workload: Workload, seconds: float, compiled: bool) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = (workload.micro, *workload.input_shape)
    x = torch.randint(workload.classes, shape)
    y = torch.randint(workload.classes, shape)
    model = networks.build(workload).to(device)
    adam = torch.optim.Adam(model.parameters(), LEARNING_RATE, fused=True)
    forward = model
    what = "PyTorch"
    if compiled:
        forward = torch.compile(model)
        what = "PyTorch, compiled"

    def step() -> None:
        update(forward, adam, x.to(device), y.to(device), device)

    rates = calls_per_second(step, finish, seconds)
    result = {
        "what": what,
        "rates": [rate * workload.micro for rate in rates],
        "note": f"torch {torch.__version__} on {device}",
    }
    print(json.dumps(result), flush=True)


def update(
    forward: nn.Module,
    adam: torch.optim.Optimizer,
    x: torch.Tensor,
    y: torch.Tensor,
    device: str,
) -> None:
    """Make one update, with bfloat16 in the forward pass."""
    with torch.autocast(device, torch.bfloat16):
        loss = nn.functional.cross_entropy(forward(x), y)
    loss.backward()
    adam.step()
    adam.zero_grad()


def finish(result: object) -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()

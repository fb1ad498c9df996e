"""python -m benchmarks.pytorch.device JSON: examples/s of a transformer in bfloat16, a line of JSON for each way."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.pytorch.networks import Transformer

ROUNDS = 5


def main() -> None:
    given = json.loads(sys.argv[1])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes, micro = given["sizes"], given["micro"]
    x, y = (
        torch.randint(sizes["vocabulary"], (micro, sizes["length"])) for _ in range(2)
    )
    for what in ("PyTorch", "PyTorch, compiled") if device == "cuda" else ("PyTorch",):
        model = Transformer(**sizes).to(device)
        adam = torch.optim.Adam(model.parameters(), 1e-4, fused=True)
        forward = torch.compile(model) if "compiled" in what else model
        rates = measured(
            lambda: update(forward, adam, x.to(device), y.to(device), device),  # noqa: B023
            given["seconds"],
        )
        note = f"torch {torch.__version__} on {device}"
        print(
            json.dumps(
                {"what": what, "rates": [rate * micro for rate in rates], "note": note}
            ),
            flush=True,
        )


def update(
    forward: nn.Module,
    adam: torch.optim.Optimizer,
    x: torch.Tensor,
    y: torch.Tensor,
    device: str,
) -> None:
    with torch.autocast(device, torch.bfloat16):
        loss = nn.functional.cross_entropy(forward(x), y)
    loss.backward()
    adam.step()
    adam.zero_grad()


def measured(call: Callable[[], object], seconds: float) -> list[float]:
    """Return calls a second in each round."""

    def turn(count: int) -> float:
        begun = time.perf_counter()
        for _ in range(count):
            call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - begun

    turn(3)
    count = max(1, int(3 * seconds / turn(3)))
    return [count / turn(count) for _ in range(ROUNDS)]


if __name__ == "__main__":
    main()

"""The network of the cases in PyTorch, its data, and the large batch by a plain loop.

All of it is in float64.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.conformance.cases import (
    CLASSES,
    FEATURES,
    HIDDEN,
    IGNORED,
    MICRO,
    RATE,
    Arrays,
    Case,
    effective_batches,
    examples,
    initial_weights,
)
from benchmarks.conformance.outcome import LargeBatches

Batch = list[Tensor]  # x, y and, if the examples have weights, these


def prepare() -> None:
    """Let Accelerate, which the Trainer uses, take the CPU even if there is a GPU."""
    os.environ["ACCELERATE_USE_CPU"] = "true"


class Network(nn.Module):
    """Dense, tanh, dense."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(FEATURES, HIDDEN).double()
        self.logits = nn.Linear(HIDDEN, CLASSES).double()
        with torch.no_grad():
            pairs = zip(self.parameters(), initial_weights(), strict=True)
            for parameter, value in pairs:
                parameter.copy_(torch.from_numpy(value.T))

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(torch.tanh(self.hidden(x)))


def total(logits: Tensor, y: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return Σ w·loss over examples or tokens."""
    losses = functional.cross_entropy(
        logits.flatten(0, -2), y.flatten(), ignore_index=IGNORED, reduction="none"
    )
    if weights is not None:
        losses = losses * weights
    return losses.sum()


def size(case: Case, y: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return what the mean divides by."""
    if weights is not None and case.divided_by == "weights":
        return weights.sum()
    return (y != IGNORED).sum()


def penalty(case: Case, network: nn.Module) -> Tensor | float:
    """Return the term that is added to the loss."""
    if not case.penalty:
        return 0.0
    squares = [(parameter**2).sum() for parameter in network.parameters()]
    return case.penalty * sum(squares)


def mean(case: Case, network: nn.Module, batch: Batch) -> Tensor:
    """Return the loss of a batch, as written without a thought of accumulation."""
    x, *targets = batch
    return total(network(x), *targets) / size(case, *targets) + penalty(case, network)


def sgd(
    case: Case, network: nn.Module
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    optimizer = torch.optim.SGD(network.parameters(), RATE)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, case.decay)


def loader(case: Case) -> DataLoader:
    """Return the micro-batches of one device, in order."""
    dataset = TensorDataset(*map(torch.from_numpy, examples(case)))
    return DataLoader(dataset, MICRO // case.devices)


def large(case: Case) -> LargeBatches:
    """Train on large batches."""
    network = Network()
    optimizer, scheduler = sgd(case, network)
    losses = []
    for batch in effective_batches(case):
        loss = mean(case, network, [torch.from_numpy(array) for array in batch])
        optimizer.zero_grad()
        loss.backward()
        if case.clip is not None:
            nn.utils.clip_grad_norm_(network.parameters(), case.clip)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return LargeBatches(weights(network.parameters()), losses)


def weights(parameters: Iterable[nn.Parameter]) -> Arrays:
    """Return parameters in the layout of `cases.initial_weights`."""
    return tuple(np.array(parameter.detach().numpy().T) for parameter in parameters)

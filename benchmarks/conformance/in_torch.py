"""The network of the cases in PyTorch in float64, its data, and the large batch by a plain loop."""

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

Batch = list[Tensor]  # x, y and, where examples have weights, w


def prepare() -> None:
    """Let Accelerate, which the Trainer uses too, take the processor where there is a GPU."""
    os.environ["ACCELERATE_USE_CPU"] = "true"


class Network(nn.Module):
    """Dense, tanh, dense."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.logits = (
            nn.Linear(FEATURES, HIDDEN).double(),
            nn.Linear(HIDDEN, CLASSES).double(),
        )
        with torch.no_grad():
            for parameter, value in zip(
                self.parameters(), initial_weights(), strict=True
            ):
                parameter.copy_(torch.from_numpy(value.T))

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(torch.tanh(self.hidden(x)))


def total(logits: Tensor, y: Tensor, w: Tensor | None = None) -> Tensor:
    """Return Σ w·loss over examples or tokens."""
    values = functional.cross_entropy(
        logits.flatten(0, -2), y.flatten(), ignore_index=IGNORED, reduction="none"
    )
    return (values if w is None else values * w).sum()


def size(case: Case, y: Tensor, w: Tensor | None = None) -> Tensor:
    """Return what the mean divides by."""
    return (
        w.sum()
        if w is not None and case.divided_by == "weights"
        else (y != IGNORED).sum()
    )


def penalty(case: Case, network: nn.Module) -> Tensor | float:
    return case.penalty and case.penalty * sum(
        (parameter**2).sum() for parameter in network.parameters()
    )


def mean(case: Case, network: nn.Module, batch: Batch) -> Tensor:
    """Return the loss of a batch, as a user writes it who knows nothing of accumulation."""
    x, *rest = batch
    return total(network(x), *rest) / size(case, *rest) + penalty(case, network)


def sgd(
    case: Case, network: nn.Module
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    optimizer = torch.optim.SGD(network.parameters(), RATE)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, case.decay)


def loader(case: Case) -> DataLoader:
    """Return the micro-batches of one device, in order."""
    return DataLoader(
        TensorDataset(*map(torch.from_numpy, examples(case))), MICRO // case.devices
    )


def large(case: Case) -> tuple[Arrays, list[float]]:
    """Return the weights after the last update, and the loss of each."""
    network, losses = Network(), []
    optimizer, scheduler = sgd(case, network)
    for batch in effective_batches(case):
        loss = mean(case, network, [torch.from_numpy(each) for each in batch])
        optimizer.zero_grad()
        loss.backward()
        if case.clip is not None:
            nn.utils.clip_grad_norm_(network.parameters(), case.clip)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return weights(network.parameters()), losses


def weights(parameters: Iterable[nn.Parameter]) -> Arrays:
    """Return them in the layout of `cases.initial_weights`."""
    return tuple(np.array(parameter.detach().numpy().T) for parameter in parameters)

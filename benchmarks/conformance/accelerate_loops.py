"""Accelerate: `accumulate`, and the loop of its guide for variable sizes."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator

from benchmarks.conformance import in_torch
from benchmarks.conformance.cases import FACTOR, Case
from benchmarks.conformance.in_torch import Network, mean, penalty, size, total, weights
from benchmarks.conformance.outcome import Outcome, Way, by_weights

prepare = in_torch.prepare
NO_LOG = Outcome(note="Accelerate logs only what the loop passes to it")


class Prepared(NamedTuple):
    """What Accelerate has wrapped."""

    accelerator: Any
    model: Any
    optimizer: Any
    scheduler: Any
    loader: Any


def accumulate(case: Case) -> Outcome:
    if case.logged:
        return NO_LOG
    accelerator, model, optimizer, scheduler, loader = _prepared(case)
    for _ in range(case.epochs):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(mean(case, model, batch))
                if case.clip is not None and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), case.clip)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    return by_weights(weights(model.parameters()), in_torch.large(case).weights)


def variable_size(case: Case) -> Outcome:
    if case.logged:
        return NO_LOG
    prepared = _prepared(case)
    accelerator, model, optimizer, scheduler, loader = prepared
    for _ in range(case.epochs):
        batches = iter(loader)
        for first in range(0, len(loader), FACTOR):
            count = min(FACTOR, len(loader) - first)
            _backward(case, prepared, [next(batches) for _ in range(count)])
            if case.clip is not None:
                accelerator.clip_grad_norm_(model.parameters(), case.clip)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    note = ""
    if case.divided_by == "weights":
        note = "with Σw in place of the number of tokens"
    return by_weights(weights(model.parameters()), in_torch.large(case).weights, note)


def _backward(case: Case, prepared: Prepared, batches: list[Any]) -> None:
    """Sum the gradients of the micro-batches of one update."""
    accelerator = prepared.accelerator
    model = prepared.model
    sizes = torch.stack([size(case, *targets) for _, *targets in batches])
    items = accelerator.gather(sizes.sum()).sum().item()
    for number, (x, *targets) in enumerate(batches, 1):
        is_last = number == len(batches)
        if accelerator.num_processes == 1 or is_last:
            synchronization = contextlib.nullcontext()
        else:
            synchronization = model.no_sync()
        with synchronization:
            scale = FACTOR * accelerator.num_processes
            loss = total(model(x), *targets) * scale / items
            accelerator.backward(loss + penalty(case, model))


def _prepared(case: Case) -> Prepared:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=FACTOR)
    network = Network()
    optimizer, scheduler = in_torch.sgd(case, network)
    loader = in_torch.loader(case)
    wrapped = accelerator.prepare(network, optimizer, scheduler, loader)
    return Prepared(accelerator, *wrapped)


WAYS: dict[str, Way] = {"accumulate": accumulate, "variable_size": variable_size}

"""Accelerate: `accelerator.accumulate`, and the loop that its guide writes for samples of variable size."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from accelerate import Accelerator

from benchmarks.conformance import in_torch
from benchmarks.conformance.cases import FACTOR, Case
from benchmarks.conformance.in_torch import Network, mean, penalty, size, total, weights
from benchmarks.conformance.outcome import Outcome, Way, by_weights

prepare = in_torch.prepare
NO_LOG = Outcome(note="Accelerate logs what a loop gives it, and when")


def accumulate(case: Case) -> Outcome:
    if case.logged:
        return NO_LOG
    accelerator, model, sgd, scheduler, loader = _prepared(case)
    for _ in range(case.epochs):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(mean(case, model, batch))
                if case.clip is not None and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), case.clip)
                sgd.step()
                scheduler.step()
                sgd.zero_grad()
    return by_weights(weights(model.parameters()), in_torch.large(case)[0])


def variable_size(case: Case) -> Outcome:
    if case.logged:
        return NO_LOG
    accelerator, model, sgd, scheduler, loader = _prepared(case)
    for _ in range(case.epochs):
        batches = iter(loader)
        remainder = len(loader) % FACTOR or FACTOR
        updates = -(-len(loader) // FACTOR)
        for update in range(updates):
            now = [
                next(batches)
                for _ in range(FACTOR if update < updates - 1 else remainder)
            ]
            items = torch.stack([size(case, *rest) for _, *rest in now]).sum()
            items = accelerator.gather(items).sum().item()
            for number, (x, *rest) in enumerate(now, 1):
                several = accelerator.num_processes > 1
                with (
                    model.no_sync()
                    if several and number < len(now)
                    else contextlib.nullcontext()
                ):
                    loss = (
                        total(model(x), *rest)
                        * FACTOR
                        * accelerator.num_processes
                        / items
                    )
                    accelerator.backward(loss + penalty(case, model))
            if case.clip is not None:
                accelerator.clip_grad_norm_(model.parameters(), case.clip)
            sgd.step()
            scheduler.step()
            sgd.zero_grad()
    note = (
        "with Σw in place of the number of tokens"
        if case.divided_by == "weights"
        else ""
    )
    return by_weights(weights(model.parameters()), in_torch.large(case)[0], note)


def _prepared(case: Case) -> Any:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=FACTOR)
    network = Network()
    optimizer, scheduler = in_torch.sgd(case, network)
    return accelerator, *accelerator.prepare(
        network, optimizer, scheduler, in_torch.loader(case)
    )


WAYS: dict[str, Way] = {"accumulate": accumulate, "variable_size": variable_size}

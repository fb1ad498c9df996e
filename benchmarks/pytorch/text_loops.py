"""Two loops over texts of unequal length, as their documentation writes them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments

from benchmarks.pytorch.text_model import Example, TextModel, collate
from benchmarks.texts import Case

Updated = Callable[[], None]  # called after each update


def pytorch(
    case: Case,
    examples: list[Example],
    model: TextModel,
    optimizer: torch.optim.Optimizer,
    updated: Updated,
) -> None:
    """Train for an epoch by hand, in the order of the examples."""
    loader = DataLoader(examples, case.micro, collate_fn=collate)
    for number, batch in enumerate(loader, 1):
        (model(**batch)["loss"] / case.factor).backward()
        if number % case.factor == 0:
            optimizer.step()
            optimizer.zero_grad()
            updated()


def trainer_by_length(
    case: Case,
    examples: list[Example],
    model: TextModel,
    updated: Updated,
    **arguments: Any,
) -> None:
    """Train with the Trainer, which groups examples by length.

    Args:
        case: how an effective batch is cut.
        examples: from which the Trainer draws.
        model: what is trained.
        updated: called after each update.
        arguments: further ones of `TrainingArguments`.
    """
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model,
            TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=case.micro,
                gradient_accumulation_steps=case.factor,
                train_sampling_strategy="group_by_length",
                lr_scheduler_type="constant",
                max_grad_norm=0,
                use_cpu=True,
                remove_unused_columns=False,
                save_strategy="no",
                logging_strategy="no",
                report_to="none",
                disable_tqdm=True,
                **arguments,
            ),
            data_collator=collate,
            train_dataset=examples,
            callbacks=[UpdateCallback(updated)],
        )
        trainer.train()


class UpdateCallback(TrainerCallback):
    """Calls `updated` once an update."""

    def __init__(self, updated: Updated):
        self.updated = updated

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.updated()

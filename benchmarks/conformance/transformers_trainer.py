"""The Trainer of transformers: with the model's loss, and with `compute_loss_func`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from benchmarks.conformance import in_torch
from benchmarks.conformance.cases import FACTOR, MICRO, Case, examples
from benchmarks.conformance.in_torch import Network, penalty, size, total, weights
from benchmarks.conformance.outcome import Outcome, Way, by_log, by_weights

prepare = in_torch.prepare
NOTES = {
    "weights_by_sum": "the Trainer counts labels, regardless of their weights",
    "penalty": (
        "`compute_loss_func` adds the term undivided to each micro-batch's loss, and "
        "these losses are summed"
    ),
}


class Model(nn.Module):
    """Returns its own loss if it gets labels, as the models of transformers do.

    The parameter `w` has the weights of the examples. The Trainer passes the columns of
    the dataset by their names.
    """

    def __init__(self, case: Case):
        super().__init__()
        self.case = case
        self.network = Network()

    def forward(
        self, x: Tensor, labels: Tensor | None = None, w: Tensor | None = None
    ) -> dict[str, Any]:
        logits = self.network(x)
        added = penalty(self.case, self.network)
        outputs = {"logits": logits, "w": w, "penalty": added}
        if labels is None:
            return outputs
        mean = total(logits, labels, w) / size(self.case, labels, w)
        return {"loss": mean + added, **outputs}


def loss_by_the_number_of_items(
    outputs: Any, labels: Tensor, num_items_in_batch: Any
) -> Tensor:
    """Return the part of the update's loss that a micro-batch has."""
    sum_of_losses = total(outputs["logits"], labels, outputs["w"])
    return sum_of_losses / num_items_in_batch + outputs["penalty"]


class InOrder(Trainer):
    """Takes the examples in the order of the large batches."""

    def get_train_dataloader(self) -> DataLoader:
        return self.accelerator.prepare(
            DataLoader(self.train_dataset, self.args.per_device_train_batch_size)
        )


def own_loss(case: Case) -> Outcome:
    return _outcome(case, None, "")


def loss_function(case: Case) -> Outcome:
    return _outcome(case, loss_by_the_number_of_items, NOTES.get(case.name, ""))


def _outcome(
    case: Case, compute_loss_func: Callable[..., Tensor] | None, note: str
) -> Outcome:
    model = Model(case)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=MICRO // case.devices,
            gradient_accumulation_steps=FACTOR,
            num_train_epochs=case.epochs,
            max_grad_norm=case.clip or 0,
            logging_steps=1,
            use_cpu=True,
            remove_unused_columns=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = InOrder(
            model,
            arguments,
            train_dataset=_dataset(case),
            optimizers=in_torch.sgd(case, model),
            compute_loss_func=compute_loss_func,
        )
        trainer.train()

    large = in_torch.large(case)
    if case.logged:
        logged = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        return by_log(logged, len(logged), large.losses, note)
    return by_weights(weights(model.parameters()), large.weights, note)


def _dataset(case: Case) -> list[dict[str, Tensor]]:
    """Return a dict for each example, with the arguments of `Model.forward`."""
    dataset = []
    for example in zip(*examples(case), strict=True):
        tensors = map(torch.as_tensor, example)
        # The weights are missing in most cases.
        dataset.append(dict(zip(("x", "labels", "w"), tensors, strict=False)))
    return dataset


WAYS: dict[str, Way] = {"own_loss": own_loss, "loss_function": loss_function}

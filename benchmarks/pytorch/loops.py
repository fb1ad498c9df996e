"""Loops that accumulate gradients, each as its documentation writes it.

They share what was fastest of what PyTorch's documentation offers: the fused Adam,
micro-batches indexed at once, the faster layout of images, and sums of sparse gradients
for the embedding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.pytorch import networks
from benchmarks.workloads import EPOCH, LEARNING_RATE, Workload

Updated = Callable[[], None]  # called after each update


def pytorch(workload: Workload, model: nn.Module, updated: Updated) -> None:
    """Train without end, by hand."""
    _by_hand(workload, model, model, updated)


def pytorch_compiled(workload: Workload, model: nn.Module, updated: Updated) -> None:
    """Train without end, by hand, with `torch.compile`."""
    _by_hand(workload, model, torch.compile(model), updated)


def _by_hand(
    workload: Workload, model: nn.Module, forward: Any, updated: Updated
) -> None:
    factor = workload.factor
    adam = optimizer(model)
    loss = nn.CrossEntropyLoss()
    loader = batches(workload)
    while True:
        for number, (x, y) in enumerate(loader, 1):
            (loss(forward(x), y) / factor).backward()
            if number % factor == 0:
                adam.step()
                adam.zero_grad()
                updated()


def accelerate(workload: Workload, model: nn.Module, updated: Updated) -> None:
    """Train without end, with Accelerate."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=workload.factor)
    loss = nn.CrossEntropyLoss()
    model, adam, loader = accelerator.prepare(
        model, optimizer(model), batches(workload)
    )
    while True:
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss(model(x), y))
                adam.step()
                adam.zero_grad()
            if accelerator.sync_gradients:
                updated()


def with_lightning(workload: Workload, model: nn.Module, updated: Updated) -> None:
    """Train without end, with Lightning."""
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=-1,
        accumulate_grad_batches=workload.factor,
        callbacks=[UpdateCallback(workload.factor, updated)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(model), batches(workload))


LOOPS = {
    "PyTorch": pytorch,
    "PyTorch, compiled": pytorch_compiled,
    "Accelerate": accelerate,
    "Lightning": with_lightning,
}


class Module(lightning.LightningModule):
    """A model with loss and optimizer, for Lightning."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model
        self.loss = nn.CrossEntropyLoss()

    def training_step(self, batch: Any, _: int) -> Tensor:
        x, y = batch
        return self.loss(self.model(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer(self.model)


class UpdateCallback(lightning.Callback):
    """Calls `updated` once an update."""

    def __init__(self, factor: int, updated: Updated):
        self.factor = factor
        self.updated = updated

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % self.factor == 0:
            self.updated()


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return the fused Adam, which was the fastest on a CPU too.

    It takes no sparse gradient. The sum of the sparse ones is made dense before its
    step: a dense gradient for each micro-batch took six times as long. `SparseAdam` is
    another optimizer: it does not change the moments of a row that was not looked up.
    """
    adam = torch.optim.Adam(model.parameters(), LEARNING_RATE, fused=True)

    def make_dense(*_: Any) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()

    if isinstance(model, networks.EmbeddingModel):
        adam.register_step_pre_hook(make_dense)
    return adam


def batches(workload: Workload) -> DataLoader:
    """Return shuffled micro-batches out of memory.

    Each is indexed at once: the default collates single examples.
    """
    x, y = map(torch.from_numpy, workload.examples(EPOCH * workload.effective))
    if networks.takes_images(workload):
        x = x.permute(0, 3, 1, 2)  # the channels remain last in memory
        if workload.name not in networks.CHANNELS_LAST:
            x = x.contiguous()
    return DataLoader(
        IndexedBatches(x, y), workload.micro, shuffle=True, collate_fn=as_it_is
    )


class IndexedBatches(TensorDataset):
    """Tensors of which a batch is indexed at once."""

    def __getitems__(self, rows: list[int]) -> tuple[Tensor, ...]:
        return self[torch.tensor(rows)]


def as_it_is(batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Collate a batch of `IndexedBatches`."""
    return batch

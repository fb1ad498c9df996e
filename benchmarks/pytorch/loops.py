"""Three loops that accumulate gradients, each as its documentation writes it, and what they share.

What they share is what was fastest of what PyTorch's documentation offers: the fused Adam, whole micro-batches indexed
at once, the faster layout of images, and sums of sparse gradients for the embedding.
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
from benchmarks.workloads import EPOCH, RATE, examples, sizes

Updated = Callable[[], None]


def pytorch(name: str, model: nn.Module, updated: Updated) -> None:
    factor, adam, loss = sizes(name).factor, optimizer(model), nn.CrossEntropyLoss()
    loader = batches(name)
    while True:
        for number, (x, y) in enumerate(loader, 1):
            (loss(model(x), y) / factor).backward()
            if number % factor == 0:
                adam.step()
                adam.zero_grad()
                updated()


def accelerate(name: str, model: nn.Module, updated: Updated) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=sizes(name).factor)
    loss = nn.CrossEntropyLoss()
    model, adam, loader = accelerator.prepare(model, optimizer(model), batches(name))
    while True:
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss(model(x), y))
                adam.step()
                adam.zero_grad()
            if accelerator.sync_gradients:
                updated()


class Module(lightning.LightningModule):
    """A model as Lightning wants it."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model, self.loss = model, nn.CrossEntropyLoss()

    def training_step(self, batch: Any, _: int) -> Tensor:
        x, y = batch
        return self.loss(self.model(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer(self.model)


class Watch(lightning.Callback):
    """Calls `updated` once an update."""

    def __init__(self, factor: int, updated: Updated):
        self.factor, self.updated = factor, updated

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % self.factor == 0:
            self.updated()


def with_lightning(name: str, model: nn.Module, updated: Updated) -> None:
    factor = sizes(name).factor
    quiet = (
        "logger",
        "enable_checkpointing",
        "enable_progress_bar",
        "enable_model_summary",
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=-1,
        accumulate_grad_batches=factor,
        callbacks=[Watch(factor, updated)],
        **dict.fromkeys(quiet, False),
    )
    trainer.fit(Module(model), batches(name))


LOOPS = {"PyTorch": pytorch, "Accelerate": accelerate, "Lightning": with_lightning}


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return the fused Adam, which was the fastest on a CPU too.

    It takes no sparse gradient. The sum of the sparse ones is made dense before its step: a dense gradient for each
    micro-batch took six times as long. `SparseAdam` is another optimizer: its moments of a row that was not looked up
    stay.
    """
    adam = torch.optim.Adam(model.parameters(), RATE, fused=True)

    def densify(*_: Any) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()

    if any(
        isinstance(layer, nn.Embedding) and layer.sparse for layer in model.modules()
    ):
        adam.register_step_pre_hook(densify)
    return adam


def batches(name: str) -> DataLoader:
    """Return shuffled micro-batches out of memory, each indexed at once: the default collates single examples."""
    x, y = map(torch.from_numpy, examples(name, EPOCH * sizes(name).effective))
    if name in networks.IMAGES:
        x = x.permute(0, 3, 1, 2)  # channels last in memory, as they lie there
        x = x if name in networks.CHANNELS_LAST else x.contiguous()
    return DataLoader(
        Batched(x, y), sizes(name).micro, shuffle=True, collate_fn=as_it_is
    )


class Batched(TensorDataset):
    """Tensors of which a whole batch is indexed at once."""

    def __getitems__(self, rows: list[int]) -> tuple[Tensor, ...]:
        return self[torch.tensor(rows)]


def as_it_is(batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Collate what `Batched` gives."""
    return batch

"""Lightning's Trainer with `accumulate_grad_batches`."""

from __future__ import annotations

import csv
import tempfile
from pathlib import Path
from typing import Any

import lightning
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.conformance import in_torch
from benchmarks.conformance.cases import FACTOR, MICRO, Case
from benchmarks.conformance.in_torch import Batch, Network, mean, weights
from benchmarks.conformance.outcome import Outcome, Way, by_log, by_weights

prepare = in_torch.prepare


class Module(lightning.LightningModule):
    """The network with data, loss and optimizer, for Lightning."""

    def __init__(self, case: Case):
        super().__init__()
        self.case = case
        self.network = Network()

    def training_step(self, batch: Batch, _: int) -> Tensor:
        loss = mean(self.case, self.network, batch)
        self.log("loss", loss)
        return loss

    def train_dataloader(self) -> DataLoader:
        loader = in_torch.loader(self.case)
        if self.case.devices == 1:
            return loader
        # Lightning's own sampler for several devices shuffles.
        sampler: DistributedSampler = DistributedSampler(loader.dataset, shuffle=False)
        return DataLoader(loader.dataset, MICRO // self.case.devices, sampler=sampler)

    def configure_optimizers(self) -> Any:
        optimizer, scheduler = in_torch.sgd(self.case, self)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def accumulate_grad_batches(case: Case) -> Outcome:
    module = Module(case)
    strategy = "ddp" if case.devices > 1 else "auto"
    with tempfile.TemporaryDirectory() as folder:
        logger: Any = CSVLogger(folder) if case.logged else False
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=case.devices,
            strategy=strategy,
            precision="64-true",
            max_epochs=case.epochs,
            accumulate_grad_batches=FACTOR,
            gradient_clip_val=case.clip,
            log_every_n_steps=1,
            use_distributed_sampler=False,
            logger=logger,
            default_root_dir=folder,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module)
        large = in_torch.large(case)
        if case.logged:
            losses = _logged_losses(Path(logger.log_dir) / "metrics.csv")
            note = "`self.log` in `training_step` logs the loss of the last micro-batch"
            return by_log(losses, len(losses), large.losses, note)
    return by_weights(weights(module.parameters()), large.weights)


def _logged_losses(path: Path) -> list[float]:
    with path.open() as file:
        rows = list(csv.DictReader(file))
    return [float(row["loss"]) for row in rows if row["loss"]]


WAYS: dict[str, Way] = {"accumulate_grad_batches": accumulate_grad_batches}

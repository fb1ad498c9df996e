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
    """The network as Lightning wants it."""

    def __init__(self, case: Case):
        super().__init__()
        self.case, self.network = case, Network()

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
    with tempfile.TemporaryDirectory() as folder:
        logger = CSVLogger(folder)
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=case.devices,
            strategy="ddp" if case.devices > 1 else "auto",
            precision="64-true",
            max_epochs=case.epochs,
            accumulate_grad_batches=FACTOR,
            gradient_clip_val=case.clip,
            log_every_n_steps=1,
            use_distributed_sampler=False,
            logger=logger if case.logged else False,
            default_root_dir=folder,
            **dict.fromkeys(
                ("enable_checkpointing", "enable_progress_bar", "enable_model_summary"),
                False,
            ),
        )
        trainer.fit(module)
        expected, losses = in_torch.large(case)
        if case.logged:
            with (Path(logger.log_dir) / "metrics.csv").open() as file:
                logged = [
                    float(row["loss"]) for row in csv.DictReader(file) if row["loss"]
                ]
            return by_log(
                logged,
                len(logged),
                losses,
                "`self.log` in `training_step`: that of the last micro-batch",
            )
    return by_weights(weights(module.parameters()), expected)


WAYS: dict[str, Way] = {"accumulate_grad_batches": accumulate_grad_batches}

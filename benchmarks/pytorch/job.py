"""python -m benchmarks.pytorch.job: the README's main job with Lightning.

Its MLFlowLogger logs into ./mlflow.db.
"""

from __future__ import annotations

from typing import Any

import lightning
import mlflow
import torch
from lightning.pytorch.loggers import MLFlowLogger
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.main_job_sizes import (
    EPOCHS,
    FACTOR,
    MICRO,
    TRAINING_EXAMPLES,
    VALIDATION_EXAMPLES,
)
from benchmarks.pytorch.loops import IndexedBatches, as_it_is

STORE = "sqlite:///mlflow.db"


class Module(lightning.LightningModule):
    """The network of `conf/model/cnn.yaml` with AdamW and a cosine after a warm-up."""

    def __init__(self, updates: int):
        super().__init__()
        self.model = nn.Sequential(
            nn.Conv2d(1, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(64, 128, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(512, 128),
            nn.ReLU(),
            nn.Linear(128, 10),
        )
        self.loss = nn.CrossEntropyLoss()
        self.updates = updates

    def training_step(self, batch: Any, _: int) -> Tensor:
        return self._logged_loss(batch, "train")

    def validation_step(self, batch: Any, _: int) -> None:
        self._logged_loss(batch, "val")

    def _logged_loss(self, batch: Any, kind: str) -> Tensor:
        x, y = batch
        logits = self.model(x)
        loss = self.loss(logits, y)
        accuracy = (logits.argmax(1) == y).float().mean()
        metrics = {f"{kind}/loss": loss, f"{kind}/accuracy": accuracy}
        self.log_dict(metrics, batch_size=len(y))
        return loss

    def configure_optimizers(self) -> Any:
        adam = torch.optim.AdamW(
            self.parameters(), 0.01, weight_decay=0.004, fused=True
        )
        rate = torch.optim.lr_scheduler.OneCycleLR(
            adam, 0.01, self.updates, pct_start=0.05, div_factor=10
        )
        return [adam], [{"scheduler": rate, "interval": "step"}]


def main() -> None:
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.tensor(digits.target)
    end = TRAINING_EXAMPLES + VALIDATION_EXAMPLES
    training = IndexedBatches(x[:TRAINING_EXAMPLES], y[:TRAINING_EXAMPLES])
    validation = IndexedBatches(x[TRAINING_EXAMPLES:end], y[TRAINING_EXAMPLES:end])

    mlflow.set_tracking_uri(STORE)
    mlflow.enable_system_metrics_logging()
    with mlflow.start_run() as run:
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=EPOCHS,
            accumulate_grad_batches=FACTOR,
            log_every_n_steps=1,
            logger=MLFlowLogger(tracking_uri=STORE, run_id=run.info.run_id),
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        updates_per_epoch = -(-TRAINING_EXAMPLES // (MICRO * FACTOR))
        module = Module(EPOCHS * updates_per_epoch)
        trainer.fit(
            module,
            DataLoader(training, MICRO, shuffle=True, collate_fn=as_it_is),
            DataLoader(validation, VALIDATION_EXAMPLES, collate_fn=as_it_is),
        )
        # The default format traces the graph, which takes longer.
        mlflow.pytorch.log_model(
            module.model,
            name="model",
            pip_requirements=["torch"],
            serialization_format="pickle",
        )


if __name__ == "__main__":
    main()

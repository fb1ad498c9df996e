"""Ours: the training loop of `pipeline train` with its batches, update and recorder."""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf
from omegaconf import OmegaConf

from benchmarks.conformance import in_keras
from benchmarks.conformance.cases import FACTOR, MICRO, Case, examples
from benchmarks.conformance.outcome import Outcome, Way, by_log, by_weights
from pipeline.accumulation import Update
from pipeline.config.plan import Plan
from pipeline.config.sizes import Batching
from pipeline.config.stages import Slice
from pipeline.dataset import batches as batching
from pipeline.dataset.splits import Data
from pipeline.tracking.tracker import Tracker
from pipeline.training.loop import Trainer
from pipeline.training.progress import Progress
from pipeline.training.recorder import Recorder

prepare = in_keras.prepare


class LossTracker(Tracker):
    """Keeps the loss of every row, and logs nothing."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def update(
        self, update: int, results: Mapping, performance: Mapping, at: float
    ) -> None:
        self.losses.append(results["loss"])

    def summary(self, updates: int, stopped_by: str | None, best: object) -> None: ...


def ours(case: Case) -> Outcome:
    strategy = in_keras.strategy(case)
    with strategy.scope():
        model = in_keras.network(case)
        optimizer = in_keras.optimizer(case)
        optimizer.build(model.trainable_variables)
    sizes = Batching(case.sizes[0], MICRO // case.devices, FACTOR, case.devices)
    update = Update(
        model, in_keras.loss(case), optimizer, sizes.micro_batch_size, strategy=strategy
    )

    data = Data(tf.data.Dataset.from_tensor_slices(examples(case)), None)
    node = OmegaConf.create({"in_memory": True})
    slices = [Slice(sizes.effective_batch_size, case.epochs)]
    batches = batching.effective_batches(node, data, slices, seed=0)

    plan = Plan(sizes, sum(case.sizes), case.updates)
    tracker = LossTracker()
    progress = Progress(case.updates, shown=False)
    Trainer(update, batches, Recorder(tracker, plan, 1, lambda: 0, progress)).fit()

    # Our batches are shuffled, so they are those of the large batches too.
    large = in_keras.large(case, list(batches.as_numpy_iterator()))
    if case.logged:
        return by_log(tracker.losses, len(tracker.losses), large.losses)
    return by_weights(model.get_weights(), large.weights)


WAYS: dict[str, Way] = {"ours": ours}

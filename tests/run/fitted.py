"""Trains what a config says in this process, to its rows: without a store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import keras
import numpy as np
from tensorflow.python.framework.config import disable_op_determinism

from pipeline.components import assembly, fitting
from pipeline.components.assembly import Parts
from pipeline.config.compose import composed
from pipeline.config.resolve import resolve
from tests.training.test_loop import Rows


class Tracker(Rows):
    """Keeps the rows of a run whose micro-batches all fit into memory."""

    def evaluation_halved(self, *_: object) -> None:
        raise AssertionError("there is memory enough")


@dataclass
class Fitted:
    """What training has left.

    Attributes:
        parts: those of the run, whose model is trained.
        first_weights: of the model, before the first update.
        rows: those of updates and validations, in their order.
    """

    parts: Parts
    first_weights: list[np.ndarray]
    rows: Rows

    def curve(self, name: str) -> list[float]:
        """Return the values of a result by update."""
        return [row[name] for _, row in self.rows.updates]

    def bits(self) -> list[bytes]:
        """Return the weights after the last update, as bytes."""
        return [array.tobytes() for array in self.parts.model.get_weights()]


def parts_of(*overrides: str) -> Parts:
    """Return the parts of the run that the overrides of the config describe."""
    return assembly.assemble(resolve(composed(overrides), overrides))


def fit(folder: Path, *overrides: str) -> Fitted:
    """Train in this process, and return what is left; nothing is put into `folder`."""
    with _settings_restored():
        parts = parts_of(*overrides)
        first_weights = parts.model.get_weights()
        tracker = Tracker()
        recorder = fitting.recorder(parts, tracker)
        with fitting.checkpoints(parts, folder) as checkpoints:
            fitting.fit(parts, parts.update(), recorder, checkpoints, None)
    return Fitted(parts, first_weights, tracker)


@contextmanager
def _settings_restored() -> Iterator[None]:
    """Restore the precision of this process, and end its determinism."""
    floatx = keras.config.floatx()
    policy = keras.config.dtype_policy()
    try:
        yield
    finally:
        keras.config.set_floatx(floatx)
        keras.config.set_dtype_policy(policy)
        disable_op_determinism()

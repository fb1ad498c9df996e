"""Keras' callbacks around the updates, with one that notes which of them ends a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras


class Stopped:
    """Which of a run's callbacks has set `model.stop_training`.

    Attributes:
        by: its name; None while none has.
    """

    def __init__(self) -> None:
        self.by: str | None = None

    def watched(self, callbacks: Mapping[str, keras.callbacks.Callback]) -> list[keras.callbacks.Callback]:
        """Return the callbacks in their order, each with one after it that looks at what it did."""
        return [each for name, callback in callbacks.items() for each in (callback, _Witness(self, name))]


class _Witness(keras.callbacks.Callback):
    """Stands after the callback `name`."""

    async_safe = True  # Keras then calls the callbacks of a run as it would without this one

    def __init__(self, stopped: Stopped, name: str):
        super().__init__()
        self._stopped, self._name = stopped, name

    def _look(self, *_: Any, **__: Any) -> None:
        if not self.model.stop_training:
            self._stopped.by = None  # it may be taken back, before the loop has seen it
        elif self._stopped.by is None:
            self._stopped.by = self._name

    on_train_begin = on_epoch_begin = on_epoch_end = on_test_begin = on_test_end = _look
    on_train_batch_begin = on_train_batch_end = _look


def watches_updates(callback: keras.callbacks.Callback) -> bool:
    """Return whether the callback has a hook of batches: handing it an update's logs waits for the device."""
    names = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")
    hooks = {name: getattr(callback, name) for name in names}  # LambdaCallback's are of the instance
    return any(getattr(hook, "__func__", None) is not getattr(keras.callbacks.Callback, n) for n, hook in hooks.items())

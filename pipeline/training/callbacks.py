"""Keras' callbacks around the updates: which of them stops the run, and which has hooks of batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras


class StopCause:
    """Notes which of a run's callbacks sets `model.stop_training`.

    Attributes:
        callback: the name of that callback; None while there is none.
    """

    def __init__(self) -> None:
        self.callback: str | None = None

    def after_each(self, callbacks: Mapping[str, keras.callbacks.Callback]) -> list[keras.callbacks.Callback]:
        """Return the callbacks in their order, each followed by one that notes whether it stopped the run."""
        return [each for name, callback in callbacks.items() for each in (callback, _Watch(self, name))]


class _Watch(keras.callbacks.Callback):
    """Follows the callback `name`."""

    async_safe = True  # so that Keras calls the callbacks of a run as it would without this one

    def __init__(self, stop_cause: StopCause, name: str):
        super().__init__()
        self._stop_cause, self._name = stop_cause, name

    def _look(self, *_: Any, **__: Any) -> None:
        if not self.model.stop_training:
            self._stop_cause.callback = None  # a callback may set it back before the loop reads it
        elif self._stop_cause.callback is None:
            self._stop_cause.callback = self._name

    on_train_begin = on_epoch_begin = on_epoch_end = on_test_begin = on_test_end = _look
    on_train_batch_begin = on_train_batch_end = _look


def has_batch_hooks(callback: keras.callbacks.Callback) -> bool:
    """Return whether the callback overrides a hook of batches: to give it an update's logs waits for the device."""
    names = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")
    hooks = {name: getattr(callback, name) for name in names}  # LambdaCallback's are of the instance
    return any(getattr(hook, "__func__", None) is not getattr(keras.callbacks.Callback, n) for n, hook in hooks.items())

"""A callback that kills a run after an update, for tests of how it is resumed.

A config names the callback by `KILL`. The environment variable `AT` says after which
update it kills the process. Without it, as when the run is resumed, it kills nothing.
"""

from __future__ import annotations

import os
import signal
from typing import Any

KILL = "+training.callbacks.kill={_target_: tests.killed_run.killing_callback}"


def killing_callback() -> Any:
    """Return the callback; Keras is imported only here, in the process that trains."""
    import keras

    class Killing(keras.callbacks.Callback):
        updates = 0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.updates += 1
            if self.updates == int(os.environ.get("AT", 0)):
                os.kill(os.getpid(), signal.SIGKILL)

    return Killing()

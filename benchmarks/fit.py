"""Two loops as contenders that pause between their turns: our `Trainer`, and `fit`.

`fit` accumulates with `gradient_accumulation_steps`. Model, optimizer, examples and the
`tf.data` pipeline are the same; only the size of a batch differs. Ours gets effective
batches, and `fit` gets micro-batches.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable

import keras
import tensorflow as tf

from benchmarks import keras_models
from benchmarks.turns import Coroutine, repeats
from benchmarks.workloads import EPOCH, Workload
from pipeline.accumulation import Update
from pipeline.checkpoints.files import Checkpoints
from pipeline.config.plan import Plan
from pipeline.config.sizes import Batching
from pipeline.training import xla_timing
from pipeline.training.loop import Trainer
from pipeline.training.oom_retry import OomRetry
from pipeline.training.progress import Progress
from pipeline.training.recorder import Recorder

FOREVER = 10**9

Body = Callable[[Callable[[], None]], object]  # called with `pause`


def updates_within(workload: Workload, seconds: float, xla: bool = False) -> int:
    """Return how many updates of our loop take at least `seconds`."""
    body = ours(workload, 1, xla=xla)
    with contextlib.closing(Coroutine(body)) as one_update:
        return repeats(one_update, seconds)


def plan(workload: Workload) -> Plan:
    """Return a plan of epochs without end."""
    batching = Batching(workload.effective, workload.micro, workload.factor)
    return Plan(batching, EPOCH * workload.effective, FOREVER)


def ours(
    workload: Workload,
    updates: int,
    recorder: Recorder | None = None,
    xla: bool | str = False,
    checkpoints: Checkpoints | None = None,
    strategy: tf.distribute.Strategy | None = None,
) -> Body:
    """Return `Trainer.fit`, which pauses after every `updates` updates.

    At a pause, results are fetched and checkpoints are written. With `xla="fastest"`,
    updates with XLA and without are timed first, as with `hardware.xla=fastest`.
    """
    if recorder is None:
        progress = Progress(FOREVER, shown=False)
        recorder = Recorder(None, plan(workload), 1, lambda: 0, progress)

    def body(pause: Callable[[], None]) -> object:
        scope = contextlib.nullcontext() if strategy is None else strategy.scope()
        with scope:
            model = keras_models.build(workload)
            optimizer = keras_models.optimizer()
            optimizer.build(model.trainable_variables)

        def update_with(jit_compile: bool) -> Update:
            return Update(
                model,
                keras_models.loss(),
                optimizer,
                workload.micro,
                strategy=strategy,
                jit_compile=jit_compile,
            )

        batches = keras_models.batches(workload, workload.effective)
        if xla == "fastest":
            update = _faster(update_with(True), update_with(False), batches)
        else:
            update = update_with(xla is True)

        finished_updates = itertools.count(1)

        def after_update() -> None:
            if next(finished_updates) % updates == 0:
                with recorder.paused():
                    if checkpoints is not None:
                        checkpoints.wait()
                    pause()

        trainer = Trainer(
            update,
            batches,
            recorder,
            checkpoints=checkpoints,
            oom_retry=OomRetry(update, [], batches.element_spec),
            stop=after_update,
        )
        return trainer.fit()

    return body


def _faster(first: Update, second: Update, batches: tf.data.Dataset) -> Update:
    """Return the faster of two updates, as a run with `hardware.xla=fastest` does."""
    timings = xla_timing.time_updates([first, second], batches)
    first_seconds, second_seconds = (timing.seconds for timing in timings)
    assert first_seconds is not None
    assert second_seconds is not None
    if first_seconds < second_seconds:
        return first
    return second


def keras_fit(
    workload: Workload,
    updates: int,
    steps_per_execution: int,
    jit_compile: bool | str = "auto",
) -> Body:
    """Return `fit`, which pauses after every `updates` updates.

    That is the end of what it takes for an epoch. The last two arguments are those of
    Keras' `compile`.
    """

    def body(pause: Callable[[], None]) -> object:
        model = keras_models.build(workload)
        model.compile(
            keras_models.optimizer(gradient_accumulation_steps=workload.factor),
            keras_models.loss(),
            steps_per_execution=steps_per_execution,
            jit_compile=jit_compile,
        )
        pausing = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: pause()
        )
        return model.fit(
            keras_models.batches(workload, workload.micro),
            epochs=FOREVER,
            steps_per_epoch=workload.factor * updates,
            callbacks=[pausing],
            verbose=0,
        )

    return body

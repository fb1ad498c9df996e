"""Two loops as contenders that pause between their turns: `pipeline.training.loop.Trainer`, and Keras' `fit`.

`fit` accumulates with `gradient_accumulation_steps`. Model, optimizer, examples and the `tf.data` pipeline are the
same; only the size of a batch differs, which is the effective one here and a micro-batch there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import closing, nullcontext

import keras
import tensorflow as tf

from benchmarks import models
from benchmarks.turns import Coroutine, repeats
from benchmarks.workloads import EPOCH, sizes
from pipeline.accumulation import Update
from pipeline.checkpoints.files import Checkpoints
from pipeline.config.plan import Plan
from pipeline.config.sizes import Batching
from pipeline.training.loop import Trainer
from pipeline.training.oom_retry import OomRetry
from pipeline.training.progress import Progress
from pipeline.training.recorder import Recorder

FOREVER = 10**9


def updates_within(name: str, seconds: float, xla: bool = False) -> int:
    """Return how many updates of our loop take at least `seconds`."""
    with closing(Coroutine(ours(name, 1, xla=xla))) as warm:
        return repeats(warm, seconds)


def plan(name: str) -> Plan:
    micro, factor = sizes(name)
    return Plan(
        Batching(micro * factor, micro, factor), EPOCH * micro * factor, FOREVER
    )


def ours(
    name: str,
    updates: int,
    recorder: Recorder | None = None,
    xla: bool = False,
    checkpoints: Checkpoints | None = None,
    strategy: tf.distribute.Strategy | None = None,
) -> Callable[[Callable[[], None]], object]:
    """`Trainer.fit`, which pauses after every `updates` updates with results fetched and checkpoints written."""
    recorder = recorder or Recorder(
        None, plan(name), 1, lambda: 0, Progress(FOREVER, shown=False)
    )

    def body(pause: Callable[[], None]) -> object:
        with nullcontext() if strategy is None else strategy.scope():
            model, optimizer = models.build(name), models.optimizer()
            optimizer.build(model.trainable_variables)
        update = Update(
            model,
            models.loss(),
            optimizer,
            sizes(name).micro,
            strategy=strategy,
            jit_compile=xla,
        )

        done = itertools.count(1)

        def between() -> None:
            if next(done) % updates == 0:
                recorder.fetch()
                if checkpoints is not None:
                    checkpoints.wait()
                pause()
                recorder.restart_clock()

        batches = models.batches(name, sizes(name).effective)
        oom_retry = OomRetry(update, [], batches.element_spec)
        trainer = Trainer(
            update,
            batches,
            recorder,
            checkpoints=checkpoints,
            oom_retry=oom_retry,
            stop=between,
        )
        return trainer.fit()

    return body


def keras_fit(
    name: str, updates: int, steps_per_execution: int
) -> Callable[[Callable[[], None]], object]:
    """`fit`, which pauses after every `updates` updates, at the end of what it takes for an epoch."""

    def body(pause: Callable[[], None]) -> object:
        model, (micro, factor) = models.build(name), sizes(name)
        optimizer = models.optimizer(gradient_accumulation_steps=factor)
        model.compile(optimizer, models.loss(), steps_per_execution=steps_per_execution)
        pausing = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: pause()
        )
        return model.fit(
            models.batches(name, micro),
            epochs=FOREVER,
            steps_per_epoch=factor * updates,
            callbacks=[pausing],
            verbose=0,
        )

    return body

"""The training loop ÷ Keras' `fit` with `gradient_accumulation_steps`.

Ours is `pipeline.training.train` itself, with its recorder and without a tracker. `fit` has `verbose=0` and no
metrics, at `steps_per_execution` 1, the way people use it, and 8. Model, optimizer, examples and the `tf.data`
pipeline are the same; only the size of a batch differs, which is the effective one here and a micro-batch there.
Start and tracing are behind all of them when the first turn begins.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import keras

from benchmarks import models
from benchmarks.figures import Figure, ratios
from benchmarks.models import EFFECTIVE, FACTOR, MICRO
from benchmarks.turns import Coroutine, alternate, repeats
from pipeline import training
from pipeline.accumulation import Update
from pipeline.checkpoint import Checkpoints
from pipeline.progress import Progress
from pipeline.recorder import Recorder
from pipeline.sizes import Batching, Plan
from pipeline.smaller import Smaller

EXECUTIONS = (1, 8)
FOREVER = 10**9


def measure(name: str, rounds: int, seconds: float, xla: bool) -> list[Figure]:
    """One figure for each `steps_per_execution`."""
    warm = Coroutine(ours(name, 1, xla=xla))
    updates = repeats(warm, seconds)
    warm.close()
    contenders = {"train": Coroutine(ours(name, updates, xla=xla))}
    for execution in EXECUTIONS:
        contenders[f"fit {execution}"] = Coroutine(keras_fit(name, updates, execution))
    alternate(contenders, 2)  # traces, and fills what is read ahead
    times = alternate(contenders, rounds)
    for contender in contenders.values():
        contender.close()
    examples = EFFECTIVE * updates
    figures = []
    for execution in EXECUTIONS:
        theirs = f"fit {execution}"
        best = {who: examples / min(times[who]) for who in ("train", theirs)}
        what = f"train ÷ fit, steps_per_execution={execution}"
        figures.append(
            Figure("fit", name, what, ratios(times[theirs], times["train"]), "", best, "examples/s", at_least=1.0)
        )
    return figures


class Nowhere:
    """A log that keeps nothing."""

    def update(self, update: int, results: Mapping, performance: Mapping, at: float) -> None: ...

    def validation(self, update: int, results: Mapping) -> None: ...

    def cut(self, plan: Plan) -> None: ...

    def test(self, update: int, results: Mapping) -> None: ...

    def trained(self, updates: int, stopped_by: str | None, best: object) -> None: ...


class Silent(Progress):
    """Shows nothing."""

    def show(self, update: int, row: Mapping[str, float], examples_per_second: float) -> None: ...


def plan() -> Plan:
    return Plan(Batching(EFFECTIVE, MICRO, FACTOR), 32 * EFFECTIVE, FOREVER)


def ours(
    name: str,
    updates: int,
    recorder: Recorder | None = None,
    xla: bool = False,
    checkpoints: Checkpoints | None = None,
) -> Callable[[Callable[[], None]], object]:
    """`training.train`, which pauses after every `updates` updates with results fetched and checkpoints written."""
    recorder = recorder or Recorder(Nowhere(), plan(), 1, lambda: 0, Silent(FOREVER))

    def body(pause: Callable[[], None]) -> object:
        model, optimizer = models.build(name), models.optimizer()
        optimizer.build(model.trainable_variables)
        update = Update(model, models.loss(), optimizer, MICRO, jit_compile=xla)

        done = itertools.count(1)

        def between() -> None:
            if next(done) % updates == 0:
                recorder.fetch()
                if checkpoints is not None:
                    checkpoints.wait()
                pause()
                recorder.restart_clock()

        batches = models.batches(name, EFFECTIVE)
        smaller = Smaller(update, [], batches.element_spec)
        return training.train(
            model, batches, update, plan(), recorder, checkpoints=checkpoints, smaller=smaller, stop=between
        )

    return body


def keras_fit(name: str, updates: int, steps_per_execution: int) -> Callable[[Callable[[], None]], object]:
    """`fit`, which pauses after every `updates` updates, at the end of what it takes for an epoch."""

    def body(pause: Callable[[], None]) -> object:
        model = models.build(name)
        optimizer = models.optimizer(gradient_accumulation_steps=FACTOR)
        model.compile(optimizer, models.loss(), steps_per_execution=steps_per_execution)
        pausing = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: pause())
        return model.fit(
            models.batches(name, MICRO),
            epochs=FOREVER,
            steps_per_epoch=FACTOR * updates,
            callbacks=[pausing],
            verbose=0,
        )

    return body

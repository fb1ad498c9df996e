"""The update ÷ the limit.

No update can be faster than its parts: `factor` forward+backward passes at the micro-batch size and one optimizer
apply. Both are measured alone, with nothing summed, in two forms:

    calls   one call of a traced function for each micro-batch, cut beforehand: the limit as a Python loop meets it
    strict  all micro-batches in one traced loop, so that no Python runs between them; the gradients of each are
            loop variables, or the graph optimiser would prune the backward passes whose results nobody reads

The passes take gradients, and the apply its step, by the operations that the update takes. The apply is one call of a
traced function on gradients that are there already; of an embedding they are rows, as a micro-batch gives them.

The update is also measured with the gradient noise scale in each: a run measures it in every tenth by default, and
pays a tenth of that. Of the smaller models it is also measured what a large factor costs at the same micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from benchmarks import models
from benchmarks.figures import Figure, ratios
from benchmarks.turns import alternate, repeats
from benchmarks.workloads import LARGE, examples, sizes
from pipeline.accumulation import Update, fused_adam
from pipeline.accumulation.internals import transposed_gradients, wide_layers
from pipeline.config.schema import AccumulationConfig

MANY = 32  # the factor that is compared with 1 at the same micro-batch


def measure(name: str, rounds: int, seconds: float, xla: bool) -> list[Figure]:
    """A figure for each form of the limit, one for the gradient noise scale, and one for the factor."""
    (micro, _), effective = sizes(name), sizes(name).effective
    x, y = map(tf.constant, examples(name, effective))
    parts = contenders(models.build(name), x, y, micro, xla)
    count = repeats(parts["update"], seconds)
    times = alternate(
        {part: repeated(call, count) for part, call in parts.items()}, rounds
    )
    best = {part: min(values) / count for part, values in times.items()}
    figures = []
    for form in ("calls", "strict"):
        limit = [
            passes + apply
            for passes, apply in zip(times[form], times["apply"], strict=True)
        ]
        shown = {
            "update": effective / best["update"],
            "limit": effective * count / min(limit),
        }
        what = f"update ÷ limit, {form}"
        figures.append(
            Figure(
                "update",
                name,
                what,
                ratios(limit, times["update"]),
                "",
                shown,
                "examples/s",
            )
        )
    figures[-1].at_least = 0.95  # of the strict one
    shown = {part: effective / best[part] for part in ("update", "with noise")}
    every = AccumulationConfig.noise_scale_every
    over = [
        1 + (ratio - 1) / every
        for ratio in ratios(times["with noise"], times["update"])
    ]
    what = f"with noise scale, 1 in {every} ÷ without"
    figures.append(
        Figure("update", name, what, over, "", shown, "examples/s", at_most=1.03)
    )
    shown = {part: effective / best[part] for part in ("update", "whole")}
    what = "time accumulated ÷ at factor 1"
    at_most = (
        1.3 if name == "embedding" else None
    )  # of others it is what smaller products of matrices cost
    figures.append(
        Figure(
            "update",
            name,
            what,
            ratios(times["update"], times["whole"]),
            "",
            shown,
            "examples/s",
        )
    )
    figures[-1].at_most = at_most
    return (
        figures
        if name in LARGE
        else [*figures, _at_same_micro_batch(name, rounds, seconds, xla)]
    )


def _at_same_micro_batch(name: str, rounds: int, seconds: float, xla: bool) -> Figure:
    """One update of `MANY` micro-batches ÷ as many updates of one: the same examples, and fewer applies."""
    micro = sizes(name).micro
    model, optimizer = models.build(name), models.optimizer()
    optimizer.build(model.trainable_variables)
    x, y = map(tf.constant, examples(name, MANY * micro))
    update = traced(
        Update(model, models.loss(), optimizer, micro, jit_compile=xla), x, y
    )
    cut = [
        (x[start : start + micro], y[start : start + micro])
        for start in range(0, MANY * micro, micro)
    ]
    turns = {
        "many": lambda: update(x, y),
        "one": lambda: [update(*part) for part in cut][-1],
    }
    count = repeats(turns["many"], seconds)
    times = alternate(
        {who: repeated(call, count) for who, call in turns.items()}, rounds
    )
    rate = MANY * micro * count
    shown = {
        f"factor {MANY}": rate / min(times["many"]),
        "factor 1": rate / min(times["one"]),
    }
    what = f"speed at factor {MANY} ÷ at factor 1, same micro-batch"
    return Figure(
        "update",
        name,
        what,
        ratios(times["one"], times["many"]),
        "",
        shown,
        "examples/s",
        at_least=1.0,
    )


def contenders(
    model: keras.Model, x: tf.Tensor, y: tf.Tensor, micro_batch_size: int, xla: bool
) -> dict[str, Callable[[], Any]]:
    """What is measured alone, for the effective batch (x, y) each; its examples are a multiple of a micro-batch."""
    loss, optimizer = models.loss(), models.optimizer()
    optimizer.build(model.trainable_variables)
    variables = [variable.value for variable in model.trainable_variables]
    size, count = micro_batch_size, len(x)
    with tf.device("CPU:0"):
        host = tf.identity(x), tf.identity(y)  # where the training loop has its batch
    x, y = tf.identity(x), tf.identity(y)  # the limit waits for no copy

    def gradients(
        x: tf.Tensor, y: tf.Tensor
    ) -> tuple[tf.Tensor, list[tf.Tensor], list[tf.Tensor | None]]:
        with (
            tf.GradientTape() as tape,
            transposed_gradients([] if xla else wide_layers(model, size)),
        ):
            value = loss(y, model(x, training=True))
        found = tape.gradient(value, variables)
        # The rows of an embedding that a micro-batch looks up, not the table.
        rows = [
            each.indices if isinstance(each, tf.IndexedSlices) else None
            for each in found
        ]
        for each, row, variable in zip(found, rows, variables, strict=True):
            if row is None:
                each.set_shape(variable.shape)
        return (
            value,
            [
                each if row is None else each.values
                for each, row in zip(found, rows, strict=True)
            ],
            rows,
        )

    passes = tf.function(gradients, jit_compile=xla or None)
    specs = passes.get_concrete_function(x[:size], y[:size]).structured_outputs[1]

    @tf.function
    def strict(x: tf.Tensor, y: tf.Tensor) -> Any:
        def body(
            index: tf.Tensor, _: tf.Tensor, __: list[tf.Tensor]
        ) -> tuple[tf.Tensor, tf.Tensor, list[tf.Tensor]]:
            start = index * size
            value, found, _ = passes(x[start : start + size], y[start : start + size])
            return (
                index + 1,
                value,
                [
                    tf.ensure_shape(one, spec.shape)
                    for one, spec in zip(found, specs, strict=True)
                ],
            )

        zeros = [tf.zeros(spec.shape, spec.dtype) for spec in specs]
        return tf.while_loop(
            lambda index, *_: index < count // size,
            body,
            (0, 0.0, zeros),
            parallel_iterations=1,
        )

    _, found, rows = passes(
        x[:size], y[:size]
    )  # as they come: a dense gradient of a table has to be made first
    some = [
        tf.random.normal(each.shape, stddev=1e-3)
        if row is None
        else tf.IndexedSlices(each, row, tf.shape(variable))
        for variable, each, row in zip(variables, found, rows, strict=True)
    ]

    @tf.function
    def apply() -> None:
        with fused_adam(optimizer):
            optimizer.apply(some, model.trainable_variables)

    def update(noise_every: int = 0, micro_batch_size: int = size) -> Callable[[], Any]:
        update = Update(
            model,
            loss,
            optimizer,
            micro_batch_size,
            noise_every=noise_every,
            jit_compile=xla,
        )
        whole = traced(update, x, y)
        return lambda: whole(*host)

    cut = [
        (x[start : start + size], y[start : start + size])
        for start in range(0, count, size)
    ]
    return {
        "calls": lambda: [passes(*part) for part in cut][-1],
        "strict": lambda: strict(x, y),
        "apply": apply,
        "update": update(),
        "with noise": update(noise_every=1),
        "whole": update(micro_batch_size=count),
    }


def traced(
    update: Update, x: tf.Tensor, y: tf.Tensor
) -> Callable[..., dict[str, tf.Tensor]]:
    """Return the update as the training loop traces it: the number of examples is not known."""

    @tf.function(
        input_signature=[tf.TensorSpec([None, *a.shape[1:]], a.dtype) for a in (x, y)]
    )
    def whole(x: tf.Tensor, y: tf.Tensor) -> dict[str, tf.Tensor]:
        return update((x, y))

    return whole


def repeated(call: Callable[[], Any], count: int) -> Callable[[], None]:
    """Return a turn of `count` calls, which ends when the last result has been read."""
    call()  # traces

    def turn() -> None:
        for _ in range(count):
            result = call()
        for value in tf.nest.flatten(result)[:1]:
            if value is not None:
                value.numpy()

    return turn

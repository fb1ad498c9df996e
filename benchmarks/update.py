"""The update ÷ the limit.

No update can be faster than its parts: `factor` forward and backward passes at the
micro-batch size, and one optimizer apply. Both are measured alone, with nothing summed.
The passes have two forms:

    calls   one call of a traced function for each micro-batch, cut beforehand: the
            limit of a Python loop
    strict  all micro-batches in one traced loop, so that no Python runs between them;
            the gradients of each are loop variables, or the graph optimizer would prune
            the backward passes whose results nobody reads

The passes take gradients, and the apply its step, by the operations of the update. The
apply is one call of a traced function on gradients that exist already; the gradient of
an embedding consists of rows, as a micro-batch gives them.

The update is also measured with the gradient noise scale in each update. A run measures
it in every tenth by default, and pays a tenth of that. For the smaller models, the cost
of a large factor at the same micro-batch is measured too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from benchmarks import keras_models
from benchmarks.figures import Figure, ratios
from benchmarks.turns import alternate_repeated, repeats
from benchmarks.workloads import Workload
from pipeline.accumulation import Update, fused_adam
from pipeline.accumulation.compiled_apply import Applied, ApplyProgram
from pipeline.accumulation.internals import transposed_gradients, wide_layers
from pipeline.config.schema import AccumulationConfig

MANY = 32  # the factor that is compared with 1 at the same micro-batch
RATE = "examples/s"


class Pass(NamedTuple):
    """What a forward and backward pass returns.

    Attributes:
        loss: of the micro-batch.
        gradients: of each variable; of an embedding the rows of the micro-batch.
        rows: the indices of such rows; None for a dense gradient.
    """

    loss: tf.Tensor
    gradients: list[tf.Tensor]
    rows: list[tf.Tensor | None]


def measure(workload: Workload, rounds: int, seconds: float, xla: bool) -> list[Figure]:
    """Return the limit in both forms, the noise scale, and the cost of accumulating."""
    x, y = map(tf.constant, workload.examples(workload.effective))
    model = keras_models.build(workload)
    calls = contenders(model, x, y, workload.micro, xla)
    del calls["apply by XLA"]  # the limit has the apply that the update has
    count = repeats(calls["update"], seconds)
    times = alternate_repeated(calls, count, rounds)

    best = {}
    for name, turns in times.items():
        best[name] = workload.effective * count / min(turns)
    figures = []
    for form in ("calls", "strict"):
        limit = limits(times[form], times["apply"])
        best_limit = workload.effective * count / min(limit)
        target = 0.95 if form == "strict" else None
        figures.append(
            Figure(
                "update",
                workload.name,
                f"update ÷ limit, {form}",
                ratios(limit, times["update"]),
                best={"update": best["update"], "limit": best_limit},
                best_unit=RATE,
                at_least=target,
            )
        )

    noise_every = AccumulationConfig.noise_scale_every
    noise_costs = []
    for ratio in ratios(times["with noise"], times["update"]):
        noise_costs.append(1 + (ratio - 1) / noise_every)
    figures.append(
        Figure(
            "update",
            workload.name,
            f"with noise scale, 1 in {noise_every} ÷ without",
            noise_costs,
            best={name: best[name] for name in ("update", "with noise")},
            best_unit=RATE,
            at_most=1.03,
        )
    )
    # Other models pay for smaller matrix products, so they have no target.
    target = 1.3 if workload.name == "embedding" else None
    figures.append(
        Figure(
            "update",
            workload.name,
            "time accumulated ÷ at factor 1",
            ratios(times["update"], times["whole"]),
            best={name: best[name] for name in ("update", "whole")},
            best_unit=RATE,
            at_most=target,
        )
    )
    if not workload.is_large:
        figures.append(_at_same_micro_batch(workload, rounds, seconds, xla))
    return figures


def limits(passes: list[float], applies: list[float]) -> list[float]:
    """Return the seconds of the limit in each round: all passes and one apply."""
    rounds = zip(passes, applies, strict=True)
    return [pass_seconds + apply_seconds for pass_seconds, apply_seconds in rounds]


def contenders(
    model: keras.Model, x: tf.Tensor, y: tf.Tensor, micro_batch_size: int, xla: bool
) -> dict[str, Callable[[], Any]]:
    """Return the calls that are measured, each for the effective batch (x, y).

    Its examples are a multiple of a micro-batch.
    """
    loss = keras_models.loss()
    optimizer = keras_models.optimizer_of_update()
    optimizer.build(model.trainable_variables)
    # The training loop has its batch on the host. The limit waits for no copy.
    with tf.device("CPU:0"):
        host_x = tf.identity(x)
        host_y = tf.identity(y)
    x = tf.identity(x)
    y = tf.identity(y)

    passes = _passes(model, loss, micro_batch_size, xla)
    strict = _strict_loop(passes, x, y, micro_batch_size)
    micro_batches = cut(x, y, micro_batch_size)

    def calls() -> Pass:
        results = [passes(*micro_batch) for micro_batch in micro_batches]
        return results[-1]

    def update(size: int, noise_every: int = 0) -> Callable[[], Any]:
        step = traced(
            Update(
                model,
                loss,
                optimizer,
                size,
                noise_every=noise_every,
                jit_compile=xla,
            ),
            x,
            y,
        )
        return lambda: step(host_x, host_y)

    example = passes(*micro_batches[0])
    return {
        "calls": calls,
        "strict": lambda: strict(x, y),
        "apply": _apply(model, optimizer, example, xla=False),
        "apply by XLA": _apply(model, optimizer, example, xla=True),
        "update": update(micro_batch_size),
        "with noise": update(micro_batch_size, noise_every=1),
        "whole": update(len(x)),
    }


def cut(x: tf.Tensor, y: tf.Tensor, size: int) -> list[tuple[tf.Tensor, tf.Tensor]]:
    """Return the micro-batches of an effective batch."""
    starts = range(0, len(x), size)
    return [(x[start : start + size], y[start : start + size]) for start in starts]


def traced(
    update: Update, x: tf.Tensor, y: tf.Tensor
) -> Callable[..., dict[str, tf.Tensor]]:
    """Return the update as the training loop traces it, for any number of examples."""
    x_spec = tf.TensorSpec([None, *x.shape[1:]], x.dtype)
    y_spec = tf.TensorSpec([None, *y.shape[1:]], y.dtype)

    @tf.function(input_signature=[x_spec, y_spec])
    def step(x: tf.Tensor, y: tf.Tensor) -> dict[str, tf.Tensor]:
        return update((x, y))

    return step


def _passes(
    model: keras.Model, loss: keras.losses.Loss, micro_batch_size: int, xla: bool
) -> Callable[..., Pass]:
    """Return a traced forward and backward pass of one micro-batch."""
    variables = [variable.value for variable in model.trainable_variables]
    transposed = [] if xla else wide_layers(model, micro_batch_size)

    def forward_backward(x: tf.Tensor, y: tf.Tensor) -> Pass:
        with tf.GradientTape() as tape, transposed_gradients(transposed):
            value = loss(y, model(x, training=True))
        gradients = []
        rows = []
        for gradient, variable in zip(
            tape.gradient(value, variables), variables, strict=True
        ):
            if isinstance(gradient, tf.IndexedSlices):
                # Of an embedding: the rows that were looked up, not the table.
                gradients.append(gradient.values)
                rows.append(gradient.indices)
            else:
                gradient.set_shape(variable.shape)
                gradients.append(gradient)
                rows.append(None)
        return Pass(value, gradients, rows)

    return tf.function(forward_backward, autograph=False, jit_compile=xla or None)


def _strict_loop(
    passes: Any, x: tf.Tensor, y: tf.Tensor, micro_batch_size: int
) -> Callable[[tf.Tensor, tf.Tensor], Any]:
    """Return all passes over (x, y) as one traced loop."""
    first = (x[:micro_batch_size], y[:micro_batch_size])
    specs = passes.get_concrete_function(*first).structured_outputs.gradients
    micro_batches = len(x) // micro_batch_size

    @tf.function
    def strict(x: tf.Tensor, y: tf.Tensor) -> Any:
        def body(
            index: tf.Tensor, _: tf.Tensor, __: list[tf.Tensor]
        ) -> tuple[tf.Tensor, tf.Tensor, list[tf.Tensor]]:
            start = index * micro_batch_size
            stop = start + micro_batch_size
            result = passes(x[start:stop], y[start:stop])
            gradients = []
            for gradient, spec in zip(result.gradients, specs, strict=True):
                gradients.append(tf.ensure_shape(gradient, spec.shape))
            return index + 1, result.loss, gradients

        zeros = [tf.zeros(spec.shape, spec.dtype) for spec in specs]
        return tf.while_loop(
            lambda index, *_: index < micro_batches,
            body,
            (0, 0.0, zeros),
            parallel_iterations=1,
        )

    return strict


def _apply(
    model: keras.Model, optimizer: keras.optimizers.Optimizer, example: Pass, xla: bool
) -> Callable[[], None]:
    """Return a traced apply of random gradients that look like those of `example`.

    XLA compiles it if `xla`, as in an update that XLA compiles.
    """
    gradients = []
    for variable, gradient, rows in zip(
        model.trainable_variables, example.gradients, example.rows, strict=True
    ):
        if rows is None:
            gradients.append(tf.random.normal(gradient.shape, stddev=1e-3))
        else:
            # A dense gradient of a table would have to be made first.
            shape = tf.shape(variable.value)
            gradients.append(tf.IndexedSlices(gradient, rows, shape))

    @tf.function
    def apply() -> None:
        with fused_adam(optimizer):
            optimizer.apply(gradients, model.trainable_variables)

    @tf.function
    def apply_by_xla() -> None:
        dense = list(map(tf.convert_to_tensor, gradients))

        def applied() -> Applied:
            optimizer.apply(dense, model.trainable_variables)
            return Applied(norm=tf.zeros(()), loss_scale=tf.ones(()))

        program = ApplyProgram.traced(optimizer, applied)
        assert program is not None
        program.run()
        program.advance_counts(finite=None)

    return apply_by_xla if xla else apply


def _at_same_micro_batch(
    workload: Workload, rounds: int, seconds: float, xla: bool
) -> Figure:
    """Compare one update of `MANY` micro-batches with as many updates of one.

    Both train on the same examples; the first applies once.
    """
    model = keras_models.build(workload)
    optimizer = keras_models.optimizer_of_update()
    optimizer.build(model.trainable_variables)
    examples = MANY * workload.micro
    x, y = map(tf.constant, workload.examples(examples))
    update = Update(
        model, keras_models.loss(), optimizer, workload.micro, jit_compile=xla
    )
    step = traced(update, x, y)
    micro_batches = cut(x, y, workload.micro)

    def one_update() -> dict[str, tf.Tensor]:
        return step(x, y)

    def many_updates() -> dict[str, tf.Tensor]:
        results = [step(*micro_batch) for micro_batch in micro_batches]
        return results[-1]

    count = repeats(one_update, seconds)
    calls = {"many": one_update, "one": many_updates}
    times = alternate_repeated(calls, count, rounds)
    return Figure(
        "update",
        workload.name,
        f"speed at factor {MANY} ÷ at factor 1, same micro-batch",
        ratios(times["one"], times["many"]),
        best={
            f"factor {MANY}": examples * count / min(times["many"]),
            "factor 1": examples * count / min(times["one"]),
        },
        best_unit=RATE,
        at_least=1.0,
    )

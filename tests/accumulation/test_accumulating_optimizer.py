"""An optimizer that accumulates, in loops and in `fit`: the weights are those of plain Keras on whole batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from pipeline.accumulation import AccumulatingOptimizer, GradientAccumulator
from tests.accumulation.matrix import OPTIMIZERS
from tests.parameters import mostly_slow

WORDS = 7
EQUAL, UNEQUAL = (
    ((8, 8, 8),) * 3,
    ((16, 3, 9), (5, 1, 2), (7,)),
)  # parts of updates; the last one is flushed
CLOSE = 1e-12  # of how far the weights have gone: sums of 28 terms in another order, 28 · 2⁻⁵³ = 3e-15, three times
# Schedule, average, decay and clipping at once: each would show that it ran once a part.
RATE = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
AT_ONCE = {
    "learning_rate": RATE,
    "weight_decay": 0.1,
    "use_ema": True,
    "ema_momentum": 0.5,
    "clipnorm": 0.05,
}
QUICK = ("SGD", "AdamW")
# The sums do not depend on the optimizer that is given them.
EACH = mostly_slow(OPTIMIZERS, QUICK, ["Lion", "Muon", "Adafactor"])


def optimizer(name: str, **more: object) -> keras.optimizers.Optimizer:
    return getattr(keras.optimizers, name)(**{**OPTIMIZERS[name], **more})


def all_at_once() -> keras.optimizers.Optimizer:
    return keras.optimizers.AdamW(**AT_ONCE)


def network(rows: bool = True) -> keras.Model:
    """Return one with a layer that the loss does not depend on, and with an embedding, whose gradient is rows."""
    keras.utils.set_random_seed(0)
    tokens = keras.Input((4,), dtype="int64")
    table = (
        layers.Embedding(WORDS, 3)
        if rows
        else layers.CategoryEncoding(WORDS, "one_hot")
    )
    hidden = layers.Flatten()(table(tokens))
    hidden = layers.Dense(8, "tanh")(hidden)
    return keras.Model(
        tokens, {"used": layers.Dense(3)(hidden), "unused": layers.Dense(2)(hidden)}
    )


def loss() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def examples(count: int) -> tuple[np.ndarray, np.ndarray]:
    numbers = np.random.default_rng(0)
    return numbers.integers(0, WORDS, (count, 4)), numbers.integers(0, 3, count)


def gradients_of(model: keras.Model, x: tf.Tensor, y: tf.Tensor) -> list:
    with tf.GradientTape() as tape:
        value = loss()(y, model(x)["used"])
    return tape.gradient(value, [each.value for each in model.trainable_variables])


def values(model: keras.Model) -> np.ndarray:
    return np.concatenate([np.ravel(each) for each in model.get_weights()])


def slices(sizes: Sequence[Sequence[int]]) -> Iterator[tuple[bool, list[tuple]]]:
    """Yield the parts of each update."""
    x, y = examples(sum(map(sum, sizes)))
    begin = 0
    for update in sizes:
        ends = begin + np.cumsum(update)
        yield [
            (x[end - size : end], y[end - size : end])
            for size, end in zip(update, ends, strict=True)
        ]
        begin = ends[-1]


def by_whole_batches(
    given: keras.optimizers.Optimizer, sizes: Sequence[Sequence[int]]
) -> tuple[np.ndarray, float]:
    """Return the weights after dense updates of plain Keras, and how far they have gone."""
    model = network()
    start = values(model)
    given.build(model.trainable_variables)
    for parts in slices(sizes):
        found = gradients_of(
            model,
            *(tf.constant(np.concatenate(leaf)) for leaf in zip(*parts, strict=True)),
        )
        given.apply(
            [each if each is None else tf.convert_to_tensor(each) for each in found],
            model.trainable_variables,
        )
    return values(model), float(np.linalg.norm(values(model) - start))


def by_parts(
    inner: keras.optimizers.Optimizer,
    sizes: Sequence[Sequence[int]],
    *,
    weighted: bool = True,
    traced: bool = True,
) -> tuple[np.ndarray, AccumulatingOptimizer]:
    model = network()
    accumulating = AccumulatingOptimizer(inner, len(sizes[0]))
    accumulating.build(model.trainable_variables)

    def step(x: tf.Tensor, y: tf.Tensor) -> None:
        pairs = zip(gradients_of(model, x, y), model.trainable_variables, strict=True)
        accumulating.apply_gradients(
            pairs, **({"weight": tf.shape(y)[0]} if weighted else {})
        )

    if traced:
        signature = [tf.TensorSpec([None, 4], "int64"), tf.TensorSpec([None], "int64")]
        step = tf.function(step, input_signature=signature, autograph=False)
    for parts in slices(sizes):
        for x, y in parts:
            step(tf.constant(x), tf.constant(y))
    accumulating.flush()
    return values(model), accumulating


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("name", EACH)
def test_parts_of_any_size_in_a_loop(float64, name):
    expected, far = by_whole_batches(optimizer(name), UNEQUAL)
    found, accumulating = by_parts(optimizer(name), UNEQUAL)
    assert np.linalg.norm(found - expected) < CLOSE * far
    assert int(accumulating.iterations.numpy()) == len(UNEQUAL)
    unweighted, _ = by_parts(optimizer(name), UNEQUAL, weighted=False)
    assert np.linalg.norm(unweighted - expected) > 1e6 * CLOSE * far


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("traced", [True, False])
def test_schedule_average_decay_and_clipping_are_once_an_update(float64, traced):
    expected, far = by_whole_batches(all_at_once(), UNEQUAL)
    found, accumulating = by_parts(all_at_once(), UNEQUAL, traced=traced)
    assert np.linalg.norm(found - expected) < CLOSE * far
    assert float(accumulating.learning_rate) == pytest.approx(
        0.1 / 2**3, rel=2**-23
    )  # a float32


def in_fit(
    made: Callable[[], keras.optimizers.Optimizer],
    batch: int,
    strategy: tf.distribute.Strategy,
    **more: object,
) -> keras.Model:
    """Train two epochs of 40 examples."""
    with strategy.scope():
        model = network(
            rows=False
        )  # of rows plain Keras takes another step than of the dense gradient
        model.compile(made(), {"used": loss()}, **more)
    data = (
        tf.data.Dataset.from_tensor_slices(examples(40))
        .map(lambda x, y: (x, {"used": y}))
        .batch(batch)
    )
    accumulating = isinstance(model.optimizer, AccumulatingOptimizer)
    flush = [model.optimizer.flush_at_epoch_end()] if accumulating else []
    model.fit(data, epochs=2, verbose=0, callbacks=flush, validation_data=data)
    return model


def strategies(number: int) -> tf.distribute.Strategy:
    """Return a strategy of so many CPUs; two strategies in one process would share the keys of their collectives."""
    if number == 1:
        return tf.distribute.get_strategy()
    return tf.distribute.MirroredStrategy(
        ["CPU:0", "CPU:1"], tf.distribute.ReductionToOneDevice()
    )


IN_FIT = mostly_slow([(name, 1) for name in OPTIMIZERS], [("SGD", 1)], [("Muon", 1)])


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize(
    ("name", "replicas"), [*IN_FIT, pytest.param("AdamW", 2, marks=pytest.mark.slow)]
)
def test_equal_batches_in_fit(float64, name, replicas):
    """3 batches of 8 are an update, and the 2 that are left over in each epoch another one."""
    start = values(network(rows=False))
    # On the same devices: under a strategy Keras' ScheduleFreeAdamW is another one.
    expected = values(in_fit(lambda: optimizer(name), 24, strategies(replicas)))
    model = in_fit(
        lambda: AccumulatingOptimizer(optimizer(name), 3), 8, strategies(replicas)
    )
    far = np.linalg.norm(expected - start)
    assert int(model.optimizer.iterations.numpy()) == 4
    assert np.linalg.norm(values(model) - expected) < CLOSE * far
    if (
        name in QUICK and replicas == 1
    ):  # Keras' own: the rest of an epoch leaks into the next one
        own = in_fit(
            lambda: optimizer(name, gradient_accumulation_steps=3), 8, strategies(1)
        )
        assert np.linalg.norm(values(own) - expected) > 1e6 * CLOSE * far


def on_replicas(
    optimizer_of: Callable[[], keras.optimizers.Optimizer],
    strategy: tf.distribute.Strategy,
    calls: Sequence[Sequence[np.ndarray]],
) -> np.ndarray:
    """Return a kernel and a bias after `calls` of an optimizer; a call's gradients are (replicas, …) of each."""
    with strategy.scope():
        variables = [
            keras.Variable(np.linspace(-1, 1, 24).reshape(8, 3)),
            keras.Variable(np.ones(3)),
        ]
        made = optimizer_of()
        made.build(variables)

    def apply(*gradients: tf.Tensor) -> None:
        made.apply(list(gradients), variables)

    step = tf.function(
        lambda gradients: strategy.run(apply, gradients), autograph=False
    )
    for call in calls:
        of = strategy.experimental_distribute_values_from_function(
            lambda context, call=call: tuple(
                tf.constant(each[context.replica_id_in_sync_group]) for each in call
            )
        )
        step(of)
    if isinstance(made, AccumulatingOptimizer):
        made.flush()
    return np.concatenate([np.ravel(each) for each in variables])


@pytest.mark.soak
def test_every_optimizer_on_two_replicas(float64):
    """3 gradients are an update, and the 2 that are left over another one; of gradients alone, without a model."""
    strategy = strategies(2)
    numbers = np.random.default_rng(0)
    parts = [
        [numbers.normal(size=(2, *shape)) for shape in ((8, 3), (3,))] for _ in range(8)
    ]
    means = [
        [np.mean(each, 0) for each in zip(*some, strict=True)]
        for some in (parts[:3], parts[3:6], parts[6:])
    ]
    start = on_replicas(lambda: optimizer("SGD"), strategy, [])
    for name in OPTIMIZERS:
        expected = on_replicas(lambda name=name: optimizer(name), strategy, means)
        found = on_replicas(
            lambda name=name: AccumulatingOptimizer(optimizer(name), 3), strategy, parts
        )
        far = np.linalg.norm(expected - start)
        assert np.linalg.norm(found - expected) < CLOSE * far, name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize(
    "strategy",
    [
        lambda: tf.distribute.MirroredStrategy(["CPU:0"]),
        lambda: tf.distribute.OneDeviceStrategy("CPU:0"),
    ],
    ids=["mirrored", "one device"],
)
def test_a_strategy_of_one_replica(float64, strategy):
    start = values(network(rows=False))
    expected = values(in_fit(lambda: optimizer("SGD"), 24, strategies(1)))
    model = in_fit(lambda: AccumulatingOptimizer(optimizer("SGD"), 3), 8, strategy())
    assert np.linalg.norm(values(model) - expected) < CLOSE * np.linalg.norm(
        expected - start
    )


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("replicas", [1, 2])
def test_what_is_not_finite_in_one_part_skips_the_whole_update(replicas):
    strategy = strategies(replicas)
    with strategy.scope():
        weight = keras.Variable(np.ones(2, "float32"))
        scaled = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(1.0), initial_scale=64.0
        )
        accumulating = AccumulatingOptimizer(scaled, 4)
        accumulating.build([weight])

    def part(gradient: tf.Tensor) -> None:
        accumulating.apply([accumulating.scale_loss(gradient) / replicas], [weight])

    step = tf.function(
        lambda gradient: strategy.run(part, (gradient,)), autograph=False
    )
    for value in (1.0, 1.0, np.inf, 1.0):
        step(tf.fill([2], value))
    assert weight.numpy().tolist() == [1.0, 1.0]
    assert float(scaled.dynamic_scale.numpy()) == 32.0
    assert int(accumulating.iterations.numpy()) == 0
    for value in (1.0, 2.0, 3.0, 2.0):
        step(tf.fill([2], value))
    assert weight.numpy().tolist() == [-1.0, -1.0]
    assert int(accumulating.iterations.numpy()) == 1


def test_a_loss_scale_around_it_is_refused_by_a_line(precision):
    precision("mixed_float16")
    model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    with pytest.raises(
        ValueError,
        match=r"AccumulatingOptimizer\(LossScaleOptimizer\(…\)\), with compile\(auto_scale",
    ):
        model.compile(AccumulatingOptimizer(keras.optimizers.SGD(), 2), "mse")
    scaled = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(), initial_scale=2.0
    )
    model.compile(AccumulatingOptimizer(scaled, 2), "mse", auto_scale_loss=False)
    model.fit(np.ones((8, 2)), np.ones((8, 1)), batch_size=2, verbose=0)
    assert int(model.optimizer.iterations) == 2


@pytest.mark.slow
def test_a_model_that_is_saved_between_two_steps_goes_on_from_there(float64, tmp_path):
    x, y = (
        np.random.default_rng(0).normal(size=(6, 4, 5)),
        np.arange(24).reshape(6, 4) % 3,
    )

    def fresh() -> keras.Model:
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((5,)), layers.Dense(3)])
        model.compile(AccumulatingOptimizer(keras.optimizers.Adam(0.1), 3), loss())
        return model

    whole, begun = fresh(), fresh()
    for number in range(6):
        whole.train_on_batch(x[number], y[number])
    for number in range(2):
        begun.train_on_batch(x[number], y[number])
    begun.save(tmp_path / "begun.keras")
    loaded = keras.saving.load_model(tmp_path / "begun.keras")
    assert loaded.optimizer.factor == 3
    for number in range(2, 6):
        loaded.train_on_batch(x[number], y[number])
    assert values(loaded).tolist() == values(whole).tolist()


def classifier(optimizer: keras.optimizers.Optimizer, **more: object) -> keras.Model:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((5,)), layers.Dense(3)])
    model.compile(optimizer, loss(), **more)
    return model


def numbers_of(count: int) -> tuple[np.ndarray, np.ndarray]:
    return np.random.default_rng(0).normal(size=(count, 5)), np.arange(count) % 3


@pytest.mark.slow
def test_a_checkpoint_of_tensorflow_between_two_steps_has_the_sums(float64, tmp_path):
    x, y = numbers_of(16)
    whole, begun, restored = (
        classifier(AccumulatingOptimizer(keras.optimizers.Adam(0.1), 2))
        for _ in range(3)
    )
    for model, parts in ((whole, 4), (begun, 3)):
        for number in range(parts):
            model.train_on_batch(x[4 * number :][:4], y[4 * number :][:4])
    path = tf.train.Checkpoint(model=begun, optimizer=begun.optimizer).save(
        tmp_path / "begun"
    )
    restored.optimizer.build(restored.trainable_variables)
    tf.train.Checkpoint(model=restored, optimizer=restored.optimizer).restore(
        path
    ).assert_consumed()
    restored.train_on_batch(x[12:], y[12:])
    assert values(restored).tolist() == values(whole).tolist()


def test_a_step_right_after_loading_takes_the_saved_sums(float64, tmp_path):
    x, y = numbers_of(8)
    model = classifier(AccumulatingOptimizer(keras.optimizers.Adam(0.1), 3))
    model.train_on_batch(x, y)
    model.save(tmp_path / "begun.keras")
    loaded = keras.saving.load_model(tmp_path / "begun.keras")
    before = values(model)
    for each in (model, loaded):
        each.optimizer.flush()
    assert values(loaded).tolist() == values(model).tolist() != before.tolist()


@pytest.mark.parametrize("weighted", [False, True])
def test_sums_of_two_replicas_go_on_without_them(float64, tmp_path, weighted):
    """And the other way round: what is saved does not depend on the number of replicas."""
    parts = np.random.default_rng(0).normal(size=(3, 8, 2))
    weights = [4, 4, 4] if weighted else [None] * 3

    def made(replicas: int) -> tuple:
        strategy = strategies(replicas)
        with strategy.scope():
            variable = keras.Variable(np.zeros(2))
            accumulating = AccumulatingOptimizer(keras.optimizers.SGD(1.0), 3)
            accumulating.build([variable])
        return strategy, variable, accumulating

    def add(strategy, variable, accumulating, number: int) -> None:
        replicas = strategy.num_replicas_in_sync

        def apply(rows: tf.Tensor) -> None:
            options = (
                {}
                if weights[number] is None
                else {"weight": 2 * weights[number] / replicas}
            )
            accumulating.apply(
                [tf.reduce_mean(rows, 0) / replicas], [variable], **options
            )

        shares = np.split(parts[number], replicas)
        strategy.run(
            apply,
            [
                strategy.experimental_distribute_values_from_function(
                    lambda context: tf.constant(
                        shares[context.replica_id_in_sync_group]
                    )
                )
            ],
        )

    for before, after in ((1, 2), (2, 1)):
        begun, loaded = made(before), made(after)
        for number in range(2):
            add(*begun, number)
        path = tf.train.Checkpoint(optimizer=begun[2]).save(tmp_path / "begun")
        tf.train.Checkpoint(optimizer=loaded[2]).restore(path).assert_consumed()
        add(*loaded, 2)
        np.testing.assert_allclose(loaded[1].numpy(), -parts.mean((0, 1)), rtol=1e-12)


def test_what_is_excluded_from_decay_is_so_for_the_inner_optimizer(float64):
    kernel, bias = (
        keras.Variable(np.ones(2), name="kernel"),
        keras.Variable(np.ones(2), name="bias"),
    )
    accumulating = AccumulatingOptimizer(
        keras.optimizers.AdamW(0.1, weight_decay=0.5), 1
    )
    accumulating.exclude_from_weight_decay(var_names=["bias"])
    accumulating.apply([tf.zeros(2, "float64")] * 2, iter([kernel, bias]))
    assert kernel.numpy() == pytest.approx([0.95, 0.95])
    assert bias.numpy().tolist() == [1.0, 1.0]


@pytest.mark.slow
def test_callbacks_set_the_rate_and_swap_the_averages(float64):
    """The same history as with plain Keras on whole batches, also in validation, by averaged weights."""
    x, y = numbers_of(32)
    made = [lambda: keras.optimizers.SGD(0.5, use_ema=True, ema_momentum=0.5)]
    made.append(lambda: AccumulatingOptimizer(made[0](), 2))
    histories, models = [], []
    for optimizer_of, batch in zip(made, (16, 8), strict=True):
        rates = keras.callbacks.LearningRateScheduler(
            lambda epoch, rate: rate / (epoch + 1)
        )
        plateau = keras.callbacks.ReduceLROnPlateau(
            "loss", 0.5, patience=0, min_delta=1e9, cooldown=0
        )
        model = classifier(optimizer_of())
        callbacks = [rates, plateau, keras.callbacks.SwapEMAWeights()]
        history = model.fit(
            x,
            y,
            batch,
            epochs=3,
            shuffle=False,
            verbose=0,
            validation_data=(x, y),
            callbacks=callbacks,
        ).history
        histories.append(history)
        models.append(model)
    assert histories[1]["learning_rate"] == histories[0]["learning_rate"]
    assert (
        float(models[1].optimizer.inner.learning_rate)
        == float(models[0].optimizer.learning_rate)
        < 0.1
    )
    # A loss of about 1, after 6 updates of 16 terms in another order: 6 · 16 · 2⁻⁵³ = 1e-14.
    np.testing.assert_allclose(
        histories[1]["val_loss"], histories[0]["val_loss"], rtol=1e-13
    )


@pytest.mark.parametrize(
    "more",
    [{"jit_compile": True}, {"run_eagerly": True}, {"steps_per_execution": 4}],
    ids=str,
)
@pytest.mark.parametrize("factor", mostly_slow([1, 2], [2]))
def test_every_way_to_compile(float64, factor, more):
    x, y = numbers_of(32)
    start = values(classifier(keras.optimizers.SGD(0.5)))
    plain = classifier(keras.optimizers.SGD(0.5))
    model = classifier(AccumulatingOptimizer(keras.optimizers.SGD(0.5), factor), **more)
    plain.fit(x, y, 8 * factor, shuffle=False, verbose=0)
    model.fit(x, y, 8, shuffle=False, verbose=0)
    assert np.linalg.norm(values(model) - values(plain)) < CLOSE * np.linalg.norm(
        values(plain) - start
    )


def test_it_comes_back_from_its_config():
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    made = AccumulatingOptimizer(keras.optimizers.AdamW(rate, clipnorm=1.0), 3)
    again = keras.optimizers.deserialize(keras.optimizers.serialize(made))
    assert (
        again.get_config()
        == AccumulatingOptimizer.from_config(made.get_config()).get_config()
        == made.get_config()
    )


def test_what_it_cannot_be_made_of():
    sgd = keras.optimizers.SGD()
    for factor in (0, True, 2.0, None):
        with pytest.raises(
            ValueError, match=r"factor must be an integer of at least 1\. Received: "
        ):
            AccumulatingOptimizer(sgd, factor)
    for inner in (
        AccumulatingOptimizer(sgd, 2),
        keras.optimizers.SGD(gradient_accumulation_steps=2),
    ):
        with pytest.raises(ValueError, match="inner must not accumulate itself"):
            AccumulatingOptimizer(inner, 2)
    one, other = (keras.Variable(np.zeros(2)) for _ in range(2))
    accumulating = AccumulatingOptimizer(sgd, 2)
    accumulating.build([one])
    with pytest.raises(
        ValueError,
        match="trainable_variables must be the 1 that the optimizer was built for",
    ):
        accumulating.apply([tf.zeros(2)], [other])


@pytest.mark.parametrize("replicas", [1, 2])
def test_an_accumulator_averages_over_parts_and_replicas(float64, replicas):
    strategy = strategies(replicas)
    with strategy.scope():
        variables = [
            keras.Variable(np.zeros(2)),
            keras.Variable(np.zeros(1)),
            keras.Variable(np.zeros(2, "float16")),
        ]
        accumulator = GradientAccumulator(variables)

    def part(rows: tf.Tensor) -> None:
        mean = tf.reduce_mean(rows, 0)
        accumulator.add([mean, None, tf.cast(mean, "float16")], weight=len(rows))

    rows = np.random.default_rng(0).normal(size=(2 * 14, 2))
    for update in rows[:14], rows[14:]:
        for piece in update[:6], update[6:14]:
            shares = np.split(piece, [2]) if replicas == 2 else [piece]
            at = strategy.experimental_distribute_values_from_function(
                lambda context, shares=shares: tf.constant(
                    shares[context.replica_id_in_sync_group]
                )
            )
            strategy.run(part, (at,))
        first, none, half = accumulator.average()
        np.testing.assert_allclose(first, update.mean(0), rtol=1e-14)
        assert none is None
        assert half.dtype == "float32"
        accumulator.reset()
    assert accumulator.average()[0].numpy().tolist() == [0.0, 0.0]
    with pytest.raises(
        ValueError, match=r"gradients must be 3, one a variable\. Received: 1"
    ):
        accumulator.add([tf.zeros(2)])


def test_an_empty_share_counts_for_nothing():
    accumulator = GradientAccumulator([keras.Variable(np.zeros(2))])
    accumulator.add([tf.constant([1.0, 2.0])], weight=3)
    accumulator.add([tf.constant([np.nan, np.inf])], weight=0)
    assert accumulator.average()[0].numpy().tolist() == [1.0, 2.0]

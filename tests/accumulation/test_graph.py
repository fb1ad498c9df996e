"""What the traced update is made of: where batches are cut, and in which order the micro-batches are."""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from pipeline.accumulation import Update, accumulate_gradients

EFFECTIVE, MICRO, WIDTH = 96, 8, 5
PASSED_ON = {
    "PartitionedCall",
    "StatefulPartitionedCall",
}  # to a function that is looked at
LOOPS = {
    "StatelessWhile",
    "While",
}  # what they take lies where its operation asks for, on a GPU if it asks for nothing


def loss() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def traced(update: Callable, size: int | None = EFFECTIVE) -> tf.compat.v1.GraphDef:
    """The graph of an update whose batch alone has an axis of size `EFFECTIVE`, or of a size that is not known."""
    shapes = [size, WIDTH], [size], [size]
    specs = [
        tf.TensorSpec(shape, dtype)
        for shape, dtype in zip(shapes, ("float32", "int64", "float32"), strict=True)
    ]
    made = tf.function(
        lambda *batch: update(batch), autograph=False
    ).get_concrete_function(*specs)
    return made.graph.as_graph_def(add_shapes=True)


def taking_the_batch(graph: tf.compat.v1.GraphDef) -> dict[str, str]:
    """The operations, by name, that take something of `EFFECTIVE` examples; each with the device it asks for."""
    found = {}
    for function in graph.library.function:
        shapes = {
            argument.name: function.arg_attr[index].attr["_output_shapes"].list.shape
            for index, argument in enumerate(function.signature.input_arg)
        }
        found |= _taking(shapes, function.node_def)
    placed = {
        node.name: node.attr["_output_shapes"].list.shape
        for node in graph.node
        if node.op == "Placeholder"
    }
    return found | _taking(placed, graph.node)


def _taking(given, nodes):
    whole = {
        name
        for name, shapes in given.items()
        if any(_is_whole(shape) for shape in shapes)
    }
    found, asked = {}, {node.name: node.device for node in nodes}
    for node in nodes:
        if (
            taken := whole & {name.split(":")[0] for name in node.input}
        ) and node.op not in PASSED_ON:
            if node.op == "Identity":
                whole.add(node.name)
            elif node.op in LOOPS:
                found |= {
                    f"{node.op} {node.name} {name}": asked.get(name, "")
                    for name in taken
                }
                continue  # it gives the batch on as well, which nothing takes
            else:
                found[f"{node.op} {node.name}"] = node.device
            if any(
                _is_whole(shape) for shape in node.attr["_output_shapes"].list.shape
            ):
                whole.add(node.name)
    return found


def _is_whole(shape) -> bool:
    return bool(shape.dim) and shape.dim[0].size == EFFECTIVE


def small_model(*more: layers.Layer) -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((WIDTH,)),
            *more,
            layers.Dense(7, activation="relu"),
            layers.Dense(3),
        ]
    )


def built(model: keras.Model, micro_batch_size: int = MICRO, **options) -> Update:
    optimizer = keras.optimizers.SGD(0.01)
    optimizer.build(model.trainable_variables)
    return Update(model, loss(), optimizer, micro_batch_size, **options)


def test_only_the_host_holds_the_effective_batch():
    """What takes more of it than a micro-batch is asked for on the host: its slices, its size and its weights."""
    found = taking_the_batch(
        traced(built(small_model(layers.ActivityRegularization(0.1)), noise_every=2))
    )
    slices = [name for name in found if name.startswith("StridedSlice")]
    assert len(slices) >= 3 * 2  # x, y and weights: before the loop and in it
    assert {
        name: device for name, device in found.items() if not device.endswith("CPU:0")
    } == {}


def test_no_replica_holds_its_share(precision):
    """Of what is cut on the host for the second replica, its device takes micro-batches alone, one by one."""
    precision("float32")
    with (strategy := tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])).scope():
        update = built(small_model(), strategy=strategy)
    nodes = {node.name: node for node in traced(update, None).node}
    on_host = {
        name: node for name, node in nodes.items() if node.device.endswith("CPU:0")
    }
    cut = {
        name for name, node in on_host.items() if node.op == "StridedSlice"
    }  # shares, and first micro-batches
    shares = {
        name
        for name, node in on_host.items()
        if node.op == "Identity" and cut & set(node.input)
    }
    loops = [
        node
        for node in nodes.values()
        if node.op in LOOPS and node.device.endswith("CPU:1")
    ]
    assert [len(shares & set(loop.input)) for loop in loops] == [
        3
    ]  # x, y and weights, of which it cuts micro-batches
    taking = [
        node
        for node in nodes.values()
        if node.device.endswith("CPU:1") and (cut | shares) & set(node.input)
    ]
    first = [
        nodes[name] for node in taking if node.op == "Identity" for name in node.input
    ]
    assert {node.op for node in taking} == {"Identity", *(loop.op for loop in loops)}
    assert len(first) == 3
    assert all(
        set(node.input) & shares for node in first
    )  # of the share, not the share


def test_what_would_take_the_batch_to_a_device_is_seen():
    """The control: a loss that looks at the labels of the whole batch."""
    update = built(small_model())
    whole = tf.function(
        lambda x, y, weights: (
            update((x, y, weights)) | {"mean": tf.reduce_mean(weights)}
        ),
        autograph=False,
    )
    specs = [
        tf.TensorSpec([EFFECTIVE, *more], dtype)
        for more, dtype in (([WIDTH], "float32"), ([], "int64"))
    ]
    graph = whole.get_concrete_function(
        *specs, tf.TensorSpec([EFFECTIVE])
    ).graph.as_graph_def(add_shapes=True)
    assert [
        name
        for name, device in taking_the_batch(graph).items()
        if name.startswith("Mean") and not device
    ]


def test_whether_the_noise_is_measured_is_decided_on_the_host():
    """By what a GPU holds it would be read from there, and the host would wait at each update for the one before."""
    update = built(small_model(), noise_every=3)
    deciding = [node for node in traced(update).node if node.op == "FloorMod"]
    assert len(deciding) == 1
    assert deciding[0].device.endswith("CPU:0")
    assert update.begun.device.endswith("CPU:0")


def cosine() -> keras.optimizers.schedules.LearningRateSchedule:
    return keras.optimizers.schedules.CosineDecay(
        1e-3, 20, warmup_steps=2, warmup_target=1e-2
    )


def beside_the_host(
    rate, optimizer=keras.optimizers.AdamW, **options
) -> tf.compat.v1.GraphDef:
    """The graph of an update that computes on CPU:1, as on a GPU, with its optimizer's counter on the host."""
    with tf.device("CPU:1"):
        model = small_model(*options.pop("layers", ()))
        with tf.device("CPU:0"):
            made = optimizer(rate, weight_decay=0.004)
        made.build(model.trainable_variables)
        update = Update(model, loss(), made, MICRO, **options)
        return traced(update)


def needed(
    graph: tf.compat.v1.GraphDef, node: tf.compat.v1.NodeDef
) -> list[tf.compat.v1.NodeDef]:
    """All that an operation waits for, itself included."""
    of, found, ahead = {each.name: each for each in graph.node}, {}, [node]
    while ahead:
        node = ahead.pop()
        if node.name not in found:
            found[node.name] = node
            ahead += [of[name.lstrip("^").partition(":")[0]] for name in node.input]
    return list(found.values())


def devices(nodes: list[tf.compat.v1.NodeDef]) -> set[str]:
    """Those that operations ask for; a variable is read where it is."""
    return {
        node.device[-5:]
        for node in nodes
        if node.op not in ("Const", "Placeholder", "ReadVariableOp")
    }


@pytest.mark.parametrize(
    "optimizer", [keras.optimizers.AdamW, keras.optimizers.RMSprop]
)
def test_a_schedule_is_computed_once_on_the_host_and_waits_for_nothing(
    precision, optimizer
):
    """Each choice by what a GPU holds makes the host wait for it; Keras makes one for each variable."""
    precision("float32")
    graph = beside_the_host(cosine(), optimizer)
    choices = [node for node in graph.node if node.op in ("If", "StatelessIf")]
    assert len(choices) == 1
    waited_for = needed(graph, choices[0])
    assert devices(waited_for) == {"CPU:0"}
    assert (
        len([node for node in waited_for if node.op == "ReadVariableOp"]) == 1
    )  # the optimizer's counter


def test_noise_is_keyed_on_the_host_once_an_update():
    """A key is made of values in host memory, wherever its operation is: those of a GPU are waited for."""
    noisy = [layers.Dropout(0.1), layers.GaussianNoise(0.1), layers.Dropout(0.2)]
    graph = traced(built(small_model(*noisy), same_noise=True))
    keys = [node for node in graph.node if node.op == "StatelessRandomGetKeyCounter"]
    assert [devices(needed(graph, key)) for key in keys] == [{"CPU:0"}] * len(noisy)
    inside = [node for function in graph.library.function for node in function.node_def]
    assert not [node for node in inside if node.op == "StatelessRandomGetKeyCounter"]
    draws = [node for node in inside if node.op == "StatelessRandomUniformV2"]
    counters = {draw.input[2].partition(":")[0] for draw in draws}
    assert [node.device[-5:] for node in inside if node.name in counters] == [
        "CPU:0"
    ] * len(noisy)


@pytest.mark.parametrize("kind", ["schedule", "function", "variable"])
def test_the_rate_is_that_of_keras_to_the_bit(precision, kind):
    """RMSprop's step is Keras' own: variable by variable, each with a rate of its own where it applies alone."""
    precision("float32")
    calls = tf.Variable(0.0, trainable=False)

    def function():
        return 0.01 / (1 + calls)

    def trained(step):
        keras.utils.set_random_seed(0)
        model = small_model()
        rate = {"schedule": cosine(), "function": function, "variable": 0.01}[kind]
        optimizer = keras.optimizers.RMSprop(rate, weight_decay=0.01)
        optimizer.build(model.trainable_variables)
        rates, taken = [], tf.function(step(model, optimizer), autograph=False)
        for number in range(5):
            if kind == "variable":
                optimizer.learning_rate = (
                    0.01 * 0.3**number
                )  # as ReduceLROnPlateau does
            calls.assign(number)
            rates.append(float(taken()["learning_rate"]))
        return [*rates, *map(np.ndarray.tobytes, model.get_weights())]

    x, y = (
        tf.random.stateless_normal([MICRO, WIDTH], [0, 0]),
        tf.zeros([MICRO], tf.int64),
    )

    def by_keras(model, optimizer):
        def step():
            rate = keras.ops.convert_to_tensor(optimizer.learning_rate) + 0
            optimizer.apply(
                accumulate_gradients(model, loss(), (x, y), MICRO).gradients(),
                model.trainable_variables,
            )
            return {"learning_rate": rate}

        return step

    def by_update(model, optimizer):
        update = Update(model, loss(), optimizer, MICRO)
        return lambda: update((x, y))

    ours = trained(by_update)
    assert ours == trained(by_keras)
    assert len(set(ours[:5])) == 5


@keras.saving.register_keras_serializable("tests")
class Chained(layers.Layer):
    """Has a state that depends on the order of all calls."""

    def build(self, shape):
        self.state = self.add_weight(
            shape=(), initializer="ones", trainable=False, dtype="float64"
        )

    def call(self, x, training=False):
        if training:
            self.state.assign(
                keras.ops.sin(
                    3.7 * self.state + keras.ops.cast(keras.ops.mean(x), "float64")
                )
            )
        return x + 0.1 * keras.ops.cast(self.state, x.dtype)


def test_micro_batches_change_states_in_their_order():
    draw = np.random.default_rng(0)
    x, y = (
        draw.normal(size=(EFFECTIVE, WIDTH)).astype("float32"),
        draw.integers(0, 3, EFFECTIVE),
    )

    def states(batches):
        keras.utils.set_random_seed(0)
        first, last = Chained(), Chained()
        wide = [layers.Dense(512, activation="relu") for _ in range(3)]
        model = keras.Sequential(
            [keras.Input((WIDTH,)), first, *wide, layers.Dense(3), last]
        )
        batches(model)
        return first.state.numpy(), last.state.numpy()

    def one_by_one(model):
        for start in range(0, EFFECTIVE, MICRO):
            model(x[start : start + MICRO], training=True)

    def backwards(model):
        for start in reversed(range(0, EFFECTIVE, MICRO)):
            model(x[start : start + MICRO], training=True)

    def in_an_update(model):
        tf.function(built(model))((tf.constant(x), tf.constant(y)))

    # Sums of 512 products in float32, in another order: 512 · 6e-8, stretched by less than 3.7 at each of 12 steps of
    # a chain that does not grow on average.
    np.testing.assert_allclose(states(in_an_update), states(one_by_one), rtol=1e-3)
    assert np.abs(np.subtract(states(backwards), states(one_by_one))).max() > 0.1

"""What the traced update is made of.

Where batches are cut, and in which order the micro-batches are.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from contextlib import nullcontext

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from pipeline.accumulation import Update, accumulate_gradients, micro_batches
from pipeline.accumulation import update as update_module
from tests.accumulation.replicas import strategy_on
from tests.parameters import mostly_slow

EFFECTIVE = 96
MICRO = 8
WIDTH = 5
# They pass the batch on to a function that is looked at.
PASSED_ON = {"PartitionedCall", "StatefulPartitionedCall"}
# What they take lies where its operation has to be, on a GPU if it has no device.
LOOPS = {"StatelessWhile", "While"}

Graph = tf.compat.v1.GraphDef
Node = tf.compat.v1.NodeDef


def loss() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def traced(update: Callable, size: int | None = EFFECTIVE) -> Graph:
    """Return the graph of an update.

    Its batch alone has an axis of size `EFFECTIVE`, or of a size that is not known.
    """
    return traced_function(update, size).graph.as_graph_def(add_shapes=True)


def traced_function(
    update: Callable, size: int | None = EFFECTIVE
) -> tf.types.experimental.ConcreteFunction:
    specs = (
        tf.TensorSpec([size, WIDTH]),
        tf.TensorSpec([size], tf.int64),
        tf.TensorSpec([size]),
    )
    function = tf.function(lambda *batch: update(batch), autograph=False)
    return function.get_concrete_function(*specs)


def of_kind(nodes: Iterable[Node], *kinds: str) -> list[Node]:
    return [node for node in nodes if node.op in kinds]


def on_device(nodes: Iterable[Node], device: str) -> list[Node]:
    return [node for node in nodes if node.device.endswith(device)]


def taking(nodes: Iterable[Node], names: set[str]) -> list[Node]:
    """Return the nodes that have one of these as an input."""
    return [node for node in nodes if names & set(node.input)]


def names_of(nodes: Iterable[Node]) -> set[str]:
    return {node.name for node in nodes}


def inner_nodes(graph: Graph) -> list[Node]:
    """Return the nodes of all functions of the graph."""
    nodes: list[Node] = []
    for function in graph.library.function:
        nodes += function.node_def
    return nodes


def taking_the_batch(graph: Graph) -> dict[str, str]:
    """Return the operations that take something of `EFFECTIVE` examples.

    They are by name, each with the device that it has to be on.
    """
    devices_by_operation = {}
    for function in graph.library.function:
        batches = set()
        for index, argument in enumerate(function.signature.input_arg):
            if _has_batch(function.arg_attr[index].attr):
                batches.add(argument.name)
        devices_by_operation |= _taking_one_of(batches, function.node_def)

    placeholders = of_kind(graph.node, "Placeholder")
    batches = {node.name for node in placeholders if _has_batch(node.attr)}
    return devices_by_operation | _taking_one_of(batches, graph.node)


def _taking_one_of(batches: set[str], nodes: Iterable[Node]) -> dict[str, str]:
    """Return the nodes that take one of `batches`, or what is made of one, by name."""
    devices = {node.name: node.device for node in nodes}
    devices_by_operation = {}
    for node in nodes:
        taken = batches & {name.split(":")[0] for name in node.input}
        if not taken or node.op in PASSED_ON:
            continue
        if node.op in LOOPS:
            # It returns the batch as well, which nothing takes.
            for name in taken:
                operation = f"{node.op} {node.name} {name}"
                devices_by_operation[operation] = devices.get(name, "")
            continue
        if node.op != "Identity":
            devices_by_operation[f"{node.op} {node.name}"] = node.device
        if node.op == "Identity" or _has_batch(node.attr):
            batches.add(node.name)
    return devices_by_operation


def _has_batch(attributes) -> bool:
    """Return whether one of the shapes of an output begins with `EFFECTIVE`."""
    for shape in attributes["_output_shapes"].list.shape:
        if shape.dim and shape.dim[0].size == EFFECTIVE:
            return True
    return False


def small_model(*more: layers.Layer) -> keras.Model:
    hidden = layers.Dense(7, activation="relu")
    return keras.Sequential([keras.Input((WIDTH,)), *more, hidden, layers.Dense(3)])


def update_of(model: keras.Model, **options) -> Update:
    optimizer = keras.optimizers.SGD(0.01)
    optimizer.build(model.trainable_variables)
    return Update(model, loss(), optimizer, MICRO, **options)


def test_only_the_host_holds_the_effective_batch():
    """What takes more of it than a micro-batch has to be on the host.

    That is its slices, its size and its weights.
    """
    model = small_model(layers.ActivityRegularization(0.1))
    devices = taking_the_batch(traced(update_of(model, noise_every=2)))
    slices = [name for name in devices if name.startswith("StridedSlice")]
    assert len(slices) >= 3 * 2  # x, y and weights: before the loop and in it
    for name, device in devices.items():
        assert device.endswith("CPU:0"), name


def test_no_replica_holds_its_share(precision):
    """What is cut for the second replica is cut on the host.

    The replica's device takes micro-batches alone, one by one.
    """
    precision("float32")
    strategy = strategy_on(2)
    with strategy.scope():
        update = update_of(small_model(), strategy=strategy)
    nodes = traced(update, None).node

    # On the host: shares, and first micro-batches.
    on_host = on_device(nodes, "CPU:0")
    cut = names_of(of_kind(on_host, "StridedSlice"))
    shares = names_of(taking(of_kind(on_host, "Identity"), cut))

    # The loop takes the shares of x, y and weights, of which it cuts micro-batches.
    on_replica = on_device(nodes, "CPU:1")
    (loop,) = of_kind(on_replica, *LOOPS)
    assert len(shares & set(loop.input)) == 3

    # All else takes the first micro-batches: of the share, not the share.
    readers = taking(on_replica, cut | shares)
    assert {node.op for node in readers} == {"Identity", loop.op}
    first_micro_batches = []
    for node in of_kind(readers, "Identity"):
        first_micro_batches += node.input
    assert len(first_micro_batches) == 3
    for node in nodes:
        if node.name in first_micro_batches:
            assert set(node.input) & shares


def test_what_would_take_the_batch_to_a_device_is_seen():
    """The control: a loss that looks at the labels of the whole batch."""
    update = update_of(small_model())

    def with_mean(batch):
        _, _, weights = batch
        return update(batch) | {"mean": tf.reduce_mean(weights)}

    means = []
    for name, device in taking_the_batch(traced(with_mean)).items():
        if name.startswith("Mean") and not device:
            means.append(name)
    assert means


def integers_of_the_step() -> int:
    """Return how many tensors of int32 a traced step takes.

    The batch has tokens and labels of int32. The position of the micro-batch in it is
    another one, which stays on the host.
    """
    tokens = keras.Input((WIDTH,), dtype="int32")
    hidden = layers.Flatten()(layers.Embedding(7, 3)(tokens))
    update = update_of(keras.Model(tokens, layers.Dense(3)(hidden)))
    x = tf.TensorSpec([None, WIDTH], tf.int32)
    y = tf.TensorSpec([None], tf.int32)
    step = tf.function(lambda *batch: update(batch), autograph=False)
    graph = step.get_concrete_function(x, y).graph.as_graph_def()
    for call in of_kind(inner_nodes(graph), *PASSED_ON):
        if "on_leaves" in call.attr["f"].func.name:
            return list(call.attr["Tin"].list.type).count(tf.int32.as_datatype_enum)
    raise AssertionError("no call of a step")


def test_integers_are_copied_to_the_device_before_their_step(monkeypatch):
    """TensorFlow keeps int32 on a GPU's host until a step uses it."""
    copied = integers_of_the_step()
    # The control: tokens and labels that keep their dtype.
    monkeypatch.setattr(micro_batches, "_specs_on_device", list)
    assert integers_of_the_step() == copied + 2


def test_whether_the_noise_is_measured_is_decided_on_the_host():
    """From a GPU the decision would have to be read.

    The host would wait at each update for the one before.
    """
    update = update_of(small_model(), noise_every=3)
    (decision,) = of_kind(traced(update).node, "FloorMod")
    assert decision.device.endswith("CPU:0")
    assert update.begun.device.endswith("CPU:0")


def cosine() -> keras.optimizers.schedules.LearningRateSchedule:
    return keras.optimizers.schedules.CosineDecay(
        1e-3, 20, warmup_steps=2, warmup_target=1e-2
    )


def beside_the_host(rate, optimizer) -> Graph:
    """Return the graph of an update that computes on CPU:1, as on a GPU.

    The counter of its optimizer is on the host.
    """
    with tf.device("CPU:1"):
        model = small_model()
        with tf.device("CPU:0"):
            built = optimizer(rate, weight_decay=0.004)
        built.build(model.trainable_variables)
        return traced(Update(model, loss(), built, MICRO))


def needed(graph: Graph, node: Node) -> list[Node]:
    """Return all that an operation waits for, itself included."""
    nodes = {other.name: other for other in graph.node}
    needed_by_name = {}
    ahead = [node.name]
    while ahead:
        name = ahead.pop()
        if name in needed_by_name:
            continue
        needed_by_name[name] = nodes[name]
        for source in nodes[name].input:
            ahead.append(source.lstrip("^").partition(":")[0])
    return list(needed_by_name.values())


def devices_of(nodes: list[Node]) -> set[str]:
    """Return those that operations have to be on; a variable is read where it is."""
    anywhere = ("Const", "Placeholder", "ReadVariableOp")
    return {node.device[-5:] for node in nodes if node.op not in anywhere}


@pytest.mark.parametrize(
    "optimizer",
    mostly_slow(
        [keras.optimizers.AdamW, keras.optimizers.RMSprop], [keras.optimizers.AdamW]
    ),
)
def test_a_schedule_is_computed_once_on_the_host_and_waits_for_nothing(
    precision, optimizer
):
    """Each choice by what a GPU holds makes the host wait for it.

    Keras makes one for each variable.
    """
    precision("float32")
    graph = beside_the_host(cosine(), optimizer)
    (choice,) = of_kind(graph.node, "If", "StatelessIf")
    waited_for = needed(graph, choice)
    assert devices_of(waited_for) == {"CPU:0"}
    # The optimizer's counter.
    assert len(of_kind(waited_for, "ReadVariableOp")) == 1


def reads_for_the_apply(optimizer, xla: bool) -> tuple[Graph, list[Node]]:
    """Return the graph of an update, and what launching its apply reads on the host.

    That is the counter of the optimizer; the weights and moments are on CPU:1.
    """
    with tf.device("CPU:1"):
        model = small_model()
        with tf.device("CPU:0"):
            built = optimizer(cosine())
        built.build(model.trainable_variables)
        update = Update(model, loss(), built, MICRO, jit_compile=xla, xla_scope="apply")
        function = traced_function(update)
    graph = function.graph.as_graph_def(add_shapes=True)
    counter = built.iterations.value.handle
    names = set()
    for captured, placeholder in function.graph.captures:
        if captured is counter:
            names.add(placeholder.op.name)

    launches = of_kind(graph.node, "AssignSubVariableOp")
    if xla:
        calls = of_kind(graph.node, "StatefulPartitionedCall")
        launches = [call for call in calls if call.attr["_XlaMustCompile"].b]
        assert len(launches) == 1
    assert launches
    reads = {}
    for launch in launches:
        read_for_launch = of_kind(needed(graph, launch), "ReadVariableOp")
        for read in taking(read_for_launch, names):
            reads[read.name] = read
    assert reads
    return graph, list(reads.values())


COUNTING = [keras.optimizers.AdamW, keras.optimizers.Nadam]


@pytest.mark.parametrize(
    ("optimizer", "xla"),
    mostly_slow(
        itertools.product(COUNTING, [True, False]),
        [(keras.optimizers.AdamW, True), (keras.optimizers.Nadam, False)],
    ),
)
def test_what_launching_the_apply_reads_on_the_host_waits_for_no_device(
    precision, optimizer, xla
):
    """An edge from the device to the host waits for all that the device has to do."""
    precision("float32")
    graph, reads = reads_for_the_apply(optimizer, xla)
    for read in reads:
        assert devices_of(needed(graph, read)) <= {"CPU:0"}, read.name


@pytest.mark.parametrize("optimizer", mostly_slow(COUNTING, COUNTING[1:]))
def test_a_counter_that_waits_for_the_device_is_seen(precision, monkeypatch, optimizer):
    """The control: Keras reads the counter where it computes each variable's step."""
    precision("float32")
    monkeypatch.setattr(
        update_module, "constant_counts", lambda *arguments: nullcontext()
    )
    graph, reads = reads_for_the_apply(optimizer, xla=False)
    devices = [devices_of(needed(graph, read)) for read in reads]
    assert "" in set().union(*devices)


def test_noise_is_keyed_on_the_host_once_an_update():
    """A key is made of values in host memory, wherever its operation is.

    The host would wait for those of a GPU.
    """
    noisy = [layers.Dropout(0.1), layers.GaussianNoise(0.1), layers.Dropout(0.2)]
    graph = traced(update_of(small_model(*noisy), same_noise=True))
    keys = of_kind(graph.node, "StatelessRandomGetKeyCounter")
    assert len(keys) == len(noisy)
    for key in keys:
        assert devices_of(needed(graph, key)) == {"CPU:0"}

    in_loops = inner_nodes(graph)
    assert not of_kind(in_loops, "StatelessRandomGetKeyCounter")
    draws = of_kind(in_loops, "StatelessRandomUniformV2")
    counter_names = {draw.input[2].partition(":")[0] for draw in draws}
    counters = [node for node in in_loops if node.name in counter_names]
    assert [node.device[-5:] for node in counters] == ["CPU:0"] * len(noisy)


@pytest.mark.parametrize(
    "kind", mostly_slow(["schedule", "function", "variable"], ["schedule"])
)
def test_the_rate_is_that_of_keras_to_the_bit(precision, kind):
    """RMSprop's step is Keras' own: variable by variable.

    Each variable has a rate of its own where the optimizer applies alone.
    """
    precision("float32")
    calls = tf.Variable(0.0, trainable=False)
    x = tf.random.stateless_normal([MICRO, WIDTH], [0, 0])
    y = tf.zeros([MICRO], tf.int64)

    def rate_of_kind():
        if kind == "schedule":
            return cosine()
        if kind == "function":
            return lambda: 0.01 / (1 + calls)
        return 0.01

    def trained(step_of):
        """Return the rates of five updates, and the bytes of the weights after them."""
        keras.utils.set_random_seed(0)
        model = small_model()
        optimizer = keras.optimizers.RMSprop(rate_of_kind(), weight_decay=0.01)
        optimizer.build(model.trainable_variables)
        step = tf.function(step_of(model, optimizer), autograph=False)
        rates = []
        for number in range(5):
            if kind == "variable":  # as ReduceLROnPlateau does
                optimizer.learning_rate = 0.01 * 0.3**number
            calls.assign(number)
            rates.append(float(step()["learning_rate"]))
        return rates, [weight.tobytes() for weight in model.get_weights()]

    def by_keras(model, optimizer):
        def step():
            rate = keras.ops.convert_to_tensor(optimizer.learning_rate) + 0
            sums = accumulate_gradients(model, loss(), (x, y), MICRO)
            optimizer.apply(sums.gradients(), model.trainable_variables)
            return {"learning_rate": rate}

        return step

    def by_update(model, optimizer):
        update = Update(model, loss(), optimizer, MICRO)
        return lambda: update((x, y))

    rates, weights = trained(by_update)
    assert (rates, weights) == trained(by_keras)
    assert len(set(rates)) == 5


@keras.saving.register_keras_serializable("tests")
class Chained(layers.Layer):
    """Has a state that depends on the order of all calls."""

    def build(self, shape):
        self.state = self.add_weight(
            shape=(), initializer="ones", trainable=False, dtype="float64"
        )

    def call(self, x, training=False):
        if training:
            mean = keras.ops.cast(keras.ops.mean(x), "float64")
            self.state.assign(keras.ops.sin(3.7 * self.state + mean))
        return x + 0.1 * keras.ops.cast(self.state, x.dtype)


def test_micro_batches_change_states_in_their_order():
    random = np.random.default_rng(0)
    x = random.normal(size=(EFFECTIVE, WIDTH)).astype("float32")
    y = random.integers(0, 3, EFFECTIVE)

    def states_after(train):
        """Return the states of the first and the last layer."""
        keras.utils.set_random_seed(0)
        first = Chained()
        last = Chained()
        wide = [layers.Dense(512, activation="relu") for _ in range(3)]
        model = keras.Sequential(
            [keras.Input((WIDTH,)), first, *wide, layers.Dense(3), last]
        )
        train(model)
        return first.state.numpy(), last.state.numpy()

    def one_by_one(model):
        for start in range(0, EFFECTIVE, MICRO):
            model(x[start : start + MICRO], training=True)

    def backwards(model):
        for start in reversed(range(0, EFFECTIVE, MICRO)):
            model(x[start : start + MICRO], training=True)

    def in_an_update(model):
        tf.function(update_of(model))((tf.constant(x), tf.constant(y)))

    # Sums of 512 products in float32, in another order: 512 · 6e-8, stretched by less
    # than 3.7 at each of 12 steps of a chain that does not grow on average.
    expected = states_after(one_by_one)
    np.testing.assert_allclose(states_after(in_an_update), expected, rtol=1e-3)
    assert np.abs(np.subtract(states_after(backwards), expected)).max() > 0.1

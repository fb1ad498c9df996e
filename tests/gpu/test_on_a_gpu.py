"""What has to be right on a GPU: `make test-gpu`, about five minutes.

Without the environment variable `PIPELINE_TEST_DEVICE=gpu`, which that target sets, a
part of the tests runs on the CPU: a rehearsal. The CPU's own tests are elsewhere.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, losses

from benchmarks.gpu_runs import OUT_OF_MEMORY
from pipeline.accumulation import Update
from tests.accumulation import reference
from tests.accumulation.sequences import cross_entropy
from tests.accumulation.test_noise_by_tokens import batch as sequences
from tests.accumulation.test_noise_by_tokens import noisy_model
from tests.checkpoints.left import metrics_in, weights_in
from tests.running import Store, pipeline, start, wait
from tests.shared import place_store

pytestmark = pytest.mark.slow

DEVICE = os.environ.get("PIPELINE_TEST_DEVICE", "cpu")
EXAMPLES = 24
MICRO = 5  # does not divide the examples
UPDATES = 3
# Rounding of 1e-16 in each sum of at most 24 × 8 × 8 terms, which the division by √v of
# Adam stretches by up to 1/ε = 1e7 for gradients near zero.
TOLERANCE = 1e-8

# Ways to compile: `jit_compile` and `xla_scope`.
WAYS = {
    "without XLA": (False, "step"),
    "step": (True, "step"),
    "apply": (True, "apply"),
    "update": (True, "update"),
}
if DEVICE == "cpu":
    TRIED = ["update"]
    TRIED_BY_TOKENS = ["step"]
else:
    TRIED = list(WAYS)
    TRIED_BY_TOKENS = [way for way in WAYS if way != "update"]  # it is as `apply` there


@pytest.fixture(scope="module", autouse=True)
def device():
    """Run on the device that is asked for, or fail in one line."""
    if DEVICE == "gpu" and not tf.config.list_physical_devices("GPU"):
        pytest.fail("TensorFlow finds no GPU: `pipeline train` says why", pytrace=False)


class Kind(NamedTuple):
    """A model without a size of the batch, and one example's shape of x and y."""

    model: Callable[[], keras.Model]
    x: tuple[int, ...]
    y: tuple[int, ...] = ()
    words: bool = False


def convolutions() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Conv2D(6, 3, padding="same", activation="relu"),
            layers.DepthwiseConv2D(3),
            layers.GroupNormalization(2),
            layers.MaxPooling2D(),
            layers.Conv2DTranspose(4, 2),
            layers.GlobalAveragePooling2D(),
            layers.Dense(3),
        ]
    )


def recurrent() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((8,), dtype="int32"),
            layers.Embedding(11, 6),
            layers.LSTM(5, return_sequences=True),
            layers.Bidirectional(layers.GRU(4)),
            layers.Dense(3),
        ]
    )


def attention() -> keras.Model:
    inputs = keras.Input((8,), dtype="int32")
    x = layers.Embedding(11, 8)(inputs)
    normalized = layers.LayerNormalization()(x)
    attended = layers.MultiHeadAttention(2, 4)(
        normalized, normalized, use_causal_mask=True
    )
    x = layers.Add()([x, attended])
    x = layers.Dense(8, activation="gelu", kernel_regularizer="l2")(x)
    return keras.Model(inputs, layers.Dense(3)(x))


KINDS = {
    "convolutions": Kind(convolutions, (8, 8, 3)),
    "recurrent": Kind(recurrent, (8,), words=True),
    "attention": Kind(attention, (8,), (8,), words=True),
}


def batch_of(kind: Kind, examples: int = EXAMPLES) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    shape = (examples, *kind.x)
    if kind.words:
        x = random.integers(0, 11, shape).astype("int32")
    else:
        x = random.normal(size=shape)
    return x, random.integers(0, 3, (examples, *kind.y))


def loss() -> losses.Loss:
    return losses.SparseCategoricalCrossentropy(from_logits=True)


def updated(
    kind: Kind,
    way: str,
    examples: int = EXAMPLES,
    micro: int = MICRO,
    **options: Any,
) -> list[np.ndarray]:
    """Return the weights after some updates."""
    keras.utils.set_random_seed(0)
    model = kind.model()
    optimizer = keras.optimizers.Adam(0.01)
    optimizer.build(model.trainable_variables)
    jit_compile, scope = WAYS[way]
    update = Update(
        model,
        loss(),
        optimizer,
        micro,
        jit_compile=jit_compile,
        xla_scope=scope,
        **options,
    )
    x, y = map(tf.constant, batch_of(kind, examples))
    step = tf.function(lambda x, y: update((x, y)), autograph=False)
    for _ in range(UPDATES):
        step(x, y)
    assert update.compiled is jit_compile
    assert update.apply_compiled is (scope != "step")
    assert update.update_compiled is (scope == "update")
    return model.get_weights()


def by_keras(kind: Kind, examples: int = EXAMPLES) -> list[np.ndarray]:
    """Return the weights after as many steps of plain Keras on the whole batch.

    The gradients are dense: Keras' sparse step of Adam counts a word that occurs twice
    in a batch as two updates.
    """
    keras.utils.set_random_seed(0)
    model = kind.model()
    optimizer = keras.optimizers.Adam(0.01)
    optimizer.build(model.trainable_variables)
    compute_loss = loss()

    @tf.function(autograph=False)
    def step(x: tf.Tensor, y: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            value = compute_loss(y, model(x, training=True)) + sum(model.losses)
        gradients = reference.dense(reference.gradients_of(tape, value, model))
        optimizer.apply(gradients, model.trainable_variables)

    x, y = map(tf.constant, batch_of(kind, examples))
    for _ in range(UPDATES):
        step(x, y)
    return model.get_weights()


def deviation(weights: list[np.ndarray], others: list[np.ndarray]) -> float:
    differences = []
    for weight, other in zip(weights, others, strict=True):
        differences.append(float(np.max(np.abs(weight - other))))
    return max(differences)


def kinds_and_ways() -> list[tuple[str, str]]:
    """Return each kind of model with each way; in a rehearsal, with one of them.

    A CPU takes most of a minute to compile a recurrent model, or one with attention.
    """
    if DEVICE == "cpu":
        others = [(name, "without XLA") for name in KINDS if name != "convolutions"]
        return [("convolutions", "update"), *others]
    return list(product(KINDS, TRIED))


@pytest.mark.parametrize(("name", "way"), kinds_and_ways())
def test_updates_are_those_of_whole_batches(float64, name, way):
    kind = KINDS[name]
    expected = by_keras(kind)
    for micro in (MICRO, 6):  # with a short last micro-batch, and without one
        weights = updated(kind, way, micro=micro)
        assert deviation(weights, expected) < TOLERANCE, micro

    # The control: a batch without its last example.
    assert deviation(by_keras(kind, EXAMPLES - 1), expected) > 1e-4


def test_no_host_waits_for_the_number_of_rows_of_an_embedding():
    """On a GPU the gradient of an embedding is summed as a dense tensor."""
    keras.utils.set_random_seed(0)
    model = attention()
    optimizer = keras.optimizers.Adam(0.01)
    optimizer.build(model.trainable_variables)
    update = Update(model, loss(), optimizer, MICRO, jit_compile=True)
    batch = tuple(map(tf.constant, batch_of(KINDS["attention"])))
    step = tf.function(lambda *parts: update(parts), autograph=False)
    graph = step.get_concrete_function(*batch).graph.as_graph_def()
    operations = set()
    for function in graph.library.function:
        operations |= {node.op for node in function.node_def}
    # The control: a CPU, which waits for nobody, sums rows.
    assert ("Unique" in operations) == (DEVICE == "cpu")


@pytest.mark.parametrize("way", TRIED)
def test_the_noise_does_not_depend_on_the_cut(float64, way):
    def noisy() -> keras.Model:
        return keras.Sequential(
            [
                keras.Input((8,)),
                layers.GaussianNoise(0.5),
                layers.Dense(16, activation="tanh"),
                layers.Dropout(0.5),
                layers.Dense(3),
            ]
        )

    kind = Kind(noisy, (8,))
    whole = updated(kind, "without XLA", micro=EXAMPLES, same_noise=True)
    assert deviation(updated(kind, way, same_noise=True), whole) < TOLERANCE
    # The control: noise that is drawn for each micro-batch.
    assert deviation(updated(kind, way), whole) > 1e-4


def cut_by_tokens(limit: int, way: str, xla_lengths: tuple[int, ...] = ()) -> Any:
    """Return the weights after some updates with noise on sequences, in one vector."""
    model = noisy_model()
    optimizer = keras.optimizers.SGD(0.5)
    optimizer.build(model.trainable_variables)
    jit_compile, scope = WAYS[way]
    update = Update(
        model,
        cross_entropy(),
        optimizer,
        micro_batch_tokens=limit,
        xla_lengths=xla_lengths,
        jit_compile=jit_compile,
        xla_scope=scope,
        same_noise=True,
    )
    step = tf.function(update, autograph=False)
    for _ in range(UPDATES):
        step(sequences())
    assert update.compiled is jit_compile
    return np.concatenate([weight.ravel() for weight in model.get_weights()])


@pytest.mark.parametrize("way", TRIED_BY_TOKENS)
def test_noise_and_weights_do_not_depend_on_a_cut_by_tokens(float64, way):
    whole = cut_by_tokens(10_000, "without XLA")
    xla_lengths = () if way == "without XLA" else (2, 4, 8)
    weights = cut_by_tokens(12, way, xla_lengths)
    assert np.abs(weights - whole).max() < TOLERANCE


@pytest.mark.parametrize("way", TRIED)
def test_moving_statistics_of_one_micro_batch_are_those_of_keras(float64, way):
    def normalized() -> keras.Model:
        return keras.Sequential(
            [keras.Input((8,)), layers.BatchNormalization(), layers.Dense(3)]
        )

    kind = Kind(normalized, (8,))
    weights = updated(kind, way, examples=4, micro=4)
    expected = by_keras(kind, 4)
    assert deviation(weights, expected) < TOLERANCE


RUN = (
    "train",
    "model=cnn",
    "training.epochs=null",
    "training.updates=24",
    "training.checkpoint_every=8",
    "hardware.deterministic=true",
    f"hardware.device={DEVICE}",
    "tracking.log_model=false",
    "tracking.system_metrics=false",
    "hydra.run.dir=run",
)


class Left(NamedTuple):
    """What a run has left in its folder."""

    folder: Path
    weights: dict[str, bytes]
    metrics: dict[str, dict[int, float]]


def left_in(folder: Path) -> Left:
    return Left(folder, weights_in(folder, 24), metrics_in(folder))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Left:
    folder = tmp_path_factory.mktemp("undisturbed")
    pipeline(*RUN, cwd=folder)
    return left_in(folder)


def test_a_deterministic_run_is_repeated_bit_for_bit(tmp_path, undisturbed):
    pipeline(*RUN, cwd=tmp_path)
    again = left_in(tmp_path)
    assert again.weights == undisturbed.weights
    assert again.metrics == undisturbed.metrics

    # The control: another seed.
    other = tmp_path / "other"
    other.mkdir()
    pipeline(*RUN, "seed=1", cwd=other)
    assert left_in(other).weights != undisturbed.weights


def test_a_killed_run_is_resumed_bit_for_bit(tmp_path, undisturbed):
    place_store(tmp_path)
    process = start(*RUN, cwd=tmp_path)
    wait((tmp_path / "run" / "checkpoints" / "8" / "manifest.json").exists)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    pipeline("resume", "run", cwd=tmp_path)
    resumed = left_in(tmp_path)
    assert resumed.weights == undisturbed.weights
    assert resumed.metrics == undisturbed.metrics


def test_a_run_is_verified_and_rerun(undisturbed):
    folder = undisturbed.folder
    run = Store(folder).run()
    pipeline("verify", "model=cnn", f"hardware.device={DEVICE}", cwd=folder)
    pipeline("rerun", run.info.run_id, cwd=folder)


def test_an_update_that_does_not_fit_is_repeated_in_smaller_pieces(tmp_path):
    """One example of 64 needs more memory than there is, beside any other one."""
    done = pipeline(
        "train",
        *OUT_OF_MEMORY,
        "training.epochs=1",
        f"hardware.device={DEVICE}",
        "tracking.log_model=false",
        "tracking.system_metrics=false",
        "hydra.run.dir=run",
        cwd=tmp_path,
    )
    assert "does not fit into memory" in done.stderr
    store = Store(tmp_path)
    sizes = store.history(store.run(), "perf/micro_batch_size")
    assert set(sizes.values()) == {1.0}

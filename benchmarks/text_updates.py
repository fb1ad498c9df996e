"""How far the update of each contender in `benchmarks.text` is from the true one.

The true update has the mean gradient over all tokens of an effective batch. Here it is
summed text by text, without padding, in float64. Every contender computes in float32,
and takes a step of plain SGD from the same weights. The figure is the norm of the
difference between both updates ÷ the norm of the true one. The true update is always
that of the texts that the contender has in its update.

Which texts meet there is another question. If they are grouped by length, the mean
length of a text varies more between updates than by chance.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from benchmarks import text
from benchmarks.figures import Figure
from benchmarks.processes import PEERS, SLEEPING, run
from benchmarks.texts import (
    DECODER,
    PYTORCH,
    TRAINER_BY_LENGTH,
    TRAINER_OWN_MEAN,
    Case,
    Texts,
    read,
    token_count,
)

COMPARED = 5  # updates of each contender
TRAINED = 20  # updates before
TRAINED_RATE = 0.003  # of these updates, as in `experiment=text`

Arrays = dict[str, np.ndarray]  # by the name of the parameter in PyTorch


@dataclass(frozen=True)
class TextUpdate:
    """One update of a contender.

    Attributes:
        texts: the effective batch.
        change: weights before − weights after, with a learning rate of 1.
    """

    texts: Texts
    change: Arrays


@dataclass(frozen=True)
class Contender:
    """Some updates of a contender, and which texts meet in them.

    Attributes:
        updates: those that are compared, evenly over an epoch.
        mean_lengths: of the texts of each update, over an epoch.
    """

    updates: Sequence[TextUpdate]
    mean_lengths: Sequence[float]


def measure(case: Case) -> Iterator[Figure]:
    """Yield the distance for each contender, and the spread of the mean lengths."""
    texts = read(case)
    weights = _trained_weights(case, texts)
    in_order = text.micro_batches_of(case, texts)
    by_length = text.grouped_by_length(case, texts)
    contenders = {
        text.BY_TOKENS: _ours(case, texts, weights, by_tokens=True),
        text.BY_EXAMPLES: _ours(case, texts, weights, by_tokens=False),
        text.FIT: _fit(case, in_order, weights),
        text.FIT_BY_LENGTH: _fit(case, by_length, weights),
    }
    if PEERS.exists():
        for loop in (PYTORCH, TRAINER_BY_LENGTH, TRAINER_OWN_MEAN):
            contenders[loop] = _in_pytorch(loop, case, texts, weights)

    truth = TrueUpdate(case, weights)
    for name, contender in contenders.items():
        distances = []
        for update in contender.updates:
            distances.append(distance(update.change, truth(update.texts)))
        what = f"distance of the update, {name}"
        yield Figure("text", str(case), what, distances)

    # The standard deviation of the mean of an effective batch that is drawn at random.
    lengths = [len(tokens) - 1 for tokens in texts]
    by_chance = statistics.stdev(lengths) / case.effective**0.5
    for name in (text.FIT_BY_LENGTH, TRAINER_BY_LENGTH):
        if name in contenders:
            spread = statistics.stdev(contenders[name].mean_lengths)
            what = f"spread of mean lengths ÷ by chance, {name}"
            yield Figure("text", str(case), what, [spread / by_chance])


def distance(change: Arrays, true: Arrays) -> float:
    """Return ‖change − true‖ ÷ ‖true‖, over all parameters."""
    differences = {name: change[name] - true[name] for name in true}
    return _norm(differences) / _norm(true)


def _norm(arrays: Arrays) -> float:
    return sum(float(np.sum(np.square(array))) for array in arrays.values()) ** 0.5


class TrueUpdate:
    """Computes the mean gradient over all tokens of some texts, in float64."""

    def __init__(self, case: Case, weights: Sequence[np.ndarray]):
        with _double_precision():
            self._model = text.build(case)
        self._model.set_weights(weights)
        tokens = tf.TensorSpec([None], tf.int32)
        self._gradients = tf.function(self._gradients_of, input_signature=[tokens])

    def __call__(self, texts: Texts) -> Arrays:
        sums = [np.zeros(weight.shape) for weight in self._model.trainable_variables]
        for tokens in texts:
            for total, gradient in zip(sums, self._gradients(tokens), strict=True):
                total += gradient.numpy()
        return in_pytorch([total / token_count(texts) for total in sums])

    def _gradients_of(self, tokens: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            logits = self._model(tokens[None, :-1], training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
                tokens[None, 1:], logits
            )
            total = tf.reduce_sum(losses)
        gradients = tape.gradient(total, self._model.trainable_variables)
        return [tf.convert_to_tensor(gradient) for gradient in gradients]


@contextmanager
def _double_precision() -> Iterator[None]:
    precision = keras.config.floatx()
    policy = keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    try:
        yield
    finally:
        keras.config.set_floatx(precision)
        keras.config.set_dtype_policy(policy)


def in_pytorch(values: Sequence[np.ndarray]) -> Arrays:
    """Return the weights of the decoder in Keras, or gradients, as PyTorch has them.

    Args:
        values: one for each trainable variable, in the order of the model.
    """
    remaining = iter(values)

    def norm(name: str) -> None:
        arrays[f"{name}.weight"] = next(remaining)
        arrays[f"{name}.bias"] = next(remaining)

    def dense(name: str) -> None:
        arrays[f"{name}.weight"] = next(remaining).T
        arrays[f"{name}.bias"] = next(remaining)

    width = DECODER.width
    arrays = {"tokens.weight": next(remaining), "positions": next(remaining)}
    for index in range(DECODER.layers):
        block = f"blocks.{index}"
        norm(f"{block}.attention_norm")
        # Of query, key and value, one after another; Keras has an axis of the heads.
        kernels = []
        biases = []
        for _ in range(3):
            kernels.append(next(remaining).reshape(width, width).T)
            biases.append(next(remaining).reshape(width))
        arrays[f"{block}.inputs.weight"] = np.concatenate(kernels)
        arrays[f"{block}.inputs.bias"] = np.concatenate(biases)
        arrays[f"{block}.outputs.weight"] = next(remaining).reshape(width, width).T
        arrays[f"{block}.outputs.bias"] = next(remaining)
        norm(f"{block}.dense_norm")
        dense(f"{block}.dense.0")
        dense(f"{block}.dense.2")
    norm("norm")
    dense("logits")
    return arrays


def _trained_weights(case: Case, texts: Texts) -> list[np.ndarray]:
    """Return the weights after some updates, which begin with the last texts."""
    model = text.build(case)
    update = text.traced_update(
        case, model, keras.optimizers.AdamW(TRAINED_RATE), by_tokens=True
    )
    reverse = texts[::-1]
    for number in range(TRAINED):
        start = number * case.effective % len(texts)
        update(text.ragged_batch(reverse[start : start + case.effective]))
    return model.get_weights()


def _ours(
    case: Case, texts: Texts, weights: Sequence[np.ndarray], by_tokens: bool
) -> Contender:
    model = text.build(case)
    optimizer = keras.optimizers.SGD(1.0)
    update = text.traced_update(case, model, optimizer, by_tokens)
    as_batch = text.ragged_batch if by_tokens else text.padded_batch
    batches = []
    for start in range(0, len(texts), case.effective):
        batches.append(texts[start : start + case.effective])

    updates = []
    for index in _compared(len(batches)):
        model.set_weights(weights)
        update(as_batch(batches[index]))
        updates.append(TextUpdate(batches[index], _change(weights, model)))
    return Contender(updates, [_mean_length(batch) for batch in batches])


def _fit(
    case: Case, micro_batches: Sequence[Texts], weights: Sequence[np.ndarray]
) -> Contender:
    model = text.build(case)
    model.compile(text.fit_optimizer(case, keras.optimizers.SGD, 1.0), text.loss())
    groups = []
    for start in range(0, len(micro_batches), case.factor):
        groups.append(micro_batches[start : start + case.factor])
    batches = [list(itertools.chain.from_iterable(group)) for group in groups]

    updates = []
    for index in _compared(len(groups)):
        model.set_weights(weights)
        model.fit(text.padded_dataset(groups[index]), verbose=0)
        updates.append(TextUpdate(batches[index], _change(weights, model)))
    return Contender(updates, [_mean_length(batch) for batch in batches])


def _in_pytorch(
    loop: str, case: Case, texts: Texts, weights: Sequence[np.ndarray]
) -> Contender:
    with tempfile.TemporaryDirectory() as folder:
        before = Path(folder) / "weights.npz"
        after = Path(folder) / "updates.npz"
        arrays: dict[str, Any] = in_pytorch(weights)
        np.savez(before, **arrays)
        command = [str(PEERS), "-m", "benchmarks.pytorch.text_updates"]
        command += [loop, case.to_json(), str(before), str(after)]
        run(command, variables=SLEEPING)
        with np.load(after) as results:
            changes_by_name = dict(results)

    indices = changes_by_name.pop("texts")  # (updates, effective)
    batches = [[texts[index] for index in row] for row in indices]
    updates = []
    for number in _compared(len(batches)):
        change = {}
        for name, changes in changes_by_name.items():
            change[name] = changes[number]
        updates.append(TextUpdate(batches[number], change))
    return Contender(updates, [_mean_length(batch) for batch in batches])


def _compared(updates: int) -> list[int]:
    """Return which of the updates of an epoch are compared."""
    evenly = np.linspace(0, updates - 1, min(updates, COMPARED))
    return evenly.round().astype(int).tolist()


def _change(before: Sequence[np.ndarray], model: keras.Model) -> Arrays:
    differences = []
    for array, after in zip(before, model.get_weights(), strict=True):
        differences.append(array - after)
    return in_pytorch(differences)


def _mean_length(texts: Texts) -> float:
    return token_count(texts) / len(texts)

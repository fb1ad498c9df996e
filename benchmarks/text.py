"""Texts of unequal length: micro-batches cut by tokens ÷ cut by examples.

Both are `pipeline.accumulation.Update` on the same effective batches, with the model of
`experiment=text`. A cut by examples pads the effective batch to its longest text. The
limit of tokens is what the largest micro-batch of examples has: examples × the longest
text. The third contender is Keras' `fit` on padded batches of a micro-batch each, with
`gradient_accumulation_steps`. Its updates are others: means of micro-batch means.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from benchmarks.figures import Figure, ratios
from benchmarks.turns import alternate
from pipeline.accumulation import Update
from pipeline.components.model import decoder

EFFECTIVE = (32, 128)
FACTORS = (1, 4, 16)
MULTIPLE = 16  # `dataset.pad.multiple` of `experiment=text`
CLASSES = 257
BATCHES = 2  # effective batches that a turn computes
LONGEST = {"help texts": 127, "pieces of 512 bytes": 511, "log-normal": 512}


def measure(rounds: int, names: Sequence[str] = tuple(LONGEST)) -> list[Figure]:
    """Return the speed and the padding of each cut, for each kind of texts."""
    figures: list[Figure] = []
    for name in names:
        texts = _texts(name)
        for effective in EFFECTIVE:
            for factor in FACTORS:
                case = _Case(name, effective, factor)
                figures += _measure_case(case, texts, rounds)
    return figures


@dataclass(frozen=True)
class _Case:
    """What is cut: `effective` texts, into `factor` micro-batches of examples."""

    name: str
    effective: int
    factor: int

    @property
    def micro(self) -> int:
        return -(-self.effective // self.factor)

    @property
    def longest(self) -> int:
        """The padded length of the longest text."""
        return _padded(LONGEST[self.name])

    def __str__(self) -> str:
        return f"{self.name}, batch {self.effective}, factor {self.factor}"


def _texts(name: str) -> list[np.ndarray]:
    """Return texts as arrays of tokens from 1 on, in a random order."""
    random = np.random.default_rng(0)
    if name == "log-normal":
        lengths = random.lognormal(4.0, 1.0, 2000)
        lengths = np.clip(lengths.round(), 1, LONGEST[name]).astype(int)
        return [random.integers(1, CLASSES, length) for length in lengths]
    pieces = list(_pieces_of_help(LONGEST[name] + 1))
    random.shuffle(pieces)
    return pieces


def _pieces_of_help(most: int) -> Iterator[np.ndarray]:
    """Yield the paragraphs of Python's help topics in pieces of at most `most` bytes."""
    from pydoc_data.topics import topics

    for topic in sorted(topics):
        for paragraph in topics[topic].split("\n\n"):
            content = np.frombuffer(paragraph.strip().encode(), np.uint8)
            for start in range(0, len(content), most):
                piece = content[start : start + most]
                if len(piece) > 1:
                    yield piece.astype(np.int32) + 1


def _measure_case(
    case: _Case, texts: list[np.ndarray], rounds: int
) -> Iterator[Figure]:
    batches = []
    for start in range(0, BATCHES * case.effective, case.effective):
        batches.append(texts[start : start + case.effective])
    counted = texts[: BATCHES * case.effective]
    tokens = sum(len(text) - 1 for text in counted)

    by_size = _Updates(case, [_padded_batch(batch) for batch in batches])
    by_tokens = _Updates(case, [_ragged_batch(batch) for batch in batches])
    contenders: dict[str, Callable[[], object]] = {
        "by tokens": by_tokens,
        "by examples": by_size,
        "fit": _fit(case, batches),
    }
    for contender in contenders.values():
        contender()  # traces
    times = alternate(contenders, rounds)
    keras.backend.clear_session()

    positions = 0
    for batch in batches:
        positions += case.effective * _padded(max(map(len, batch)) - 1)
    shares = {
        "by examples": 1 - tokens / positions,
        "by tokens": 1 - tokens / by_tokens.positions,
    }
    for cut, share in shares.items():
        yield Figure("text", str(case), f"padding, {cut}", [share])
    speeds = {cut: [tokens / value for value in times[cut]] for cut in contenders}
    for cut, values in speeds.items():
        yield Figure("text", str(case), f"speed, {cut}", values, unit="tokens/s")
    for other in ("by examples", "fit"):
        best = {cut: max(speeds[cut]) for cut in ("by tokens", other)}
        yield Figure(
            "text",
            str(case),
            f"by tokens ÷ {other}",
            ratios(speeds["by tokens"], speeds[other]),
            best=best,
            best_unit="tokens/s",
        )


class _Updates:
    """Applies each batch once; ragged batches are cut by tokens, others by examples."""

    def __init__(self, case: _Case, batches: Sequence[Any]):
        self._batches = batches
        model = _model(case)
        optimizer = keras.optimizers.AdamW(1e-4)
        optimizer.build(model.trainable_variables)
        limits: dict[str, Any] = {"micro_batch_size": case.micro}
        if isinstance(batches[0][0], tf.RaggedTensor):
            limits = {
                "micro_batch_tokens": case.micro * case.longest,
                "pad_multiple": MULTIPLE,
            }
        update = Update(model, _loss(), optimizer, **limits)
        self._update = tf.function(update, autograph=False, reduce_retracing=True)
        self.positions = 0

    def __call__(self) -> None:
        self.positions = 0
        for batch in self._batches:
            results = self._update(batch)
            self.positions += int(results.get("positions", 0))


def _fit(case: _Case, batches: Sequence[list[np.ndarray]]) -> Callable[[], object]:
    """Return a call of Keras' `fit` on the micro-batches of all batches."""
    micro_batches = []
    for batch in batches:
        for start in range(0, case.effective, case.micro):
            micro_batches.append(_padded_batch(batch[start : start + case.micro]))
    signature = (
        tf.TensorSpec([None, None], tf.int32),
        tf.TensorSpec([None, None], tf.int32),
        tf.TensorSpec([None, None], tf.float32),
    )
    data = tf.data.Dataset.from_generator(
        lambda: iter(micro_batches), output_signature=signature
    )
    model = _model(case)
    accumulates = {}
    if case.factor > 1:
        accumulates["gradient_accumulation_steps"] = case.factor
    model.compile(keras.optimizers.AdamW(1e-4, **accumulates), _loss())
    return lambda: model.fit(data, verbose=0)


def _model(case: _Case) -> keras.Model:
    keras.utils.set_random_seed(0)
    return decoder(classes=CLASSES, length=case.longest)


def _loss() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="mean_with_sample_weight"
    )


def _padded(length: int) -> int:
    return MULTIPLE * -(-length // MULTIPLE)


def _ragged_batch(texts: Sequence[np.ndarray]) -> tuple[Any, Any]:
    x = tf.ragged.constant([text[:-1].tolist() for text in texts], tf.int32)
    y = tf.ragged.constant([text[1:].tolist() for text in texts], tf.int32)
    return x, y


def _padded_batch(texts: Sequence[np.ndarray]) -> tuple[Any, Any, Any]:
    x, y = _ragged_batch(texts)
    shape = [len(texts), _padded(int(x.bounding_shape()[1]))]
    weights = tf.ones_like(y, tf.float32).to_tensor(shape=shape)
    return x.to_tensor(shape=shape), y.to_tensor(shape=shape), weights

"""Texts of unequal length: micro-batches cut by tokens ÷ cut by examples, and ÷ peers.

Both are `pipeline.accumulation.Update` on the same effective batches, with the model of
`experiment=text`. A cut by examples pads the effective batch to its longest text. The
limit of tokens is what the largest micro-batch of examples has: examples × the longest
text. The others accumulate padded batches of a micro-batch each:

- Keras' `fit`, with `gradient_accumulation_steps`, on the same micro-batches of
  examples, each padded to its own longest text; and on batches of similar length, by
  `bucket_by_sequence_length`.
- PyTorch, with a collate function that pads, on the same micro-batches of examples; and
  the Trainer of transformers, which groups by length. They are in `benchmarks.pytorch`.

Their updates are others, see `benchmarks.text_updates`.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any

import keras
import tensorflow as tf

from benchmarks.figures import Figure, ratios
from benchmarks.keras_models import weight_count
from benchmarks.peers import REST
from benchmarks.processes import PEERS, SLEEPING, Process
from benchmarks.texts import (
    CLASSES,
    DECODER,
    LEARNING_RATE,
    LONGEST,
    MULTIPLE,
    PYTORCH,
    TRAINER_BY_LENGTH,
    UPDATES,
    WEIGHT_DECAY,
    Case,
    Texts,
    padded,
    read,
    token_count,
)
from benchmarks.turns import alternate
from pipeline.accumulation import Update
from pipeline.components.model import decoder

BY_TOKENS = "by tokens"
BY_EXAMPLES = "by examples"
FIT = "fit"
FIT_BY_LENGTH = "fit, by length"
BUCKETS = 8  # of `bucket_by_sequence_length`, up to the longest text

# Cases of the largest effective batch. At factor 1, its long texts as one micro-batch
# would take tens of GiB.
LARGEST = 512
LARGEST_CASES = (
    ("help texts", 16),
    ("pieces of 512 bytes", 4),
    ("pieces of 512 bytes", 16),
    ("log-normal", 4),
    ("log-normal", 16),
)

Turn = Callable[[], int]  # returns the tokens that it has computed


def all_cases() -> list[Case]:
    """Return the cases of `make bench`; the peers take turns in those that are cut most."""
    cases = []
    for name, effective, factor in itertools.product(LONGEST, (32, 128), (1, 4, 16)):
        with_peers = effective == 128 and factor == 16
        cases.append(Case(name, effective, factor, with_peers))
    for name, factor in LARGEST_CASES:
        cases.append(Case(name, LARGEST, factor))
    return cases


def measure(case: Case, rounds: int) -> Iterator[Figure]:
    """Yield the padding and the speed of each cut, and ours ÷ those of the others."""
    texts = read(case)
    batches = []
    for start in range(0, UPDATES * case.effective, case.effective):
        batches.append(texts[start : start + case.effective])
    tokens = token_count(texts[: UPDATES * case.effective])

    by_tokens = _Updates(case, batches, by_tokens=True)
    micro_batches = micro_batches_of(case, texts[: UPDATES * case.effective])
    turns: dict[str, Turn] = {
        BY_TOKENS: by_tokens,
        BY_EXAMPLES: _Updates(case, batches, by_tokens=False),
        FIT: _fit_turn(case, micro_batches),
    }
    with ExitStack() as processes:
        if case.with_peers:
            turns[FIT_BY_LENGTH] = _fit_turn(case, grouped_by_length(case, texts))
            for loop in _loops():
                process = _process(loop, case)
                turns[loop] = processes.enter_context(closing(process))
        speeds = _speeds(turns, rounds)
    keras.backend.clear_session()

    positions = 0
    for batch in batches:
        positions += case.effective * padded(max(map(len, batch)) - 1)
    shares = {
        BY_EXAMPLES: 1 - tokens / positions,
        BY_TOKENS: 1 - tokens / by_tokens.positions,
    }
    for cut, share in shares.items():
        yield Figure("text", str(case), f"padding, {cut}", [share])
    for contender, values in speeds.items():
        yield Figure("text", str(case), f"speed, {contender}", values, unit="tokens/s")
    for contender, values in speeds.items():
        if contender == BY_TOKENS:
            continue
        yield Figure(
            "text",
            str(case),
            f"by tokens ÷ {contender}",
            ratios(speeds[BY_TOKENS], values),
            best={who: max(speeds[who]) for who in (BY_TOKENS, contender)},
            best_unit="tokens/s",
        )


def _speeds(turns: Mapping[str, Turn], rounds: int) -> dict[str, list[float]]:
    """Return the tokens/s of every contender in every round."""
    tokens: dict[str, list[int]] = {name: [] for name in turns}

    def counted(name: str) -> Callable[[], None]:
        def turn() -> None:
            tokens[name].append(turns[name]())

        return turn

    contenders = {name: counted(name) for name in turns}
    alternate(contenders, 1)  # traces
    for counts in tokens.values():
        counts.clear()
    times = alternate(contenders, rounds, REST)
    return {name: ratios(tokens[name], times[name]) for name in turns}


class _Updates:
    """Applies our update to each effective batch once."""

    def __init__(self, case: Case, batches: Sequence[Texts], by_tokens: bool):
        self._tokens = sum(map(token_count, batches))
        as_batch = ragged_batch if by_tokens else padded_batch
        self._batches = [as_batch(batch) for batch in batches]
        optimizer = keras.optimizers.AdamW(LEARNING_RATE, WEIGHT_DECAY)
        self._update = traced_update(case, build(case), optimizer, by_tokens)
        self.positions = 0

    def __call__(self) -> int:
        self.positions = 0
        for batch in self._batches:
            results = self._update(batch)
            self.positions += int(results.get("positions", 0))
        return self._tokens


def traced_update(
    case: Case,
    model: keras.Model,
    optimizer: keras.optimizers.Optimizer,
    by_tokens: bool,
) -> Callable[[Any], Any]:
    """Return our update; it takes ragged batches if it is cut by tokens."""
    optimizer.build(model.trainable_variables)
    limits: dict[str, Any] = {"micro_batch_size": case.micro}
    if by_tokens:
        limits = {
            "micro_batch_tokens": case.micro * case.longest,
            "pad_multiple": MULTIPLE,
        }
    update = Update(model, loss(), optimizer, **limits)
    return tf.function(update, autograph=False, reduce_retracing=True)


def _fit_turn(case: Case, micro_batches: Sequence[Texts]) -> Turn:
    """Return turns of `fit` on micro-batches, one after another and again from first.

    A turn has as many micro-batches as `UPDATES` updates.
    """
    model = build(case)
    optimizer = fit_optimizer(
        case, keras.optimizers.AdamW, LEARNING_RATE, weight_decay=WEIGHT_DECAY
    )
    model.compile(optimizer, loss())

    size = UPDATES * case.factor
    parts = []
    for start in range(0, len(micro_batches) - size + 1, size):
        part = micro_batches[start : start + size]
        tokens = sum(map(token_count, part))
        parts.append((padded_dataset(part), tokens))
    endless = itertools.cycle(parts)

    def turn() -> int:
        data, tokens = next(endless)
        model.fit(data, verbose=0)
        return tokens

    return turn


def fit_optimizer(
    case: Case, optimizer: type[keras.optimizers.Optimizer], *rate: float, **more: float
) -> keras.optimizers.Optimizer:
    """Return an optimizer that accumulates; Keras rejects a factor of 1."""
    if case.factor == 1:
        return optimizer(*rate, **more)
    return optimizer(*rate, **more, gradient_accumulation_steps=case.factor)


def micro_batches_of(case: Case, texts: Texts) -> list[Texts]:
    """Return texts in micro-batches of examples, in their order."""
    starts = range(0, len(texts), case.micro)
    return [texts[start : start + case.micro] for start in starts]


def grouped_by_length(case: Case, texts: Texts) -> list[Texts]:
    """Return as many micro-batches of `bucket_by_sequence_length` as an epoch has.

    The texts are shuffled and repeated before, so that every micro-batch is full.
    """
    lengths = tf.constant([len(text) for text in texts])
    width = case.longest // BUCKETS
    boundaries = list(range(width, case.longest, width))
    indices = tf.data.Dataset.range(len(texts)).shuffle(len(texts), seed=0).repeat()
    grouped = indices.bucket_by_sequence_length(
        lambda index: lengths[index],
        boundaries,
        [case.micro] * BUCKETS,
    )
    micro_batches: list[Texts] = []
    for batch in grouped.take(len(texts) // case.micro).as_numpy_iterator():
        micro_batches.append([texts[index] for index in batch])
    return micro_batches


def padded_dataset(micro_batches: Sequence[Texts]) -> tf.data.Dataset:
    """Return micro-batches, each padded to its longest text, as `fit` takes them."""
    batches = [padded_batch(batch) for batch in micro_batches]
    signature = (
        tf.TensorSpec([None, None], tf.int32),
        tf.TensorSpec([None, None], tf.int32),
        tf.TensorSpec([None, None], tf.float32),
    )
    data = tf.data.Dataset.from_generator(
        lambda: iter(batches), output_signature=signature
    )
    # Where the end is not known before, `fit` counts once more there.
    return data.apply(tf.data.experimental.assert_cardinality(len(batches)))


def build(case: Case) -> keras.Model:
    """Build the model of `experiment=text`, always with the same weights."""
    keras.utils.set_random_seed(0)
    return decoder(
        classes=CLASSES,
        length=case.longest,
        width=DECODER.width,
        blocks=DECODER.layers,
        heads=DECODER.heads,
    )


def loss() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="mean_with_sample_weight"
    )


def ragged_batch(texts: Texts) -> tuple[Any, Any]:
    """Return inputs and labels."""
    x = tf.ragged.constant([text[:-1].tolist() for text in texts], tf.int32)
    y = tf.ragged.constant([text[1:].tolist() for text in texts], tf.int32)
    return x, y


def padded_batch(texts: Texts, length: int | None = None) -> tuple[Any, Any, Any]:
    """Return inputs, labels and the weights of positions.

    They are padded to `length`; by default, to the longest text.
    """
    x, y = ragged_batch(texts)
    if length is None:
        length = padded(int(x.bounding_shape()[1]))
    shape = [len(texts), length]
    weights = tf.ones_like(y, tf.float32).to_tensor(shape=shape)
    return x.to_tensor(shape=shape), y.to_tensor(shape=shape), weights


def _loops() -> Sequence[str]:
    """Return the loops in PyTorch that take turns."""
    if PEERS.exists():
        return PYTORCH, TRAINER_BY_LENGTH
    return ()


def _process(loop: str, case: Case) -> Process:
    threads = len(os.sched_getaffinity(0))  # as TensorFlow has
    command = [str(PEERS), "-m", "benchmarks.pytorch.texts"]
    command += [loop, case.to_json(), str(threads)]
    process = Process(command, UPDATES, SLEEPING)

    theirs = process.facts["weights"]
    ours = weight_count(build(case))
    if theirs != ours:
        process.close()
        raise RuntimeError(f"the decoder has {theirs} weights in PyTorch, not {ours}")
    return process

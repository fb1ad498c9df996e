"""Texts of unequal length, and how they are cut; imports neither TensorFlow nor PyTorch.

A text is an array of tokens from 1 on. The model gets all but the last one, and
predicts all but the first one.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.workloads import Transformer

MULTIPLE = 16  # `dataset.pad.multiple` of `experiment=text`
CLASSES = 257
LONGEST = {"help texts": 127, "pieces of 512 bytes": 511, "log-normal": 512}
DECODER = Transformer(layers=2, width=64, heads=4)  # as in `experiment=text`
LEARNING_RATE = 1e-4  # of AdamW
WEIGHT_DECAY = 0.004

# Loops in PyTorch, and the updates of a turn.
PYTORCH = "PyTorch"
TRAINER_BY_LENGTH = "Trainer, by length"
TRAINER_OWN_MEAN = "Trainer, by length, own mean"
UPDATES = 2

Texts = Sequence[np.ndarray]


@dataclass(frozen=True)
class Case:
    """What is cut: `effective` texts, into `factor` micro-batches of examples.

    Attributes:
        name: one of `LONGEST`.
        effective: texts of an effective batch.
        factor: micro-batches of an effective batch that is cut by examples.
        with_peers: it is also measured with the loops of other libraries.
        limit: the number of texts in an epoch, at most; None for all.
    """

    name: str
    effective: int
    factor: int
    with_peers: bool = False
    limit: int | None = None

    @property
    def micro(self) -> int:
        return -(-self.effective // self.factor)

    @property
    def longest(self) -> int:
        """The padded length of the longest text."""
        return padded(LONGEST[self.name])

    def __str__(self) -> str:
        return f"{self.name}, batch {self.effective}, factor {self.factor}"

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Case:
        return cls(**json.loads(text))


def padded(length: int) -> int:
    """Return a length rounded up to a multiple of `MULTIPLE`."""
    return MULTIPLE * -(-length // MULTIPLE)


def token_count(texts: Texts) -> int:
    """Return how many tokens are predicted."""
    return sum(len(text) - 1 for text in texts)


def read(case: Case) -> list[np.ndarray]:
    """Return the texts of a case in a random order, as whole effective batches."""
    random = np.random.default_rng(0)
    if case.name == "log-normal":
        lengths = random.lognormal(4.0, 1.0, 2000)
        lengths = np.clip(lengths.round(), 1, LONGEST[case.name]).astype(int)
        texts = [_random_text(random, length) for length in lengths]
    else:
        texts = list(_pieces_of_help(LONGEST[case.name] + 1))
        random.shuffle(texts)
    texts = texts[: case.limit]
    return texts[: len(texts) // case.effective * case.effective]


def _random_text(random: np.random.Generator, length: int) -> np.ndarray:
    return random.integers(1, CLASSES, length + 1, dtype=np.int32)


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

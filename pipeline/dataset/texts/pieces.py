"""Cuts tokenized texts into pieces, counts them, and makes examples of them.

A piece of n + 1 tokens is one example: n inputs, and as labels the tokens that follow
them. The next piece of a text begins with the last token of the previous piece, so that
every token of a text but the first is a label exactly once.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from pipeline.common.errors import ConfigError, count
from pipeline.dataset.texts.corpus import ALL, TextSplit
from pipeline.dataset.texts.tokenizer import Tokenizer

# Number of pieces after which a chunk ends. One call of Python, or one record of a
# file, per piece would take several times as long.
_PIECES_PER_CHUNK = 256
_GROUPS_AT_ONCE = 16  # number of groups to interleave if their order is shuffled


class Chunk(NamedTuple):
    """The pieces of some texts that follow each other.

    Attributes:
        tokens: the tokens of all pieces, one piece after the other.
        lengths: number of tokens in each piece.
        texts: number of texts.
        short: number of texts of fewer than two tokens, which give no piece.
    """

    tokens: np.ndarray
    lengths: Sequence[int]
    texts: int
    short: int


@dataclass(frozen=True)
class GroupCounts:
    """The numbers of texts and pieces in a group of texts.

    Attributes:
        texts, short: see `Chunk`.
        pieces: number of pieces.
    """

    texts: int
    short: int
    pieces: int


@dataclass(frozen=True)
class SplitTokens:
    """The tokens of a split, and where to read them.

    Attributes:
        chunks_of_group: a function from the number of a group, scalar of int64, to a
            dataset with the tokens, int32, and the lengths, int64, of its chunks.
        counts: the counts of each group.
        files: the files with the tokens, one per group; empty without a cache.
    """

    chunks_of_group: Callable[[tf.Tensor], tf.data.Dataset]
    counts: Sequence[GroupCounts]
    files: Sequence[Path] = ()


@dataclass(frozen=True)
class TokenizedSplit:
    """A split of texts, and how they are tokenized and cut.

    Attributes:
        split: the texts.
        tokenizer: the tokenizer.
        longest: maximum number of inputs of a piece.
    """

    split: TextSplit
    tokenizer: Tokenizer
    longest: int

    def chunks(self, group: int) -> Iterator[Chunk]:
        """Yield the pieces of a group of texts.

        Raises:
            ConfigError: the texts cannot be read or tokenized.
        """
        pieces: list[np.ndarray] = []
        texts = 0
        short = 0
        for text in self.split.texts(group):
            tokens = self.tokenizer.tokens(text)
            texts += 1
            if len(tokens) < 2:
                short += 1
            for start in range(0, len(tokens) - 1, self.longest):
                pieces.append(tokens[start : start + self.longest + 1])
            if len(pieces) >= _PIECES_PER_CHUNK:
                yield _joined(pieces, texts, short)
                pieces = []
                texts = 0
                short = 0
        yield _joined(pieces, texts, short)

    def count(
        self, group: int, write: Callable[[Chunk], None] | None = None
    ) -> GroupCounts:
        """Count the texts and the pieces of a group, and call `write` for each chunk.

        Raises:
            ConfigError: the texts cannot be read or tokenized.
        """
        texts = 0
        short = 0
        pieces = 0
        for chunk in self.chunks(group):
            texts += chunk.texts
            short += chunk.short
            pieces += len(chunk.lengths)
            if write is not None:
                write(chunk)
        return GroupCounts(texts, short, pieces)

    def check(self, counts: Sequence[GroupCounts]) -> None:
        """Raise a `ConfigError` if the split has no piece."""
        if any(group.pieces for group in counts):
            return
        rule = (
            "must select a text of two tokens or more, since shorter ones leave "
            "nothing to predict"
        )
        if self.split.shares.end < ALL.end:
            rule += ": change the share, or name files for it"
        texts = sum(group.texts for group in counts)
        received = "no text"
        if texts:
            received = count(texts, "shorter text")
        raise ConfigError(self.split.key, rule, received)

    def in_pipeline(self) -> SplitTokens:
        """Return the tokens of the split, which is tokenized anew in each pass.

        The texts are also tokenized now, since the number of examples must be known.

        Raises:
            ConfigError: the texts cannot be read or tokenized, or there is no piece.
        """
        counts = [self.count(group) for group in range(len(self.split.groups))]
        self.check(counts)

        def chunks(number: np.ndarray) -> Iterator[tuple[np.ndarray, Sequence[int]]]:
            for chunk in self.chunks(int(number)):
                yield chunk.tokens, chunk.lengths

        def chunks_of_group(group: tf.Tensor) -> tf.data.Dataset:
            form = (tf.TensorSpec([None], tf.int32), tf.TensorSpec([None], tf.int64))
            return tf.data.Dataset.from_generator(
                chunks, args=(group,), output_signature=form
            )

        return SplitTokens(chunks_of_group, counts)


class Examples(NamedTuple):
    """The examples of a split, each a pair of inputs and labels.

    Attributes:
        in_order: the examples in the order of the groups.
        by_seed: a function from a seed, scalar of int64, to the examples with the
            groups in an order that depends on the seed.
    """

    in_order: tf.data.Dataset
    by_seed: Callable[[tf.Tensor], tf.data.Dataset]


def examples_of(split: SplitTokens) -> Examples:
    """Return the examples of a split."""
    groups = len(split.counts)
    numbers = tf.data.Dataset.range(groups)

    def pieces_of_group(group: tf.Tensor) -> tf.data.Dataset:
        return split.chunks_of_group(group).flat_map(_pieces)

    def by_seed(seed: tf.Tensor) -> tf.data.Dataset:
        shuffled = numbers.shuffle(groups, seed=seed, reshuffle_each_iteration=False)
        pieces = shuffled.interleave(
            pieces_of_group,
            _GROUPS_AT_ONCE,
            num_parallel_calls=tf.data.AUTOTUNE,
            deterministic=True,
        )
        return pieces.map(_example)

    in_order = numbers.flat_map(pieces_of_group).map(_example)
    pieces = sum(group.pieces for group in split.counts)
    known = tf.data.experimental.assert_cardinality(pieces)
    return Examples(in_order.apply(known), by_seed)


def _joined(pieces: Sequence[np.ndarray], texts: int, short: int) -> Chunk:
    tokens = np.concatenate([np.zeros(0, np.int64), *pieces])
    return Chunk(tokens, [len(piece) for piece in pieces], texts, short)


@tf.autograph.experimental.do_not_convert
def _pieces(tokens: tf.Tensor, lengths: tf.Tensor) -> tf.data.Dataset:
    """Return the pieces of a chunk."""
    pieces = tf.RaggedTensor.from_row_lengths(tokens, lengths)
    return tf.data.Dataset.from_tensor_slices(pieces)


@tf.autograph.experimental.do_not_convert
def _example(piece: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return a piece's inputs and labels. Token t becomes t + 1, since 0 is padding."""
    shifted = piece + 1
    return shifted[:-1], shifted[1:]

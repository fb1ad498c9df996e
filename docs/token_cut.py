"""python -m docs.token_cut: draw how an effective batch is cut by tokens.

It draws the lengths of 32 pieces of Python's help texts, with the padding of a cut into
micro-batches of eight examples and of a cut by tokens. It writes docs/token_cut.png in
a few seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import tensorflow as tf

from pipeline.accumulation.token_cut import TokenLimit, cut_by_tokens

EFFECTIVE = 32
MICRO = 8
MOST = 512  # bytes of a piece


def main() -> None:
    lengths = np.array(_lengths())
    longest = int(lengths.max())
    limit = MICRO * longest
    by_size = list(range(MICRO, EFFECTIVE + 1, MICRO))

    ragged = tf.RaggedTensor.from_row_lengths(tf.range(lengths.sum()), lengths)
    cut = cut_by_tokens(ragged, TokenLimit(limit))
    sorted_lengths = lengths[cut.order.numpy()]
    by_tokens = cut.ends.numpy().tolist()
    _draw(lengths, by_size, sorted_lengths, by_tokens)

    tokens = int(lengths.sum())
    print(f"{tokens} tokens, at most {limit} positions a micro-batch")
    print(
        f"  by examples: {EFFECTIVE * longest} positions, {len(by_size)} micro-batches"
    )
    print(
        f"  by tokens: {int(cut.counts.positions)} positions, "
        f"{len(by_tokens)} micro-batches"
    )


def _lengths() -> list[int]:
    """Return the lengths of pieces of Python's help topics, in a random order."""
    from pydoc_data.topics import topics

    lengths = []
    for topic in sorted(topics):
        for paragraph in topics[topic].split("\n\n"):
            size = len(paragraph.strip().encode())
            for start in range(0, size, MOST):
                lengths.append(min(MOST, size - start))
    random = np.random.default_rng(0)
    return random.choice(lengths, EFFECTIVE, replace=False).tolist()


def _draw(
    lengths: Any,
    by_size: Sequence[int],
    sorted_lengths: Any,
    by_tokens: Sequence[int],
) -> None:
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(10, 3.6), layout="constrained", sharey=True
    )
    # A cut by examples pads the effective batch to its longest example.
    longest = [int(lengths.max())] * len(by_size)
    _draw_cut(left, lengths, by_size, longest)
    longest = []
    start = 0
    for end in by_tokens:
        longest.append(int(sorted_lengths[start:end].max()))
        start = end
    _draw_cut(right, sorted_lengths, by_tokens, longest)

    left.set(
        ylabel="tokens",
        title=f"micro-batches of {MICRO} examples",
        xlabel="examples in the order of the data",
    )
    right.set(
        title="cut by tokens, as many as these have",
        xlabel="examples sorted by length",
    )
    right.legend(loc="upper right")
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=110)


def _draw_cut(
    axes: Any, lengths: Any, ends: Sequence[int], longest: Sequence[int]
) -> None:
    """Draw the examples, and behind them each micro-batch with its padding."""
    start = 0
    for end, length in zip(ends, longest, strict=True):
        label = "padding" if start == 0 else None
        axes.bar(
            (start + end) / 2 - 0.5,
            length,
            width=end - start - 0.15,
            color="#f4b8b8",
            label=label,
        )
        start = end
    axes.bar(range(len(lengths)), lengths, width=0.7, color="#1f77b4", label="tokens")
    axes.set(xlim=(-0.6, len(lengths) - 0.4))


if __name__ == "__main__":
    main()

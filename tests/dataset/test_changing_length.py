"""`dataset.batched`: a loader whose epochs differ in their number of batches."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from pipeline.dataset.stream import Loader, Stream

LENGTHS = (5, 3, 6, 1)
FACTOR = 2


class Changing(keras.utils.PyDataset):
    """Each value is the epoch and the index of its batch."""

    def __init__(self, lengths=LENGTHS):
        super().__init__()
        self.lengths = lengths
        self.epoch = 0

    def __len__(self):
        return self.lengths[min(self.epoch, len(self.lengths) - 1)]

    def __getitem__(self, index):
        if index >= len(self):
            raise IndexError(index)
        return np.full((1, 1), 10.0 * self.epoch + index), np.zeros(1)

    def on_epoch_end(self):
        self.epoch += 1


def expected_batches():
    for epoch, length in enumerate(LENGTHS):
        for index in range(length):
            yield 10.0 * epoch + index


def test_each_batch_is_trained_on_once_and_a_line_says_that_the_length_changes(capsys):
    stream = Stream(Loader(Changing(), "train"), FACTOR)
    updates = sum(-(-length // FACTOR) for length in LENGTHS)
    values = []
    for batches in stream.batches(0).take(updates):
        values += np.ravel(batches.batch[0]).tolist()
    assert values == list(expected_batches())
    lines = capsys.readouterr().err
    line = "the train split has 3 batches in this epoch, and had 5 at first: a schedule"
    assert lines.count(" at first: ") == lines.count(line) == 1

    # The place in the run is that of the epochs as they are, also after a resume.
    ends = [window.epoch for window in stream.windows if window.last]
    assert ends[: len(LENGTHS)] == list(range(len(LENGTHS)))
    resumed = Stream(Loader(Changing(), "train"), FACTOR)
    for batches in resumed.batches(4).take(1):
        assert np.ravel(batches.batch[0]).tolist() == [12.0]


@pytest.mark.parametrize("lengths", [(4, 4, 4), (2, 3, 1)])
@pytest.mark.parametrize("kind", ["pydataset", "generator"])
def test_an_evaluation_split_whose_length_changes_is_named(lengths, kind, capsys):
    source = Changing(lengths)

    def batches():
        for index in range(len(source)):
            yield source[index]
        source.on_epoch_end()

    if kind == "generator":
        loader = Loader(batches, "validation")
    else:
        loader = Loader(source, "validation")
    counts = [len(list(loader.epoch())) for _ in lengths]
    assert tuple(counts) == lengths
    lines = capsys.readouterr().err
    line = "the validation split has 3 batches in this epoch, and had 2 at first: its evaluations"
    changes = len(set(lengths)) > 1
    assert lines.count(line) == lines.count("at first") == int(changes)


def test_a_generator_may_leave_the_length_open(capsys):
    source = Changing()

    def batches():
        for index in range(len(source)):
            yield source[index]
        source.on_epoch_end()

    loader = Loader(batches, "train")
    assert [len(list(loader.epoch())) for _ in LENGTHS] == list(LENGTHS)
    assert "at first" not in capsys.readouterr().err

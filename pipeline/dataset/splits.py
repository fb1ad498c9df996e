"""The splits of a dataset, example by example."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import tensorflow as tf

from pipeline.dataset.stream import Loader


class Shard(NamedTuple):
    """The part of a file that belongs to a split: `examples` of them, from number `first` on."""

    path: Path
    first: int
    examples: int


@dataclass(frozen=True)
class Stored:
    """The stored records that a split is made from, each one tensor."""

    split: tf.data.Dataset  # the examples that they make; a split that replaces it in a `Data` is not made from them
    records: tf.data.Dataset  # in the order of the split
    make: Callable[
        [tf.Tensor], tuple
    ]  # one record → its example, a tuple as in the split
    # A seed, scalar of int64 → the records with their files in an order that follows from it; None if not in files.
    shuffled: Callable[[tf.Tensor], tf.data.Dataset] | None = None


@dataclass(frozen=True)
class Data:
    """The splits of a dataset, example by example, in a fixed order.

    Attributes:
        train, validation, test: elements are `(x, y)`, `(x, y, sample_weight)` or, without labels, `(x,)` of one
            example; each is a tensor or a nest of tensors without a batch axis. The number of examples is known.
        classes: number of labels, where the labels are classes.
        name, version: of the dataset.
        files: that the examples are read from, where they are prepared files.
        shards: of the splits, by their names, in the order in which they are read.
        shuffled: a seed, scalar of int64 → the training split with its files in an order that follows from the seed;
            None where it is not read from files, or they are in `stored`.
        stored: the records that splits are made from, by their names: streamed examples are made after shuffling, and
            each of several workers makes its share alone.
        loaders: with `dataset.batched`, what the batches of the splits come from; a split has the first batch alone.
    """

    train: tf.data.Dataset
    validation: tf.data.Dataset | None
    classes: int | None = None
    name: str = "custom"
    version: str = ""
    files: tuple[Path, ...] = ()
    shards: Mapping[str, Sequence[Shard]] = field(default_factory=dict)
    test: tf.data.Dataset | None = None
    shuffled: Callable[[tf.Tensor], tf.data.Dataset] | None = None
    stored: Mapping[str, Stored] = field(default_factory=dict)
    loaders: Mapping[str, Loader] = field(default_factory=dict)

    @property
    def splits(self) -> dict[str, tf.data.Dataset]:
        """The splits that are not None, by their names."""
        found = {"train": self.train, "validation": self.validation, "test": self.test}
        return {name: split for name, split in found.items() if split is not None}

    def count(self, name: str) -> int | None:
        """Return the number of examples of a split; None if only reading it shows that."""
        return None if name in self.loaders else int(self.splits[name].cardinality())

    def made_of(self, name: str) -> Stored | None:
        """Return the records that a split is made from; None where they are not known."""
        found = self.stored.get(name)
        return (
            None if found is None or found.split is not self.splits.get(name) else found
        )

    @property
    def input_shape(self) -> tuple[int | None, ...] | None:
        """Shape of one example's input; None where the input is a nest."""
        spec = self.train.element_spec[0]
        return tuple(spec.shape) if isinstance(spec, tf.TypeSpec) else None

    @property
    def examples(self) -> int:
        """Examples in the training split."""
        return int(self.train.cardinality())

"""Defines `Data`, the splits of a dataset, and the parts of it."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf

from pipeline.dataset.stream import Loader


class Shard(NamedTuple):
    """Consecutive examples in a file that are part of a split.

    Attributes:
        path: the file.
        first: index of the first of these examples in the file.
        examples: number of these examples.
    """

    path: Path
    first: int
    examples: int


@dataclass(frozen=True)
class Stored:
    """The stored records from which a split is made. Each record is one tensor.

    Attributes:
        split: the examples that are made from the records. The records are used only if
            a `Data` has this same object as its split.
        records: the records in the order of the split.
        make: a function from a record to an example, as in the split.
        shuffled: a function from a seed, a scalar of int64, to the records, read from
            files in an order that depends on the seed. None if the order of the files
            cannot be shuffled.
    """

    split: tf.data.Dataset
    records: tf.data.Dataset
    make: Callable[[tf.Tensor], tuple]
    shuffled: Callable[[tf.Tensor], tf.data.Dataset] | None = None


@dataclass(frozen=True)
class ValidationSplit:
    """A split of `dataset.validations`, with the dataset that it is from.

    Attributes:
        split: the examples.
        name, version, files: those of the dataset, see `Data`.
    """

    split: tf.data.Dataset
    name: str
    version: str
    files: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Data:
    """The splits of a dataset, example by example, in a fixed order.

    Attributes:
        train, validation, test: elements are `(x, y)`, `(x, y, sample_weight)` or,
            without labels, `(x,)` of one example; each part is a tensor or a nest of
            tensors without a batch axis. The number of examples is known.
        classes: number of classes, or None if it is unknown or labels are not classes.
        name, version: name and version of the dataset.
        files: prepared files from which the examples are read, if there are any.
        shards: the parts of files that make each split, by the split's name, in the
            order in which they are read.
        shuffled: a function from a seed, a scalar of int64, to the training split, read
            from files in an order that depends on the seed. None if the order cannot be
            shuffled, or if `stored` has the records.
        stored: the records from which splits are made, by the split's name. With stored
            records, streamed examples are made after shuffling, and each of several
            workers makes only the examples of its share.
        loaders: with `dataset.batched`, the loader of each split, by the split's name.
            The split itself then has only the examples of the first batch.
        decode: a function from the tokens of one example, an array of integers, to its
            text, for `tracking.show`. None if the inputs are not tokens.
        notes: a line for the user about a split, by the split's name.
        unbatched: names of splits whose elements are known to be single examples, even
            if all of them have the same length and so look like batches.
        validations: the splits of `dataset.validations`, by the split's name, such as
            `validations.late`. `load` sets them.
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
    decode: Callable[[Any], str] | None = None
    notes: Mapping[str, str] = field(default_factory=dict)
    unbatched: Collection[str] = ()
    validations: Mapping[str, ValidationSplit] = field(default_factory=dict)

    @property
    def splits(self) -> dict[str, tf.data.Dataset]:
        """The splits that are not None, by their names."""
        splits = {"train": self.train, "validation": self.validation, "test": self.test}
        for name, validation in self.validations.items():
            splits[name] = validation.split
        return {name: split for name, split in splits.items() if split is not None}

    def with_splits(self, splits: Mapping[str, tf.data.Dataset]) -> "Data":
        """Return the data with these splits in place of those of the same names."""
        own: dict[str, Any] = {}
        validations = dict(self.validations)
        for name, split in splits.items():
            if name in validations:
                validations[name] = replace(validations[name], split=split)
            else:
                own[name] = split
        return replace(self, **own, validations=validations)

    @property
    def all_files(self) -> tuple[Path, ...]:
        """The prepared files of all splits, each file once."""
        files = dict.fromkeys(self.files)
        for validation in self.validations.values():
            files |= dict.fromkeys(validation.files)
        return tuple(files)

    def files_of(self, name: str) -> tuple[Path, ...]:
        """Return the prepared files of the dataset that a split is from."""
        if name in self.validations:
            return self.validations[name].files
        return self.files

    def count(self, name: str) -> int | None:
        """Return the number of examples in a split, or None if it has a loader."""
        if name in self.loaders:
            return None
        return int(self.splits[name].cardinality())

    def made_of(self, name: str) -> Stored | None:
        """Return the records from which a split is made, or None if unknown."""
        stored = self.stored.get(name)
        if stored is None or stored.split is not self.splits.get(name):
            return None
        return stored

    @property
    def input_shape(self) -> tuple[int | None, ...] | None:
        """The shape of the input of one example, or None if it is a nest."""
        spec = self.train.element_spec[0]
        if not isinstance(spec, tf.TypeSpec):
            return None
        return tuple(spec.shape)

    @property
    def examples(self) -> int:
        """The number of examples in the training split."""
        return int(self.train.cardinality())

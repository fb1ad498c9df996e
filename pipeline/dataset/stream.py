"""Makes effective batches from the batches of a user's own loader.

    loader ─► epoch after epoch, K batches at a time
           ─► concatenated on the host, with their sizes ─► one update

The loader is iterated once per epoch, in one thread, as in a plain training loop. An
epoch ends where the loader ends. The state of the loader is not saved, so a resumed run
reads the loader again from its first epoch on. For each update, the sizes and a
checksum of its batches are recorded.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from pipeline.accumulation.internals import Batches, examples_in, parts_of
from pipeline.common.errors import ConfigError, DataError, described, say
from pipeline.config.plan import ENDLESS, Window
from pipeline.dataset.elements import TARGET, is_none, parts_of_element
from pipeline.dataset.search_time import SearchTime
from pipeline.dataset.source import compatible


class Loader:
    """Reads the batches of a split from a user's source.

    The source is a `tf.data.Dataset`, a `keras.utils.PyDataset` or a generator
    function.

    Attributes:
        first: the first batch of the first epoch.
        spec: the spec of a batch.
        count: number of batches per epoch, or None if it is unknown before reading.
        endless: whether the source states that an epoch does not end.

    Raises:
        ConfigError: the source has no batch, or a split other than `train` has no end.
    """

    def __init__(self, source: Any, split: str):
        self._source = source
        self._split = split
        self._count_at_first: int | None = None
        self._warned = False

        # Read the first batch now, as it shows the form of all batches. `epoch` later
        # returns it with the rest of the first epoch.
        self._begun_epoch: Iterator[tuple] | None = None
        self.spec: Any = None  # before the first batch is read
        epoch = self.epoch()
        first = next(epoch, None)
        if first is None:
            rule = f"must yield at least one batch in its {split} split"
            raise ConfigError(TARGET, rule, 0)
        self.first = first
        self._begun_epoch = epoch

        self.spec = _spec_of_batches(source, first, split)
        count = _batches_in_epoch(source)
        self.count = None
        if count is not None and count >= 0:
            self.count = count
        if isinstance(source, keras.utils.PyDataset):
            self.endless = count is None
        else:
            self.endless = count == tf.data.INFINITE_CARDINALITY
        if self.endless and split != "train":
            raise ConfigError(TARGET, f"must return a {split} split that ends")
        self._count_at_first = self.count

    def epoch(self) -> Iterator[tuple]:
        """Return the batches of the next epoch."""
        if self._begun_epoch is not None:
            rest = self._begun_epoch
            self._begun_epoch = None
            return itertools.chain([self.first], rest)

        source = self._source
        with tf.device("CPU:0"):
            if isinstance(source, keras.utils.PyDataset):
                batches = _batches_of(source)
            elif callable(source):
                batches = source()
            else:
                batches = source
            return self._read(iter(batches))

    def _read(self, batches: Iterator[Any]) -> Iterator[tuple]:
        """Yield the checked batches of an epoch.

        Raises:
            DataError: a batch cannot be read. The error gives its number and, if the
                source has `file_paths`, the first file that is not an image.
            ConfigError: a batch has a wrong form; see `_checked`.
        """
        for number in itertools.count():
            try:
                batch = next(batches)
            except StopIteration:
                self._warn_if_changed(number)
                return
            except Exception as error:
                place = f"batch {number} of the {self._split} split, counted from 0"
                # Python's errors name their cause; TensorFlow's do not name the file.
                if isinstance(error, tf.errors.OpError):
                    file = _unreadable_image(getattr(self._source, "file_paths", ()))
                    if file:
                        place += f", with {file}"
                raise DataError(f"{place}: {described(error)}") from error
            yield self._checked(batch)

    def _warn_if_changed(self, count: int) -> None:
        """Print a line, once, if the number of batches is not that of the first epoch.

        If the number of batches of the training split was unknown at the start, it is
        not compared.
        """
        if self._count_at_first is None and self._split != "train":
            self._count_at_first = count
        if self._warned or self._count_at_first in (None, count):
            return
        effect = "its evaluations do not use the same examples"
        if self._split == "train":
            effect = (
                "a schedule that depends on the horizon still follows the planned "
                "number of updates"
            )
        say(
            f"the {self._split} split has {count} batches in this epoch, and had "
            f"{self._count_at_first} at first: {effect}"
        )
        self._warned = True

    def examples(self) -> tf.data.Dataset:
        """Return the examples of the first batch."""
        batch = tf.data.Dataset.from_generator(
            lambda: [self.first], output_signature=self.spec
        )
        count = int(examples_in(self.first))
        return batch.unbatch().apply(tf.data.experimental.assert_cardinality(count))

    def _checked(self, batch: Any) -> tuple:
        """Return a batch as tensors `(x, y, sample_weight)`, leaving out None parts.

        Raises:
            ConfigError: a part is not a dense tensor with a batch axis, the parts have
                different numbers of examples, or none, there are sample weights without
                labels, or the batch differs from the first one in form.
        """
        parts = parts_of_element(_with_tuples(parts_of(batch)), self._split)
        parts = _with_all_weights(parts)
        leaves = tf.nest.flatten(parts)
        if not all(isinstance(leaf, tf.Tensor) and leaf.shape.rank for leaf in leaves):
            rule = f"must yield batches of dense arrays in its {self._split} split"
            raise ConfigError(TARGET, rule, type(batch).__name__)
        counts = {leaf.shape[0] for leaf in leaves}
        if counts == {0} or len(counts) > 1:
            rule = (
                "must yield the same number of examples, at least one, in each part "
                f"of a batch of its {self._split} split"
            )
            raise ConfigError(TARGET, rule, sorted(counts))
        if self.spec is not None and not compatible(self.spec, parts):
            rule = (
                f"must yield batches of one form in its {self._split} split: only the "
                "number of examples may differ from that of the first batch"
            )
            forms = [f"{leaf.dtype.name}{leaf.shape.as_list()}" for leaf in leaves]
            raise ConfigError(TARGET, rule, forms)
        return parts


def _with_tuples(nest: Any) -> Any:
    """Return a nest with a tuple for each list, as tf.data takes lists for tensors."""
    if isinstance(nest, dict):
        return {key: _with_tuples(value) for key, value in nest.items()}
    if isinstance(nest, list | tuple):
        return tuple(_with_tuples(value) for value in nest)
    return nest


def _with_all_weights(parts: tuple) -> tuple:
    """Return the parts of a batch, or of its spec, with ones for weights that are None.

    Some outputs may have sample weights and others none.
    """
    if len(parts) < 3:
        return parts
    x, y, sample_weight = parts

    def weights_of(leaf: Any) -> Any:
        if not is_none(leaf):
            return leaf
        if isinstance(leaf, tf.NoneTensorSpec):
            return tf.TensorSpec([None], tf.float32)
        return tf.ones([examples_in(parts)])

    return x, y, tf.nest.map_structure(weights_of, sample_weight)


def _unreadable_image(paths: Iterable[str]) -> str:
    """Return the first file that cannot be decoded as an image.

    Return "" if there is none, or if the search takes too long.
    `keras.utils.image_dataset_from_directory` lists the files in an attribute of its
    dataset, but not in the order of the batches.
    """
    search_time = SearchTime("an image could not be read: looking for it")
    for path in paths:
        if search_time.is_over():
            return ""
        try:
            tf.io.decode_image(tf.io.read_file(path), expand_animations=False)
        except tf.errors.OpError:
            return path
    return ""


def _spec_of_batches(source: Any, first: tuple, split: str) -> tuple:
    """Return the spec of a batch of any size, without parts that are None."""
    parts = first
    if isinstance(source, tf.data.Dataset):
        # The spec shows which axes differ between batches.
        spec = keras.utils.unpack_x_y_sample_weight(source.element_spec)
        parts = _with_all_weights(parts_of_element(spec, split))

    def of_any_size(leaf: Any) -> tf.TensorSpec:
        return tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype)

    return tf.nest.map_structure(of_any_size, parts)


def _batches_in_epoch(source: Any) -> int | None:
    """Return the number of batches per epoch.

    If this number is unknown or infinite, return a negative number for a
    `tf.data.Dataset`, and None for another source.
    """
    if isinstance(source, tf.data.Dataset):
        return int(source.cardinality())
    return getattr(source, "num_batches", None)


def _batches_of(source: keras.utils.PyDataset) -> Iterator[Any]:
    source.on_epoch_begin()
    indices: Iterable[int] = itertools.count()
    if source.num_batches is not None:
        indices = range(len(source))
    for index in indices:
        yield source[index]
    source.on_epoch_end()


class Stream:
    """Joins every `factor` batches of a loader into one effective batch.

    Attributes:
        windows: a record of the batches that were read for each update so far.
        per_epoch: number of updates per epoch, `ENDLESS` if an epoch does not end, or
            None if the number is unknown before reading.
    """

    def __init__(self, loader: Loader, factor: int):
        self._loader = loader
        self._factor = factor
        self.windows: list[Window] = []
        self.per_epoch: int | None = None
        if loader.endless:
            self.per_epoch = ENDLESS
        elif loader.count is not None:
            self.per_epoch = -(-loader.count // factor)

    def batches(self, first_update: int) -> tf.data.Dataset:
        """Return the effective batches after the first `first_update` ones.

        This call reads the earlier batches and skips them. The dataset can be iterated
        only once.
        """
        effective_batches = self._effective_batches()
        for _ in range(first_update):
            next(effective_batches)
        spec = Batches(
            tf.nest.map_structure(_concatenated_spec, self._loader.spec),
            tf.TensorSpec([None], tf.int32),
        )
        return tf.data.Dataset.from_generator(
            lambda: effective_batches, output_signature=spec
        )

    def _effective_batches(self) -> Iterator[Batches]:
        examples_seen = 0
        for epoch in itertools.count():
            batches = self._loader.epoch()
            window = list(itertools.islice(batches, self._factor))
            if not window:
                raise ValueError(
                    f"{TARGET} must yield the training split anew in each epoch. "
                    f"Received: no batch in epoch {epoch}"
                )
            index = 0
            while window:
                # Read the next window first, to learn whether this update is the last
                # one of its epoch.
                next_window = list(itertools.islice(batches, self._factor))
                batch = tf.nest.map_structure(_concatenated, self._loader.spec, *window)
                sizes = tuple(int(examples_in(part)) for part in window)
                examples_seen += sum(sizes)
                self.windows.append(
                    Window(
                        sizes,
                        examples_seen,
                        epoch,
                        in_epoch=index,
                        last=not next_window,
                        digest=digest(batch),
                    )
                )
                yield Batches(batch, tf.constant(sizes, tf.int32))
                window = next_window
                index += 1


def _last_varying_axis(spec: tf.TensorSpec) -> int:
    """Return the last axis without a fixed size. The batch axis, 0, is such an axis."""
    return max(axis for axis, size in enumerate(spec.shape) if size is None)


def _concatenated_spec(spec: tf.TensorSpec) -> tf.TypeSpec:
    axis = _last_varying_axis(spec)
    if axis == 0:
        return spec
    return tf.RaggedTensorSpec(spec.shape, spec.dtype, axis, tf.int64)


def _concatenated(spec: tf.TensorSpec, *leaves: tf.Tensor) -> Any:
    axis = _last_varying_axis(spec)
    with tf.device("CPU:0"):
        if axis == 0:
            return tf.concat(leaves, 0)
        ragged_leaves = [
            tf.RaggedTensor.from_tensor(leaf, ragged_rank=axis) for leaf in leaves
        ]
        return tf.concat(ragged_leaves, 0)


def digest(nest: Any, previous: int = 0) -> int:
    """Return a CRC-32 of the content of tensors, starting from the CRC `previous`.

    Shapes and dtypes are left out, so that the numbers in checkpoints of earlier
    versions stay valid.
    """
    checksum = previous
    for leaf in tf.nest.flatten(nest, expand_composites=True):
        array = np.asarray(leaf)
        if array.dtype.hasobject:
            content = repr(array.tolist()).encode()
        else:
            content = array.tobytes()
        checksum = zlib.crc32(content, checksum)
    return checksum

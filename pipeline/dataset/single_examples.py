"""Checks that splits have single examples, and finds out the size of their images."""

from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from pipeline.common.errors import ConfigError
from pipeline.dataset.elements import TARGET
from pipeline.dataset.splits import Data

# Number of examples to read to find out whether examples have a common size.
_SAMPLE = 20


def check_split(dataset: Any, split: str, unbatched: bool = False) -> None:
    """Check that a split is a dataset of single examples.

    Args:
        dataset: what the user's function returned as the split.
        split: the name of the split.
        unbatched: whether its elements are known not to be batches.

    Raises:
        ConfigError: the split is not a dataset of single examples, has sparse tensors
            or tensors of unknown rank, is empty or endless, or does not say how many
            examples it has.
    """
    if not isinstance(dataset, tf.data.Dataset):
        rule = f"must return its {split} split as a tf.data.Dataset"
        raise ConfigError(TARGET, rule, type(dataset).__name__)
    spec = dataset.element_spec
    if any(isinstance(leaf, tf.SparseTensorSpec) for leaf in _leaves(dataset)):
        rule = (
            f"must yield dense or ragged tensors in its {split} split: see "
            "tf.sparse.to_dense"
        )
        raise ConfigError(TARGET, rule, str(spec))
    if any(_has_unknown_rank(leaf) for leaf in _leaves(dataset)):
        rule = (
            f"must yield tensors of known rank in its {split} split: see "
            "tf.ensure_shape"
        )
        raise ConfigError(TARGET, rule, str(spec))
    count = int(dataset.cardinality())
    if isinstance(spec, tuple) and len(spec) not in (1, 2, 3):
        rule = (
            "must yield (x, y), (x, y, sample_weight) or x alone as an example of its "
            f"{split} split"
        )
        raise ConfigError(TARGET, rule, spec)
    if count == 0:
        rule = f"must yield at least one example in its {split} split"
        raise ConfigError(TARGET, rule, count)
    if count == tf.data.INFINITE_CARDINALITY:
        rule = (
            f"must return a {split} split that ends: leave out `repeat`, as each epoch "
            "reads the split again"
        )
        raise ConfigError(TARGET, rule)
    if count == tf.data.UNKNOWN_CARDINALITY:
        rule = (
            f"must return a {split} split with a known number of examples (see "
            "tf.data.experimental.assert_cardinality), or batches with "
            "dataset.batched=true"
        )
        raise ConfigError(TARGET, rule)
    if unbatched or all(map(_is_image_of_unknown_size, _leaves(dataset))):
        return
    _reject_batches(dataset, split)


def check_single_examples(data: Data, model: keras.Model) -> None:
    """Raise a `ConfigError` if an example has the shape of a batch of the model.

    A batch of decoded images of unknown size may look like a single example. Only the
    shapes of the model's inputs, if they are known, can tell the two apart.
    """
    inputs = tf.nest.flatten(getattr(model, "inputs", None) or [])
    batch_shapes = [tf.TensorShape(tensor.shape) for tensor in inputs]
    if data.loaders or not batch_shapes:
        return
    for name, split in data.splits.items():
        leaves = tf.nest.flatten(split.element_spec[0])
        if len(leaves) != len(batch_shapes):
            continue
        looks_alike = [
            leaf.shape.rank is not None and shape.is_compatible_with(leaf.shape)
            for leaf, shape in zip(leaves, batch_shapes, strict=True)
        ]
        if all(looks_alike):
            rule = (
                f"must yield single examples in its {name} split, not batches: the "
                f"inputs have the shape of a batch of {model.name}"
            )
            raise ConfigError(TARGET, rule, [str(leaf) for leaf in leaves])


def _has_unknown_rank(leaf: Any) -> bool:
    shape = getattr(leaf, "shape", None)
    return isinstance(shape, tf.TensorShape) and shape.rank is None


def _is_image_of_unknown_size(leaf: Any) -> bool:
    """Return whether a part of an example may be a decoded image of unknown size."""
    if not isinstance(leaf, tf.TensorSpec) or leaf.shape.rank is None:
        return False
    return leaf.shape.rank >= 3 and leaf.shape[:2].as_list() == [None, None]


def image_shapes(dataset: tf.data.Dataset) -> dict[int, tuple[int, ...]]:
    """Return the shapes of images of unknown size, by their place in an example.

    The shape is that of the first `_SAMPLE` images. If these differ in size, they have
    no entry: they are batched as ragged tensors.
    """
    leaves = _leaves(dataset)
    unknown = [i for i, leaf in enumerate(leaves) if _is_image_of_unknown_size(leaf)]
    if not unknown:
        return {}
    shapes: dict[int, set[tuple[int, ...]]] = {i: set() for i in unknown}
    for element in dataset.take(_SAMPLE):
        values = tf.nest.flatten(element)
        for i in unknown:
            shapes[i].add(tuple(values[i].shape))
    shared = {}
    for i, sampled in shapes.items():
        if len(sampled) == 1:
            shared[i] = sampled.pop()
    return shared


def shape_setter(shapes: Mapping[int, tuple[int, ...]]) -> Callable[..., tuple]:
    """Return a function from an example to the example with parts of these shapes.

    Evaluating a part of another shape raises an error.

    Args:
        shapes: the shapes by the place of the part in the example.
    """

    @tf.autograph.experimental.do_not_convert
    def with_shapes(*example: Any) -> tuple:
        values = tf.nest.flatten(example)
        for i, shape in shapes.items():
            values[i] = tf.ensure_shape(values[i], shape)
        packed: tuple = tf.nest.pack_sequence_as(example, values)
        return packed

    return with_shapes


def _reject_batches(dataset: tf.data.Dataset, split: str) -> None:
    """Raise a `ConfigError` if the elements of a split look like batches."""
    if not _is_batched(dataset):
        return
    rule = (
        f"must yield single examples in its {split} split, not batches: leave `batch` "
        "out; if these are single examples, set their shape with tf.ensure_shape"
    )
    raise ConfigError(TARGET, rule, [str(leaf) for leaf in _leaves(dataset)])


def _is_batched(dataset: tf.data.Dataset) -> bool:
    """Return whether the elements of a dataset look like batches.

    They do if each part is a dense tensor whose first axis has no fixed size, and the
    first axis of the first part has the same size, above 1, in the first `_SAMPLE`
    elements. The last of these elements may be smaller. At least two elements are
    needed.
    """
    for leaf in _leaves(dataset):
        if not isinstance(leaf, tf.TensorSpec) or not leaf.shape.rank:
            return False
        if leaf.shape[0] is not None:
            return False
    lengths = []
    for element in dataset.take(_SAMPLE):
        first_part = tf.nest.flatten(element)[0]
        lengths.append(int(tf.shape(first_part)[0]))
    if len(lengths) < 2:
        return False
    *full_lengths, last_length = lengths
    return len(set(full_lengths)) == 1 and 1 <= last_length <= lengths[0] > 1


def _leaves(dataset: tf.data.Dataset) -> list[Any]:
    return tf.nest.flatten(dataset.element_spec)

"""Loads the splits of a dataset, example by example in a fixed order."""

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

import keras
import tensorflow as tf
from omegaconf import DictConfig, OmegaConf, open_dict

from pipeline.common.errors import ConfigError, as_config_error
from pipeline.config import validation_sets
from pipeline.config.validation_sets import ValidationSet
from pipeline.dataset import (
    elements,
    lengths,
    padding,
    single_examples,
    stream,
    tfds_files,
)
from pipeline.dataset.bad_example import errors_located
from pipeline.dataset.checksums import DataFiles
from pipeline.dataset.splits import Data, ValidationSplit
from pipeline.trust import instantiate

# Keys of the `dataset` group that this package reads. All others are arguments of the
# target.
_KEYS_OF_PROGRAM = (
    "augment",
    "batched",
    "checksum",
    "in_memory",
    "lengths",
    "pad",
    "shuffle_buffer",
    "shuffle_files",
    "validations",
)


def load(node: DictConfig, *, prepare: bool = True) -> Data:
    """Load the dataset that the `dataset` group of the config describes.

    Args:
        node: the `dataset` group.
        prepare: whether missing data may be downloaded and prepared.

    Raises:
        ConfigError: the target is invalid, or its data are missing or malformed.
    """
    data = _as_data(node, _build(node, "dataset", prepare))
    if data.train is None:
        raise ConfigError(elements.TARGET, "must return a training split", None)
    data = _with_validations(node, data, prepare)
    if node.get("batched"):
        loaders = _loaders(node, data)
        splits = {name: loader.examples() for name, loader in loaders.items()}
        data = replace(data.with_splits(splits), loaders=loaders)
    else:
        # The first examples may be read to find out their form.
        with (
            as_config_error("dataset", "must give examples", node._target_),
            errors_located(data, DataFiles(data.all_files)),
        ):
            data = _normalized(node, data)
    _check_labels(data.splits)
    for name, validation in data.validations.items():
        _check_form(data.train.element_spec, validation.split.element_spec, name)
    return data


def __getattr__(name: str) -> Any:
    """Return a dataset that was once defined here; configs may still name it so.

    Importing it only when it is used saves the import of TFDS, which takes seconds.
    """
    if name not in ("digits", "topics"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"pipeline.dataset.builtin.{name}"), name)


def _with_validations(node: DictConfig, data: Data, prepare: bool) -> Data:
    """Return the data with the splits of `dataset.validations`.

    Raises:
        ConfigError: a split or its dataset cannot be loaded, or does not have the form
            of the dataset's examples.
    """
    plain: Any = OmegaConf.to_container(node, resolve=True)
    validations = {}
    stored = dict(data.stored)
    shards = dict(data.shards)
    unbatched = set(data.unbatched)
    notes = dict(data.notes)
    for validation_set in validation_sets.parse(plain.get("validations")):
        name = validation_set.split_key
        source = _source_of_set(node, validation_set, prepare)
        _check_classes(data, source, validation_set.key)
        validations[name] = ValidationSplit(
            source.validation, source.name, source.version, source.files
        )
        if "validation" in source.stored:
            stored[name] = source.stored["validation"]
        if "validation" in source.shards:
            shards[name] = source.shards["validation"]
        if "validation" in source.unbatched:
            unbatched.add(name)
        if "validation" in source.notes:
            notes[name] = source.notes["validation"]
    return replace(
        data,
        validations=validations,
        stored=stored,
        shards=shards,
        unbatched=unbatched,
        notes=notes,
    )


def _source_of_set(
    node: DictConfig, validation_set: ValidationSet, prepare: bool
) -> Data:
    """Return the dataset whose validation split is the given set.

    For a split of the same dataset, this is the dataset again, with the split in place
    of its own validation split.
    """
    key = validation_set.key
    try:
        if validation_set.split is None:
            own_node = OmegaConf.select(node, key.removeprefix("dataset.")).copy()
            with open_dict(own_node):
                own_node.pop(validation_sets.EVERY, None)
            source = _as_data(own_node, _build(own_node, key, prepare), key)
        else:
            source = _same_dataset(node, validation_set, prepare)
    except ConfigError as error:
        error.key = _key_of_set(error.key, validation_set)
        raise
    if source.validation is None:
        rule = "must be a dataset with a validation split: it has only a training split"
        raise ConfigError(key, rule, source.name)
    return source


def _same_dataset(
    node: DictConfig, validation_set: ValidationSet, prepare: bool
) -> Data:
    key = validation_set.key
    again = node.copy()
    with open_dict(again):
        has_argument = again.pop("validation_split", None) is not None
        again.pop("test_split", None)
    offer = {"validation_split": validation_set.split}
    target = instantiate.locate(node, "dataset")
    if not has_argument and not instantiate.accepted(target, again, **offer):
        rule = (
            f"must be the node of a dataset, with a _target_: {node._target_} cannot "
            "load a split by its name, as it has no argument validation_split"
        )
        raise ConfigError(key, rule, validation_set.split)
    # The gate checks the split at its own key, that of the set.
    return _as_data(again, _build(again, "dataset", prepare, **offer))


def _key_of_set(key: str, validation_set: ValidationSet) -> str:
    """Return the key in the user's config that an error of a dataset is about.

    Args:
        key: the key in the error, as if the set were the dataset itself.
        validation_set: the set that was loaded.
    """
    if validation_set.split is not None:
        return validation_set.key if key == "dataset.validation_split" else key
    if key.startswith(validation_set.key):
        return key
    return f"{validation_set.key}{key.removeprefix('dataset')}"


def _check_classes(data: Data, source: Data, key: str) -> None:
    """Reject a set with more classes than the dataset, and so than the model's output.

    Args:
        data: the dataset.
        source: the dataset of the set.
        key: the config key of the set.
    """
    if data.classes and source.classes and source.classes > data.classes:
        rule = f"must have at most the {data.classes} classes of {data.name}"
        raise ConfigError(key, rule, source.classes)


def _build(node: DictConfig, key: str, prepare: bool, **more: Any) -> Any:
    """Call the target of a dataset's node, which is at `key`; return its result.

    `more` are further arguments of the target.
    """
    target = instantiate.locate(node, key)
    arguments = node.copy()
    with open_dict(arguments):
        for name in _KEYS_OF_PROGRAM:
            arguments.pop(name, None)
        # Drop a null, the default in conf/: the target may not have this parameter.
        if arguments.get("test_split") is None:
            arguments.pop("test_split", None)
        if not prepare:
            arguments.pop("download", None)

    no_download = {}
    if not prepare:
        no_download = instantiate.accepted(target, arguments, download=False)
    with _quiet_downloads():
        return instantiate.build(arguments, key, **no_download, **more)


@contextlib.contextmanager
def _quiet_downloads() -> Iterator[None]:
    """Within the block, suppress standard output and the log messages of downloads."""
    # Do not restore this level: after a download has failed, other downloads still run.
    logging.getLogger("urllib3").setLevel(logging.ERROR)
    absl = logging.getLogger("absl")
    level = absl.level
    absl.setLevel(logging.ERROR)
    try:
        # A target may write to standard output, such as Keras' functions for folders.
        with (
            open(os.devnull, "w", encoding="utf-8") as nowhere,
            contextlib.redirect_stdout(nowhere),
        ):
            yield
    finally:
        absl.setLevel(level)


def _as_data(node: DictConfig, built: Any, key: str = "dataset") -> Data:
    """Return the result of a target, a `Data` or a tuple of splits, as a `Data`.

    Raises:
        ConfigError: the result is neither of these. The error names the target of the
            node at `key`.
    """
    if isinstance(built, tuple) and len(built) in (2, 3):
        parts = dict(zip(("train", "validation", "test"), built, strict=False))
        data = Data(**parts, name=str(node.get("_target_")))
    elif isinstance(built, Data):
        data = built
    else:
        rule = (
            "must return (train, validation[, test]) as tf.data.Datasets, or a "
            "pipeline.dataset.Data"
        )
        raise ConfigError(f"{key}._target_", rule, type(built).__name__)
    return data


def _check_labels(splits: dict[str, tf.data.Dataset]) -> None:
    """Raise a `ConfigError` if some splits have labels and others have none."""
    labelled = len(splits["train"].element_spec) > 1
    with_or_without = "with" if labelled else "without"
    for name, split in splits.items():
        if (len(split.element_spec) > 1) != labelled:
            rule = (
                f"must return its {name} split {with_or_without} labels, like its "
                "training split"
            )
            raise ConfigError(elements.TARGET, rule, str(split.element_spec))


def _check_form(trained: tuple, evaluated: tuple, name: str) -> None:
    """Reject a validation set that does not have the form of the training split.

    Args:
        trained: the element spec of the training split.
        evaluated: the element spec of the set.
        name: the name of the set among the splits.
    """
    # Only one of the two may have sample weights.
    for part, of_train, of_set in zip(("x", "y"), trained, evaluated, strict=False):
        ranks = [_ranks(spec) for spec in (of_train, of_set)]
        if ranks[0] != ranks[1]:
            rule = f"must return {part} in the form of the training split, {of_train}"
            raise ConfigError(f"dataset.{name}", rule, str(of_set))


def _ranks(spec: Any) -> Any:
    """Return a nest of specs with the rank of each in its place."""
    return tf.nest.map_structure(lambda leaf: leaf.shape.rank, spec)


def from_tfds(  # noqa: PLR0913  keys of the config
    name: str | None = None,
    data_dir: str | None = None,
    download: bool = True,
    train_split: str = "train",
    validation_split: str | None = "test",
    input_key: str = "image",
    label_key: str = "label",
    scale: float = 1.0,
    resize: tuple[int, int] | None = None,
    preprocess: Callable[[dict[str, Any]], tuple] | None = None,
    builder: str | None = None,
    test_split: str | None = None,
) -> Data:
    """Load a TFDS dataset by its name or its builder.

    Args:
        name: name of the dataset in TFDS; see `tfds.builder`.
        data_dir: folder of TFDS datasets, or None for the default of TFDS.
        download: whether to download and prepare the dataset if it is missing.
        train_split, validation_split, test_split: names of the splits in TFDS, or
            slices such as `train[:90%]`. The last two may be None, to load no such
            split.
        input_key, label_key: names of the features to use as x and y.
        scale: factor by which x is multiplied.
        resize: (height, width) to which x is resized, or None to keep its size.
        preprocess: a function from the features to (x, y) or (x, y, sample_weight). It
            replaces `input_key`, `scale` and `resize`, and chooses the labels.
        builder: dotted name of your own `tfds.core.DatasetBuilder`, instead of `name`.

    Raises:
        ConfigError: not exactly one of `name` and `builder` is given, the dataset, its
            builder, a split or a feature is not found, the images differ in size and
            there is neither `resize` nor `preprocess`, or the dataset is missing and
            may not be prepared.
    """
    if (name is None) == (builder is None):
        rule = "must give exactly one of name and builder"
        raise ConfigError("dataset", rule, {"name": name, "builder": builder})
    tfds_builder = tfds_files.find_builder(name, builder, data_dir)
    if preprocess is None:
        _check_features(tfds_builder, input_key, label_key, resize)
        preprocess = tfds_files.inputs_and_labels(input_key, label_key, scale, resize)
    return tfds_files.read(
        tfds_builder,
        tfds_files.may_download(download),
        (train_split, validation_split, test_split),
        preprocess,
        label_key,
    )


def _check_features(
    builder: Any, input_key: str, label_key: str, resize: tuple[int, int] | None
) -> None:
    """Raise a `ConfigError` if a feature is missing, or `resize` is necessary and None.

    `resize` is necessary if the images differ in size.
    """
    features = dict(builder.info.features or {})
    for key, value in (("input_key", input_key), ("label_key", label_key)):
        if value not in features:
            rule = f"must be a feature of {builder.name}"
            raise ConfigError(f"dataset.{key}", rule, value, features)
    shape = features[input_key].shape
    if resize is None and len(shape) == 3 and None in shape:
        reason = f"because the images of {builder.name} differ in size"
        raise ConfigError("dataset.resize", f"must be [height, width], {reason}")


def _loaders(node: DictConfig, data: Data) -> dict[str, stream.Loader]:
    """Return the loaders of the splits, for `dataset.batched`.

    Raises:
        ConfigError: augmentation, lengths or padding are set, or a split is not a
            source of batches.
    """
    for key in ("augment", "lengths", "pad"):
        if node.get(key) is not None:
            rule = (
                "cannot be set with dataset.batched=true: the loader has to do this "
                "itself, and give padding a weight of 0"
            )
            raise ConfigError(f"dataset.{key}", rule, OmegaConf.to_container(node[key]))
    for name, split in data.splits.items():
        is_dataset = isinstance(split, tf.data.Dataset | keras.utils.PyDataset)
        if not is_dataset and not callable(split):
            rule = (
                f"must return its {name} split as a tf.data.Dataset, a "
                "keras.utils.PyDataset or a generator function"
            )
            raise ConfigError(elements.TARGET, rule, type(split).__name__)
    with as_config_error("dataset", "must give batches", node._target_):
        return {name: stream.Loader(split, name) for name, split in data.splits.items()}


def _normalized(node: DictConfig, data: Data) -> Data:
    """Return the data with the examples of each split in one form.

    `dataset.lengths` cuts off padding. Images of unknown size get a fixed size, if they
    have one, unless `dataset.pad` pads them. With `dataset.pad`, evaluating an example
    raises an error if its sample weights do not fit the positions of its labels.

    Args:
        node: the `dataset` group.
        data: the dataset.

    Raises:
        ConfigError: a split is malformed, see `single_examples.check_split`, or does
            not fit `dataset.lengths`, see `lengths.cutter`.
    """
    for name in data.splits:
        data = _normalized_split(node, data, name)
    return data


def _normalized_split(node: DictConfig, data: Data, name: str) -> Data:
    """Return the data with the examples of a split brought into the common form.

    They have this form however they are made: in the order of the split, with shuffled
    files, or from stored records.
    """
    split = data.splits[name]
    single_examples.check_split(split, name, unbatched=name in data.unbatched)
    steps = _steps_to_one_form(node, elements.as_parts(split, name), name)

    def normalized(examples: tf.data.Dataset) -> tf.data.Dataset:
        return _mapped(elements.as_parts(examples, name), steps)

    normalized_split = normalized(split)
    changes: dict[str, Any] = {}
    stored = data.made_of(name)
    if stored is not None and normalized_split is not split:
        # Convert with AutoGraph, as `map` does: the function may branch on tensors.
        converted = tf.function(stored.make)

        @tf.autograph.experimental.do_not_convert
        def make(record: tf.Tensor) -> tuple:
            example = elements.as_tuple(converted(record))
            example = elements.parts_of_element(example, name)
            for step in steps:
                example = step(*example)
            return example

        normalized_stored = replace(stored, split=normalized_split, make=make)
        changes["stored"] = {**data.stored, name: normalized_stored}
    if name == "train" and data.shuffled is not None:
        shuffled = data.shuffled
        changes["shuffled"] = lambda seed: normalized(shuffled(seed))
    return replace(data.with_splits({name: normalized_split}), **changes)


def _steps_to_one_form(
    node: DictConfig, parts: tf.data.Dataset, name: str
) -> list[Callable[..., tuple]]:
    """Return functions that bring an example of a split into one form, in their order.

    Args:
        node: the `dataset` group.
        parts: the split, see `elements.as_parts`.
        name: the name of the split.
    """
    steps: list[Callable[..., tuple]] = []
    if node.get("pad") is None:
        image_shapes = single_examples.image_shapes(parts)
        if image_shapes:
            steps.append(single_examples.shape_setter(image_shapes))
    if node.get("lengths") is not None:
        steps.append(lengths.cutter(node.lengths, parts.element_spec, name))
    if node.get("pad") is not None:
        spec = _mapped(parts, steps).element_spec
        check = padding.weights_checker(spec)
        if check is not None:
            steps.append(check)
    return steps


def _mapped(
    parts: tf.data.Dataset, steps: Sequence[Callable[..., tuple]]
) -> tf.data.Dataset:
    for step in steps:
        parts = parts.map(step)
    return parts

"""Loads the splits of a dataset, example by example in a fixed order."""

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any

import keras
import tensorflow as tf
from omegaconf import DictConfig, OmegaConf, open_dict

from pipeline.common.errors import ConfigError, as_config_error, first_line
from pipeline.dataset import elements, single_examples, stream, tfds_files
from pipeline.dataset.bad_example import errors_located
from pipeline.dataset.checksums import DataFiles
from pipeline.dataset.splits import Data
from pipeline.trust import gate, instantiate

# Keys of the `dataset` group that this package reads. All others are arguments of the
# target.
_KEYS_OF_PROGRAM = (
    "augment",
    "batched",
    "checksum",
    "in_memory",
    "pad",
    "shuffle_buffer",
    "shuffle_files",
)


def load(node: DictConfig, *, prepare: bool = True) -> Data:
    """Load the dataset that the `dataset` group of the config describes.

    Args:
        node: the `dataset` group.
        prepare: whether missing data may be downloaded and prepared.

    Raises:
        ConfigError: the target is invalid, or its data are missing or malformed.
    """
    data = _as_data(node, _build(node, prepare))
    if node.get("batched"):
        loaders = _loaders(node, data)
        splits = {name: loader.examples() for name, loader in loaders.items()}
        data = replace(data, **splits, loaders=loaders)
    else:
        # The first examples may be read to find out their form.
        with (
            as_config_error("dataset", "must give examples", node._target_),
            errors_located(data, DataFiles(data.files)),
        ):
            data = _normalized(data, fix_sizes=node.get("pad") is None)
    _check_labels(data.splits)
    return data


def __getattr__(name: str) -> Any:
    """Return a dataset that was once defined here: a config may name it by this module.

    Importing it here only when it is used saves the import of TFDS, which takes seconds.
    """
    if name not in ("digits", "topics"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"pipeline.dataset.builtin.{name}"), name)


def _build(node: DictConfig, prepare: bool) -> Any:
    """Call the target of the `dataset` group; return its result."""
    target = instantiate.locate(node, "dataset")
    arguments = node.copy()
    with open_dict(arguments):
        for key in _KEYS_OF_PROGRAM:
            arguments.pop(key, None)
        # Drop a null, the default in conf/: the target may not have this parameter.
        if arguments.get("test_split") is None:
            arguments.pop("test_split", None)
        if not prepare:
            arguments.pop("download", None)

    no_download = {}
    if not prepare:
        no_download = instantiate.accepted(target, arguments, download=False)
    with _quiet_downloads():
        return instantiate.build(arguments, "dataset", **no_download)


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


def _as_data(node: DictConfig, built: Any) -> Data:
    """Return the result of a target, a `Data` or a tuple of splits, as a `Data`.

    Raises:
        ConfigError: the result is neither of these, or has no training split.
    """
    if isinstance(built, tuple) and len(built) in (2, 3):
        parts = dict(zip(("train", "validation", "test"), built, strict=False))
        data = Data(**parts, name=str(node.get("_target_")))
    elif isinstance(built, Data):
        data = built
    else:
        rule = (
            "must give (train, validation[, test]) as tf.data.Datasets, "
            "or a pipeline.dataset.Data"
        )
        raise ConfigError(elements.TARGET, rule, type(built).__name__)
    if data.train is None:
        raise ConfigError(elements.TARGET, "must give a training split", None)
    return data


def _check_labels(splits: dict[str, tf.data.Dataset]) -> None:
    """Raise a `ConfigError` if some splits have labels and others have none."""
    labelled = len(splits["train"].element_spec) > 1
    with_or_without = "with" if labelled else "without"
    for name, split in splits.items():
        if (len(split.element_spec) > 1) != labelled:
            rule = (
                f"must give its {name} split {with_or_without} labels, "
                "as its training split"
            )
            raise ConfigError(elements.TARGET, rule, str(split.element_spec))


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
        ConfigError: the dataset, its builder, a split or a feature is not found, or the
            dataset is missing and may not be prepared.
    """
    if (name is None) == (builder is None):
        rule = "must give one of name and builder"
        raise ConfigError("dataset", rule, {"name": name, "builder": builder})
    tfds_builder: Any
    if builder is not None:
        tfds_builder = _own_builder(builder, data_dir)
    else:
        tfds_builder = _tfds_builder(name, data_dir)

    if preprocess is None:
        _check_features(tfds_builder, input_key, label_key, resize)
        preprocess = tfds_files.inputs_and_labels(input_key, label_key, scale, resize)
    download = download and (gate.in_force is None or gate.in_force.downloads)
    return tfds_files.read(
        tfds_builder,
        download,
        (train_split, validation_split, test_split),
        preprocess,
        label_key,
    )


def _own_builder(builder: str, data_dir: str | None) -> Any:
    """Return an instance of the user's builder with the dotted name `builder`.

    Raises:
        ConfigError: the name is not trusted, or is not that of a TFDS builder.
    """
    import tensorflow_datasets as tfds

    node = OmegaConf.create({"_target_": builder})
    cls: Any = instantiate.locate(node, "dataset.builder")
    if not (isinstance(cls, type) and issubclass(cls, tfds.core.DatasetBuilder)):
        rule = "must be a tfds.core.DatasetBuilder"
        raise ConfigError("dataset.builder", rule, builder)
    return cls(data_dir=data_dir)


def _tfds_builder(name: str | None, data_dir: str | None) -> Any:
    import tensorflow_datasets as tfds

    try:
        return tfds.builder(name, data_dir=data_dir)
    except Exception as error:
        rule = f"must be a TFDS dataset ({first_line(error)})"
        raise ConfigError("dataset.name", rule, name) from error


def _check_features(
    builder: Any, input_key: str, label_key: str, resize: tuple[int, int] | None
) -> None:
    """Raise a `ConfigError` if a feature is missing, or `resize` is necessary and None.

    It is necessary if the images differ in size.
    """
    features = dict(builder.info.features or {})
    for key, value in (("input_key", input_key), ("label_key", label_key)):
        if value not in features:
            rule = f"must be a feature of {builder.name}"
            raise ConfigError(f"dataset.{key}", rule, value, features)
    shape = features[input_key].shape
    if resize is None and len(shape) == 3 and None in shape:
        rule = f"must be [height, width]: the images of {builder.name} differ in size"
        raise ConfigError("dataset.resize", rule)


def _loaders(node: DictConfig, data: Data) -> dict[str, stream.Loader]:
    """Return the loaders of the splits, for `dataset.batched`.

    Raises:
        ConfigError: augmentation or padding is set, or a split is not a source of
            batches.
    """
    for key in ("augment", "pad"):
        if node.get(key) is not None:
            rule = (
                "must be null with dataset.batched=true: the loader does that, "
                "and weighs what it pads with 0"
            )
            raise ConfigError(f"dataset.{key}", rule, OmegaConf.to_container(node[key]))
    for name, split in data.splits.items():
        is_dataset = isinstance(split, tf.data.Dataset | keras.utils.PyDataset)
        if not is_dataset and not callable(split):
            rule = (
                f"must give its {name} split as a tf.data.Dataset, "
                "a keras.utils.PyDataset or a generator function"
            )
            raise ConfigError(elements.TARGET, rule, type(split).__name__)
    with as_config_error("dataset", "must give batches", node._target_):
        return {name: stream.Loader(split, name) for name, split in data.splits.items()}


def _normalized(data: Data, fix_sizes: bool) -> Data:
    """Return the data with the examples of each split in one form.

    Args:
        data: the dataset.
        fix_sizes: whether to fix the size of images of unknown size, which padding
            would do otherwise.

    Raises:
        ConfigError: a split is malformed; see `single_examples.check_split`.
    """
    for name in data.splits:
        data = _normalized_split(data, name, fix_sizes)
    return data


def _normalized_split(data: Data, name: str, fix_sizes: bool) -> Data:
    """Return the data with the examples of one split in one form.

    All ways in which they are made give this form: in the order of the split, with
    shuffled files, and from stored records.
    """
    split = data.splits[name]
    single_examples.check_split(split, name)
    image_shapes: dict[int, tuple[int, ...]] = {}
    if fix_sizes:
        image_shapes = single_examples.image_shapes(elements.as_parts(split, name))

    def normalized(examples: tf.data.Dataset) -> tf.data.Dataset:
        parts = elements.as_parts(examples, name)
        if not image_shapes:
            return parts
        return parts.map(
            lambda *example: single_examples.with_shapes(example, image_shapes)
        )

    changes: dict[str, Any] = {name: normalized(split)}
    stored = data.made_of(name)
    if stored is not None and changes[name] is not split:
        # Convert with AutoGraph, as `map` does: the function may branch on tensors.
        converted = tf.function(stored.make)

        @tf.autograph.experimental.do_not_convert
        def make(record: tf.Tensor) -> tuple:
            example = elements.as_tuple(converted(record))
            return single_examples.with_shapes(
                elements.parts_of_element(example, name), image_shapes
            )

        normalized_stored = replace(stored, split=changes[name], make=make)
        changes["stored"] = {**data.stored, name: normalized_stored}
    if name == "train" and data.shuffled is not None:
        shuffled = data.shuffled
        changes["shuffled"] = lambda seed: normalized(shuffled(seed))
    return replace(data, **changes)

"""Config → the splits of a dataset, example by example, in a fixed order."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import tensorflow as tf
from omegaconf import DictConfig, OmegaConf, open_dict

from pipeline.common.errors import ConfigError, first_line
from pipeline.dataset import tfds_files
from pipeline.dataset.split_checks import as_parts, checked
from pipeline.dataset.splits import Data as Data
from pipeline.dataset.splits import Stored as Stored
from pipeline.trust import gate, instantiate

# Keys of the program; all others are arguments of the target.
_OURS = ("augment", "checksum", "in_memory", "pad", "shuffle_buffer", "shuffle_files")


def load(node: DictConfig, *, prepare: bool = True) -> Data:
    """Load the data that the `dataset` group names; without `prepare` nothing is downloaded or prepared.

    Raises:
        ConfigError: the target is wrong, the dataset cannot be had, or it is not of the form that `Data` has.
    """
    target = instantiate.locate(node, "dataset")
    own = node.copy()  # reduced to the target's arguments
    with open_dict(own):
        for key in _OURS if prepare else (*_OURS, "download"):
            own.pop(key, None)
        if own.get("test_split") is None:  # the default in conf/; targets need not have it
            own.pop("test_split", None)
    offers = {} if prepare else instantiate.accepted(target, own, download=False)
    # TFDS and its downloader print much about a missing dataset, which the error says in one line.
    logging.getLogger("urllib3").setLevel(logging.ERROR)  # for good: other downloads continue after one has failed
    absl = logging.getLogger("absl")
    level = absl.level
    absl.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(None):
            made = instantiate.build(own, "dataset", **offers)
    finally:
        absl.setLevel(level)
    if isinstance(made, tuple) and len(made) in (2, 3):
        train, validation, *test = made
        made = Data(train, validation, test=test[0] if test else None, name=str(node.get("_target_")))
    if not isinstance(made, Data):
        rule = "must give (train, validation[, test]) as tf.data.Datasets, or a pipeline.dataset.Data"
        raise ConfigError("dataset._target_", rule, type(made).__name__)
    if made.shuffled is not None:
        of_files = made.shuffled
        made = replace(made, shuffled=lambda seed: as_parts(of_files(seed)))
    splits = {name: checked(split, name) for name, split in made.splits.items()}
    labelled = {name: len(split.element_spec) > 1 for name, split in splits.items()}
    for name, found in labelled.items():
        if found != labelled["train"]:
            how = "with" if labelled["train"] else "without"
            rule = f"must give its {name} split {how} labels, as its training split"
            raise ConfigError("dataset._target_", rule, str(splits[name].element_spec))
    return replace(made, **splits)


def digits(data_dir: str | None = None, download: bool = True, test_split: str | None = None) -> Data:
    """Load scikit-learn's handwritten digits: 1437 images for training and 180 for validation, inputs in 0 … 1.

    Another 180 are its split `test`.
    """
    from pipeline.dataset.builtin.digits import Digits

    builder = Digits(data_dir=data_dir)
    tfds_files.prepare(builder, download)
    make = _features("image", "label", 1 / 16, None)
    return tfds_files.read(builder, ("train", "validation", test_split), make)


def topics(data_dir: str | None = None, download: bool = True, test_split: str | None = None) -> Data:
    """Load the help texts of Python's standard library as bytes to be predicted, each from those before it.

    x and y are integers, (length,), of at most 127 bytes: y is x moved by one. A byte b is b + 1, so that 0 is padding.
    """
    from pipeline.dataset.builtin.topics import Topics

    builder = Topics(data_dir=data_dir)
    tfds_files.prepare(builder, download)

    @tf.autograph.experimental.do_not_convert
    def preprocess(features: dict[str, Any]) -> tuple[Any, Any]:
        tokens = tf.cast(features["bytes"], tf.int32) + 1
        return tokens[:-1], tokens[1:]

    return replace(tfds_files.read(builder, ("train", "validation", test_split), preprocess), classes=257)


def breast_cancer() -> Data:
    """Load scikit-learn's breast cancer table: 30 measurements of a tumour, malignant (0) or benign (1)."""
    from pipeline.dataset.builtin import tables

    return _from_table(tables.breast_cancer(), "breast_cancer", classes=2)


def diabetes() -> Data:
    """Load scikit-learn's diabetes table: 10 measurements of a patient, and its progression within a year."""
    from pipeline.dataset.builtin import tables

    return _from_table(tables.diabetes(), "diabetes")


def _from_table(table: dict[str, Any], name: str, classes: int | None = None) -> Data:
    splits = {split: tf.data.Dataset.from_tensor_slices(arrays) for split, arrays in table.items()}
    return Data(**splits, classes=classes, name=name, version="1.0.0")


def from_tfds(
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
        name: as `tfds.builder` takes it.
        data_dir: where it is, or will be, prepared.
        download: whether to fetch and prepare it if it is not there.
        train_split, validation_split, test_split: as TFDS takes them, slices such as `train[:90%]` too.
        input_key, label_key: the features that are x and y.
        scale: factor of x.
        resize: (height, width) of x.
        preprocess: in place of the four above: takes the features, gives (x, y) or (x, y, sample_weight).
        builder: in place of `name`, the dotted name of a `tfds.core.DatasetBuilder` of your own.
    """
    import tensorflow_datasets as tfds

    if (name is None) == (builder is None):
        raise ConfigError("dataset", "must give one of name and builder", {"name": name, "builder": builder})
    made: Any
    if builder is not None:
        cls: Any = instantiate.locate(OmegaConf.create({"_target_": builder}), "dataset.builder")
        if not (isinstance(cls, type) and issubclass(cls, tfds.core.DatasetBuilder)):
            raise ConfigError("dataset.builder", "must be a tfds.core.DatasetBuilder", builder)
        made = cls(data_dir=data_dir)
    else:
        try:
            made = tfds.builder(name, data_dir=data_dir)
        except Exception as error:
            raise ConfigError("dataset.name", f"must be a TFDS dataset ({first_line(error)})", name) from error
    if preprocess is None:
        features = dict(made.info.features or {})
        for key, value in (("input_key", input_key), ("label_key", label_key)):
            if value not in features:
                raise ConfigError(f"dataset.{key}", f"must be a feature of {made.name}", value, features)
        sizes = features[input_key].shape
        if resize is None and len(sizes) == 3 and None in sizes:
            raise ConfigError("dataset.resize", f"must be [height, width]: the images of {made.name} differ in size")
        preprocess = _features(input_key, label_key, scale, resize)
    tfds_files.prepare(made, download and gate.downloads())
    return tfds_files.read(made, (train_split, validation_split, test_split), preprocess, label_key)


def _features(input_key: str, label_key: str, scale: float, resize: tuple[int, int] | None) -> Callable:
    @tf.autograph.experimental.do_not_convert
    def preprocess(features: dict[str, Any]) -> tuple[Any, Any]:
        x = tf.cast(features[input_key], tf.float32) * scale
        if resize is not None:
            x = tf.image.resize(x, resize)
        return x, features[label_key]

    return preprocess

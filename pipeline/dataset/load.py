"""Config → the splits of a dataset, example by example, in a fixed order."""

import contextlib
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import keras
import tensorflow as tf
from omegaconf import DictConfig, OmegaConf, open_dict

from pipeline.common.errors import ConfigError, first_line, refused
from pipeline.dataset import stream, tfds_files
from pipeline.dataset.splits import Data
from pipeline.trust import gate, instantiate

# Keys of the program; all others are arguments of the target.
_OURS = (
    "augment",
    "batched",
    "checksum",
    "in_memory",
    "pad",
    "shuffle_buffer",
    "shuffle_files",
)


def load(node: DictConfig, *, prepare: bool = True) -> Data:
    """Load the data that the `dataset` group names; without `prepare` nothing is downloaded or prepared.

    A `ConfigError` names a wrong target, data that are not there, or data of a wrong form.
    """
    target = instantiate.locate(node, "dataset")
    own = node.copy()  # reduced to the target's arguments
    with open_dict(own):
        for key in _OURS if prepare else (*_OURS, "download"):
            own.pop(key, None)
        if (
            own.get("test_split") is None
        ):  # the default in conf/; targets need not have it
            own.pop("test_split", None)
    offers = {} if prepare else instantiate.accepted(target, own, download=False)
    # TFDS and its downloader print much about a missing dataset, which the error says in one line.
    logging.getLogger("urllib3").setLevel(
        logging.ERROR
    )  # for good: other downloads continue after one has failed
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
        made = Data(
            train,
            validation,
            test=test[0] if test else None,
            name=str(node.get("_target_")),
        )
    if not isinstance(made, Data):
        rule = "must give (train, validation[, test]) as tf.data.Datasets, or a pipeline.dataset.Data"
        raise ConfigError(stream.KEY, rule, type(made).__name__)
    if (of_files := made.shuffled) is not None:
        made = replace(made, shuffled=lambda seed: _as_parts(of_files(seed)))
    loaders = _loaders(node, made) if node.get("batched") else {}
    splits = {name: loader.examples() for name, loader in loaders.items()}
    splits = splits or {
        name: _checked(split, name) for name, split in made.splits.items()
    }
    labelled = len(splits["train"].element_spec) > 1
    for name, split in splits.items():
        if (len(split.element_spec) > 1) != labelled:
            rule = f"must give its {name} split {'with' if labelled else 'without'} labels, as its training split"
            raise ConfigError(stream.KEY, rule, str(split.element_spec))
    return replace(made, **splits, loaders=loaders)


def digits(
    data_dir: str | None = None, download: bool = True, test_split: str | None = None
) -> Data:
    """Load scikit-learn's digits, inputs in 0 … 1: 1437 images to train, 180 for validation, 180 in split `test`."""
    from pipeline.dataset.builtin.digits import Digits

    make = _features("image", "label", 1 / 16, None)
    return tfds_files.read(
        Digits(data_dir=data_dir), download, ("train", "validation", test_split), make
    )


def topics(
    data_dir: str | None = None, download: bool = True, test_split: str | None = None
) -> Data:
    """Load the help texts of Python's standard library as bytes to be predicted, each from those before it.

    x and y are integers, (length,), of at most 127 bytes: y is x moved by one. A byte b is b + 1, so that 0 is padding.
    """
    from pipeline.dataset.builtin.topics import Topics

    @tf.autograph.experimental.do_not_convert
    def preprocess(features: dict[str, Any]) -> tuple[Any, Any]:
        tokens = tf.cast(features["bytes"], tf.int32) + 1
        return tokens[:-1], tokens[1:]

    splits = "train", "validation", test_split
    return replace(
        tfds_files.read(Topics(data_dir=data_dir), download, splits, preprocess),
        classes=257,
    )


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
        data_dir, download: where it is prepared, and whether to fetch and prepare it if it is not there.
        train_split, validation_split, test_split: as TFDS takes them, slices such as `train[:90%]` too.
        input_key, label_key: the features that are x and y.
        scale, resize: the factor and the (height, width) of x.
        preprocess: in place of the four above: takes the features, gives (x, y) or (x, y, sample_weight).
        builder: in place of `name`, the dotted name of a `tfds.core.DatasetBuilder` of your own.
    """
    import tensorflow_datasets as tfds

    if (name is None) == (builder is None):
        raise ConfigError(
            "dataset",
            "must give one of name and builder",
            {"name": name, "builder": builder},
        )
    made: Any
    if builder is not None:
        cls: Any = instantiate.locate(
            OmegaConf.create({"_target_": builder}), "dataset.builder"
        )
        if not (isinstance(cls, type) and issubclass(cls, tfds.core.DatasetBuilder)):
            raise ConfigError(
                "dataset.builder", "must be a tfds.core.DatasetBuilder", builder
            )
        made = cls(data_dir=data_dir)
    else:
        try:
            made = tfds.builder(name, data_dir=data_dir)
        except Exception as error:
            raise ConfigError(
                "dataset.name", f"must be a TFDS dataset ({first_line(error)})", name
            ) from error
    if preprocess is None:
        features = dict(made.info.features or {})
        for key, value in (("input_key", input_key), ("label_key", label_key)):
            if value not in features:
                raise ConfigError(
                    f"dataset.{key}",
                    f"must be a feature of {made.name}",
                    value,
                    features,
                )
        sizes = features[input_key].shape
        if resize is None and len(sizes) == 3 and None in sizes:
            raise ConfigError(
                "dataset.resize",
                f"must be [height, width]: the images of {made.name} differ in size",
            )
        preprocess = _features(input_key, label_key, scale, resize)
    download = download and (gate.in_force is None or gate.in_force.downloads)
    return tfds_files.read(
        made,
        download,
        (train_split, validation_split, test_split),
        preprocess,
        label_key,
    )


def _features(
    input_key: str, label_key: str, scale: float, resize: tuple[int, int] | None
) -> Callable:
    @tf.autograph.experimental.do_not_convert
    def preprocess(features: dict[str, Any]) -> tuple[Any, Any]:
        x = tf.cast(features[input_key], tf.float32) * scale
        if resize is not None:
            x = tf.image.resize(x, resize)
        return x, features[label_key]

    return preprocess


def _loaders(node: DictConfig, made: Data) -> dict[str, stream.Loader]:
    for key in ("augment", "pad"):
        if node.get(key) is not None:
            rule = "must be null with dataset.batched=true: the loader does that, and weighs what it pads with 0"
            raise ConfigError(f"dataset.{key}", rule, OmegaConf.to_container(node[key]))
    for name, split in made.splits.items():
        if not (
            isinstance(split, tf.data.Dataset | keras.utils.PyDataset)
            or callable(split)
        ):
            rule = f"must give its {name} split as a tf.data.Dataset, a keras.utils.PyDataset or a generator function"
            raise ConfigError(stream.KEY, rule, type(split).__name__)
    with refused("dataset", "must give batches", node._target_):
        return {name: stream.Loader(split, name) for name, split in made.splits.items()}


def _checked(dataset: Any, split: str) -> tf.data.Dataset:
    """Return the split as `_as_parts` does, if it is a dataset of single examples whose number is known."""
    if not isinstance(dataset, tf.data.Dataset):
        raise ConfigError(
            stream.KEY,
            f"must give its {split} split as a tf.data.Dataset",
            type(dataset).__name__,
        )
    spec, count = dataset.element_spec, int(dataset.cardinality())
    if isinstance(spec, tuple) and len(spec) not in (1, 2, 3):
        rule = f"must give (x, y), (x, y, sample_weight) or x alone as an example of its {split} split"
        raise ConfigError(stream.KEY, rule, spec)
    if count == 0:
        raise ConfigError(
            stream.KEY, f"must give at least one example in its {split} split", count
        )
    if count < 0:
        known = "of a known number of examples (see tf.data.experimental.assert_cardinality)"
        rule = (
            f"must give a {split} split {known}, or batches with dataset.batched=true"
        )
        raise ConfigError(stream.KEY, rule, count)
    leaves = tf.nest.flatten(spec)
    if _is_batched(dataset, leaves):
        rule = f"must give single examples in its {split} split, not batches: leave `batch` out"
        raise ConfigError(stream.KEY, rule, [str(leaf) for leaf in leaves])
    return _as_parts(dataset)


def _as_parts(dataset: tf.data.Dataset) -> tf.data.Dataset:
    spec = dataset.element_spec
    without_labels = any(
        isinstance(leaf, tf.NoneTensorSpec) for leaf in tf.nest.flatten(spec)
    )
    return (
        dataset
        if isinstance(spec, tuple) and not without_labels
        else dataset.map(_parts)
    )


def _is_batched(dataset: tf.data.Dataset, leaves: list[Any]) -> bool:
    """Return whether each part's first axis has an unknown size and yet one size, but for the last of the elements."""
    if not all(
        isinstance(leaf, tf.TensorSpec) and leaf.shape.rank and leaf.shape[0] is None
        for leaf in leaves
    ):
        return False
    lengths = [
        int(tf.shape(tf.nest.flatten(element)[0])[0]) for element in dataset.take(20)
    ]
    return (
        len(lengths) > 1
        and len(set(lengths[:-1])) == 1
        and 1 <= lengths[-1] <= lengths[0] > 1
    )


@tf.autograph.experimental.do_not_convert
def _parts(x: Any, y: Any = None, *sample_weight: Any) -> tuple:
    return (x,) if y is None else (x, _without_none(y), *sample_weight)


def _without_none(nest: Any) -> Any:
    if isinstance(nest, dict):
        return {
            key: _without_none(value)
            for key, value in nest.items()
            if value is not None
        }
    if isinstance(nest, tuple):
        return tuple(_without_none(value) for value in nest if value is not None)
    return nest

"""Config → the splits of a dataset, example by example, in a fixed order."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tensorflow as tf
from filelock import FileLock
from omegaconf import DictConfig, OmegaConf, open_dict

from pipeline import instantiate
from pipeline.dataset_checks import as_parts, checked
from pipeline.errors import ConfigError, first_line
from pipeline.trust import gate

# Of the program; all other keys go to the target.
FILES_AT_ONCE = 16  # that are read in turn where files are shuffled
BUFFER = 2**20  # bytes that are read of one of them at a time: of all TFDS would keep 128 MB
_OURS = ("augment", "checksum", "in_memory", "pad", "shuffle_buffer", "shuffle_files")


@dataclass(frozen=True)
class Shard:
    """What a split has of a file: so many of its examples, after `first` others."""

    path: Path
    first: int
    examples: int


@dataclass(frozen=True)
class Data:
    """The splits of a dataset, example by example, in a fixed order.

    Attributes:
        train, validation, test: elements are `(x, y)`, `(x, y, sample_weight)` or, without labels, `(x,)` of one
            example; each is a tensor or a nest of tensors without a batch axis. The number of examples is known.
        classes: number of labels, where the labels are classes.
        name, version: as the dataset calls itself.
        files: that the examples are read from, where they are prepared files.
        shards: of the splits, by their names, in the order in which they are read.
        shuffled: takes a seed, a scalar of int64, and gives the training split with its files in an
            order that follows from the seed; None where it is not read from files.
        from_stored: makes an example of what `shuffled` gives; None where that gives examples.
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
    from_stored: Callable[[Any], tuple] | None = None

    @property
    def splits(self) -> dict[str, tf.data.Dataset]:
        """The splits that there are, by their names."""
        found = {"train": self.train, "validation": self.validation, "test": self.test}
        return {name: split for name, split in found.items() if split is not None}

    @property
    def input_shape(self) -> tuple[int | None, ...] | None:
        """Shape of one example's input; None where the input is a nest."""
        spec = self.train.element_spec[0]
        return tuple(spec.shape) if isinstance(spec, tf.TypeSpec) else None

    @property
    def examples(self) -> int:
        """Examples in the training split."""
        return int(self.train.cardinality())


def load(node: DictConfig, *, prepare: bool = True) -> Data:
    """Load the data that the `dataset` group names; without `prepare` nothing is downloaded or prepared.

    Raises:
        ConfigError: the target is wrong, the dataset cannot be had, or it is not of the form that `Data` has.
    """
    target = instantiate.locate(node, "dataset")
    own = node.copy()  # the target's alone
    with open_dict(own):
        for key in _OURS if prepare else (*_OURS, "download"):
            own.pop(key, None)
        if own.get("test_split") is None:  # as all of ours have by default, and other targets need not know
            own.pop("test_split", None)
    offers = {} if prepare else instantiate.accepted(target, own, download=False)
    # What TFDS and its downloader print about a dataset that is not there, the error says in one line.
    logging.getLogger("urllib3").setLevel(logging.ERROR)  # for good: other downloads go on when one has failed
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
    if made.shuffled is not None and made.from_stored is None:
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

    Further 180 are its split `test`.
    """
    from pipeline.datasets.digits import Digits

    builder = Digits(data_dir=data_dir)
    _prepare(builder, download)
    make = _features("image", "label", 1 / 16, None)
    return _from_builder(builder, ("train", "validation", test_split), make)


def topics(data_dir: str | None = None, download: bool = True, test_split: str | None = None) -> Data:
    """Load the help texts of Python's standard library as bytes to be predicted, each from those before it.

    x and y are integers, (length,), of at most 127 bytes: y is x moved by one. A byte b is b + 1, so that 0 is padding.
    """
    from pipeline.datasets.topics import Topics

    builder = Topics(data_dir=data_dir)
    _prepare(builder, download)

    @tf.autograph.experimental.do_not_convert
    def preprocess(features: dict[str, Any]) -> tuple[Any, Any]:
        tokens = tf.cast(features["bytes"], tf.int32) + 1
        return tokens[:-1], tokens[1:]

    return replace(_from_builder(builder, ("train", "validation", test_split), preprocess), classes=257)


def breast_cancer() -> Data:
    """Load scikit-learn's breast cancer table: 30 measurements of a tumour, malignant (0) or benign (1)."""
    from pipeline.datasets import tables

    return _from_table(tables.breast_cancer(), "breast_cancer", classes=2)


def diabetes() -> Data:
    """Load scikit-learn's diabetes table: 10 measurements of a patient, and how far the disease went in a year."""
    from pipeline.datasets import tables

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
    _prepare(made, download and gate.downloads())
    return _from_builder(made, (train_split, validation_split, test_split), preprocess, label_key)


def _prepare(builder: Any, download: bool) -> None:
    """Prepare the dataset if it is not there; of several processes at once one does, and the others wait."""
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core.download import downloader

    if builder.is_prepared():
        return
    if not download:
        rule = f"must hold {builder.info.full_name}, prepared; dataset.download=true allows to download and prepare it"
        raise ConfigError("dataset.data_dir", rule, builder.data_dir)
    folder = Path(builder.data_dir).parent  # of the dataset or its config, whatever the version
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if builder.is_prepared():  # by another process, after this one's builder had looked
                builder.info.read_from_directory(builder.data_dir)
            else:
                tfds.disable_progress_bar()
                downloader.MAX_RETRIES = 5  # ten take over three minutes to find that there is no network
                builder.download_and_prepare()
    except Exception as error:
        rule = f"could not be downloaded and prepared in {folder.parent} ({first_line(error)})"
        raise ConfigError("dataset", rule, builder.info.full_name) from error


def _from_builder(
    builder: Any,
    splits: tuple[str, str | None, str | None],
    preprocess: Callable,
    label_key: str = "label",
) -> Data:
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core import file_adapters

    read = tfds.ReadConfig(interleave_cycle_length=1, try_autocache=False, add_tfds_id=False)

    adapter = file_adapters.ADAPTER_FOR_FORMAT[builder.info.file_format or file_adapters.DEFAULT_FILE_FORMAT]

    def shuffled(seed: tf.Tensor) -> tf.data.Dataset:
        """Read the records as they lie in the files: TFDS would parse each before it is shuffled, at half of all cost.

        One of each of 16 files in turn.
        """
        parts = builder.info.splits[train].file_instructions
        names = tf.constant([str(part.filename) for part in parts])
        counts = tf.constant([(part.skip, part.take) for part in parts], tf.int64)
        files = tf.data.Dataset.from_tensor_slices((names, counts))
        return files.shuffle(len(parts), seed=seed, reshuffle_each_iteration=False).interleave(
            lambda name, count: adapter.make_tf_data(name, BUFFER).skip(count[0]).take(count[1]),
            cycle_length=FILES_AT_ONCE,
            num_parallel_calls=tf.data.AUTOTUNE,
            deterministic=True,
        )

    @tf.autograph.experimental.do_not_convert
    def from_stored(record: tf.Tensor) -> tuple:
        example: tuple = preprocess(builder.info.features.deserialize_example(record))
        return example

    shards: dict[str, list[Shard]] = {}

    def split(name: str, key: str) -> tf.data.Dataset:
        try:
            dataset = builder.as_dataset(split=name, shuffle_files=False, read_config=read)
        except ValueError as error:
            choices = sorted(builder.info.splits)
            none = "" if key == "train_split" else ", or null for none"
            raise ConfigError(f"dataset.{key}", f"must be a split of {builder.name}{none}", name, choices) from error
        parts = builder.info.splits[name].file_instructions
        shards[key.removesuffix("_split")] = [Shard(Path(part.filename), part.skip, part.take) for part in parts]
        return dataset.map(preprocess, num_parallel_calls=tf.data.AUTOTUNE)

    labels = dict(builder.info.features or {}).get(label_key)
    files = (path for path in Path(builder.data_dir).iterdir() if path.is_file() and path.name != "dataset_info.json")
    train, validation, test = splits
    return Data(
        split(train, "train_split"),
        None if validation is None else split(validation, "validation_split"),
        test=None if test is None else split(test, "test_split"),
        classes=getattr(labels, "num_classes", None),
        name=builder.name,
        version=str(builder.version),
        files=tuple(sorted(files)),
        shards=shards,
        shuffled=shuffled,
        from_stored=from_stored,
    )


def _features(input_key: str, label_key: str, scale: float, resize: tuple[int, int] | None) -> Callable:
    @tf.autograph.experimental.do_not_convert
    def preprocess(features: dict[str, Any]) -> tuple[Any, Any]:
        x = tf.cast(features[input_key], tf.float32) * scale
        if resize is not None:
            x = tf.image.resize(x, resize)
        return x, features[label_key]

    return preprocess

"""Prepares TFDS datasets, and reads their files in a fixed or a shuffled order."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf
from filelock import FileLock
from omegaconf import OmegaConf

from pipeline.common.errors import ConfigError, first_line
from pipeline.dataset import tfds_internals
from pipeline.dataset.splits import Data, Shard, Stored
from pipeline.trust import gate, instantiate

FILES_AT_ONCE = 16  # number of files to interleave if the order of files is shuffled
# Size of the read buffer per file, in bytes. TFDS would use 128 MB for all files.
BUFFER = 2**20
# Number of retries of a download. With TFDS' default of ten, a download without a
# network takes over three minutes to fail.
RETRIES = 5


def read(
    builder: Any,
    download: bool,
    splits: Sequence[str | None],
    make: Callable,
    label_key: str = "label",
) -> Data:
    """Prepare a dataset and return its splits.

    Args:
        builder: a `tfds.core.DatasetBuilder`.
        download: whether to prepare the dataset if it is missing.
        splits: names in TFDS of the training, validation and test splits. None for a
            split that is not to be loaded.
        make: a function from the features of an example to the example.
        label_key: name of the feature that states the number of classes.

    Raises:
        ConfigError: the dataset is missing and cannot or may not be prepared, a split
            does not exist, or there is no training split.
    """
    if splits[0] is None:
        rule = (
            f"must be a split of {builder.name}, because a run needs a training split"
        )
        raise ConfigError("dataset.train_split", rule, None)
    prepare(builder, download)
    names = {}
    for part, name in zip(("train", "validation", "test"), splits, strict=True):
        if name is not None:
            names[part] = name
    stored = {part: _stored(builder, part, name, make) for part, name in names.items()}

    datasets: dict[str, Any] = {"validation": None}
    for part, records in stored.items():
        datasets[part] = records.split
    # If the builder makes examples in its own way, do not make them from the records.
    if tfds_internals.overrides_reading(builder):
        stored = {}

    features = dict(builder.info.features or {})
    return Data(
        **datasets,
        classes=getattr(features.get(label_key), "num_classes", None),
        name=builder.name,
        version=str(builder.version),
        files=files_of(builder),
        shards={part: _shards(builder, name) for part, name in names.items()},
        stored=stored,
    )


def inputs_and_labels(
    input_key: str, label_key: str, scale: float, resize: tuple[int, int] | None
) -> Callable:
    """Return a function from an example's features to (x, y)."""

    @tf.autograph.experimental.do_not_convert
    def preprocess(features: dict[str, Any]) -> tuple[Any, Any]:
        x = tf.cast(features[input_key], tf.float32) * scale
        if resize is not None:
            x = tf.image.resize(x, resize)
        return x, features[label_key]

    return preprocess


def find_builder(name: str | None, builder: str | None, data_dir: str | None) -> Any:
    """Return the `tfds.core.DatasetBuilder` that a config names.

    Args:
        name: name of the dataset in TFDS; see `tfds.builder`.
        builder: dotted name of the user's own builder, in place of `name`, or None.
        data_dir: folder of TFDS datasets, or None for the default of TFDS.

    Raises:
        ConfigError: there is no such dataset, or the builder is not trusted or not a
            builder of TFDS.
    """
    if builder is not None:
        return _own_builder(builder, data_dir)
    import tensorflow_datasets as tfds

    try:
        return tfds.builder(name, data_dir=data_dir)
    except Exception as error:
        rule = f"must be a TFDS dataset ({first_line(error)})"
        raise ConfigError("dataset.name", rule, name) from error


def _own_builder(builder: str, data_dir: str | None) -> Any:
    import tensorflow_datasets as tfds

    node = OmegaConf.create({"_target_": builder})
    cls: Any = instantiate.locate(node, "dataset.builder")
    if not (isinstance(cls, type) and issubclass(cls, tfds.core.DatasetBuilder)):
        rule = "must be a tfds.core.DatasetBuilder"
        raise ConfigError("dataset.builder", rule, builder)
    return cls(data_dir=data_dir)


def may_download(download: bool) -> bool:
    """Return whether both the config and the gate, if any, allow TFDS to download."""
    return download and (gate.in_force is None or gate.in_force.downloads)


def prepare(builder: Any, download: bool) -> None:
    """Prepare the dataset if it is missing.

    Of several processes, one prepares the dataset while the others wait for a lock.

    Raises:
        ConfigError: the dataset is missing and `download` is false, or preparing the
            dataset has failed.
    """
    if builder.is_prepared():
        return
    if not download:
        rule = (
            f"must contain {builder.info.full_name}, already prepared; "
            "dataset.download=true allows downloading and preparing it"
        )
        raise ConfigError("dataset.data_dir", rule, builder.data_dir)

    # Lock the folder that has all versions of the dataset or its TFDS config.
    folder = Path(builder.data_dir).parent
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            _prepare_locked(builder)
    except Exception as error:
        rule = (
            f"could not be downloaded and prepared in {folder.parent} "
            f"({first_line(error)})"
        )
        raise ConfigError("dataset", rule, builder.info.full_name) from error


def _prepare_locked(builder: Any) -> None:
    import tensorflow_datasets as tfds

    # Check again: another process may have prepared the dataset while this one waited.
    if builder.is_prepared():
        builder.info.read_from_directory(builder.data_dir)
        return
    tfds.disable_progress_bar()
    tfds_internals.limit_download_retries(RETRIES)
    builder.download_and_prepare()


def _stored(builder: Any, part: str, name: str, preprocess: Callable) -> Stored:
    """Return a split together with the records from which it is made.

    Args:
        builder: a `tfds.core.DatasetBuilder`, prepared.
        part: `train`, `validation` or `test`.
        name: name of the split in TFDS, or a slice.
        preprocess: a function from the features of an example to the example.
    """
    split = as_dataset(builder, part, name)
    split = split.map(preprocess, num_parallel_calls=tf.data.AUTOTUNE)
    # Convert with AutoGraph, as `map` does: the user's function may branch on tensors.
    converted = tf.function(preprocess)

    @tf.autograph.experimental.do_not_convert
    def make(record: tf.Tensor) -> Any:
        return converted(builder.info.features.deserialize_example(record))

    # Read the records unparsed, so that each worker parses only its own, after
    # shuffling: parsing is half of the cost.
    records_in_order, records_by_seed = _records(builder, name)
    records = records_in_order.apply(
        tf.data.experimental.assert_cardinality(split.cardinality())
    )
    if part != "train":
        return Stored(split, records, make)
    return Stored(split, records, make, records_by_seed)


def as_dataset(builder: Any, part: str, name: str) -> tf.data.Dataset:
    import tensorflow_datasets as tfds

    config = tfds.ReadConfig(
        interleave_cycle_length=1, try_autocache=False, add_tfds_id=False
    )
    try:
        return builder.as_dataset(split=name, shuffle_files=False, read_config=config)
    except ValueError as error:
        rule = f"must be a split of {builder.name}"
        if part != "train":
            rule += ", or null for none"
        raise ConfigError(
            f"dataset.{part}_split", rule, name, sorted(builder.info.splits)
        ) from error


def _records(
    builder: Any, name: str
) -> tuple[tf.data.Dataset, Callable[[tf.Tensor], tf.data.Dataset]]:
    """Return the records of a split, and a function that shuffles their files.

    The records are in the order of the files. The function maps a seed, scalar of
    int64, to the records with their files in an order that depends on the seed.
    """
    instructions = builder.info.splits[name].file_instructions
    names = [str(file.filename) for file in instructions]
    skips_and_takes = [(file.skip, file.take) for file in instructions]

    def files() -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices(
            (
                tf.constant(names, tf.string),
                tf.constant(skips_and_takes, tf.int64, [len(names), 2]),
            )
        )

    @tf.autograph.experimental.do_not_convert
    def records_of(file: tf.Tensor, skip_and_take: tf.Tensor) -> tf.data.Dataset:
        records = tfds_internals.records_of_file(builder, file, BUFFER)
        return records.skip(skip_and_take[0]).take(skip_and_take[1])

    def by_seed(seed: tf.Tensor) -> tf.data.Dataset:
        shuffled = files().shuffle(
            len(names), seed=seed, reshuffle_each_iteration=False
        )
        return shuffled.interleave(
            records_of,
            FILES_AT_ONCE,
            num_parallel_calls=tf.data.AUTOTUNE,
            deterministic=True,
        )

    return files().flat_map(records_of), by_seed


def _shards(builder: Any, name: str) -> list[Shard]:
    instructions = builder.info.splits[name].file_instructions
    return [Shard(Path(file.filename), file.skip, file.take) for file in instructions]


def files_of(builder: Any) -> tuple[Path, ...]:
    """Return the files of a prepared dataset, except `dataset_info.json`."""
    files = []
    for path in Path(builder.data_dir).iterdir():
        if path.is_file() and path.name != "dataset_info.json":
            files.append(path)
    return tuple(sorted(files))

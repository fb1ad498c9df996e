"""Datasets that TFDS prepares: once, in files, which are then read in their order or shuffled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorflow as tf
from filelock import FileLock

from pipeline.common.errors import ConfigError, first_line
from pipeline.dataset.splits import Data, Shard, Stored

FILES_AT_ONCE = 16  # that are read in turn where files are shuffled
BUFFER = 2**20  # bytes that are read of one of them at a time: of all TFDS would keep 128 MB


def prepare(builder: Any, download: bool) -> None:
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


def read(
    builder: Any,
    splits: tuple[str, str | None, str | None],
    preprocess: Callable,
    label_key: str = "label",
) -> Data:
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core import file_adapters

    read = tfds.ReadConfig(interleave_cycle_length=1, try_autocache=False, add_tfds_id=False)
    adapter = file_adapters.ADAPTER_FOR_FORMAT[builder.info.file_format or file_adapters.DEFAULT_FILE_FORMAT]

    def files_of(name: str) -> tf.data.Dataset:
        parts = builder.info.splits[name].file_instructions
        names = tf.constant([str(part.filename) for part in parts], tf.string)
        counts = tf.constant([(part.skip, part.take) for part in parts], tf.int64, [len(parts), 2])
        return tf.data.Dataset.from_tensor_slices((names, counts))

    @tf.autograph.experimental.do_not_convert
    def records_of(name: tf.Tensor, count: tf.Tensor) -> tf.data.Dataset:
        return adapter.make_tf_data(name, BUFFER).skip(count[0]).take(count[1])

    def shuffled(seed: tf.Tensor) -> tf.data.Dataset:
        """Read the records as they lie in the files: TFDS would parse each before it is shuffled, at half of all cost.

        One of each of 16 files in turn.
        """
        files = files_of(train)
        return files.shuffle(files.cardinality(), seed=seed, reshuffle_each_iteration=False).interleave(
            records_of,
            cycle_length=FILES_AT_ONCE,
            num_parallel_calls=tf.data.AUTOTUNE,
            deterministic=True,
        )

    converted = tf.function(preprocess)  # as `map` below does: it may be of the user, with an `if` of a tensor

    @tf.autograph.experimental.do_not_convert
    def make(record: tf.Tensor) -> tuple:
        example: tuple = converted(builder.info.features.deserialize_example(record))
        return example

    shards: dict[str, list[Shard]] = {}
    stored: dict[str, Stored] = {}

    def split(name: str, key: str) -> tf.data.Dataset:
        try:
            dataset = builder.as_dataset(split=name, shuffle_files=False, read_config=read)
        except ValueError as error:
            choices = sorted(builder.info.splits)
            none = "" if key == "train_split" else ", or null for none"
            raise ConfigError(f"dataset.{key}", f"must be a split of {builder.name}{none}", name, choices) from error
        parts = builder.info.splits[name].file_instructions
        shards[key.removesuffix("_split")] = [Shard(Path(part.filename), part.skip, part.take) for part in parts]
        dataset = dataset.map(preprocess, num_parallel_calls=tf.data.AUTOTUNE)
        records = (
            files_of(name).flat_map(records_of).apply(tf.data.experimental.assert_cardinality(dataset.cardinality()))
        )
        by_files = shuffled if key == "train_split" else None
        stored[key.removesuffix("_split")] = Stored(dataset, records, make, by_files)
        return dataset

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
        stored=stored,
    )

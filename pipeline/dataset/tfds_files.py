"""Datasets that TFDS prepares: downloaded and written to files once, then read in order or by shuffled files."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf
from filelock import FileLock

from pipeline.common.errors import ConfigError, first_line
from pipeline.dataset.splits import Data, Shard, Stored

FILES_AT_ONCE = 16  # files that are read in turn where files are shuffled
BUFFER = (
    2**20
)  # bytes that are read from a file at a time: for all of them TFDS would keep 128 MB


def _prepare(builder: Any, download: bool) -> None:
    """Prepare the dataset if it is not there and may be downloaded; one process does, and others wait for it."""
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core.download import downloader

    if builder.is_prepared():
        return
    if not download:
        rule = f"must hold {builder.info.full_name}, prepared; dataset.download=true allows to download and prepare it"
        raise ConfigError("dataset.data_dir", rule, builder.data_dir)
    folder = Path(
        builder.data_dir
    ).parent  # of the dataset or its config, whatever the version
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if (
                builder.is_prepared()
            ):  # by another process, after this one's builder had looked
                builder.info.read_from_directory(builder.data_dir)
            else:
                tfds.disable_progress_bar()
                downloader.MAX_RETRIES = (
                    5  # ten take over three minutes to find that there is no network
                )
                builder.download_and_prepare()
    except Exception as error:
        rule = f"could not be downloaded and prepared in {folder.parent} ({first_line(error)})"
        raise ConfigError("dataset", rule, builder.info.full_name) from error


def read(
    builder: Any,
    download: bool,
    splits: Sequence[str | None],
    make: Callable,
    label_key: str = "label",
) -> Data:
    """Prepare the dataset; return its splits for training, validation and test, with `make` mapped over them."""
    import tensorflow_datasets as tfds

    _prepare(builder, download)
    named = {
        part: name
        for part, name in zip(("train", "validation", "test"), splits, strict=True)
        if name is not None
    }
    config = tfds.ReadConfig(
        interleave_cycle_length=1, try_autocache=False, add_tfds_id=False
    )
    stored = {
        part: _stored(builder, config, part, name, make) for part, name in named.items()
    }
    parts: dict[str, Any] = {"validation": None} | {
        part: each.split for part, each in stored.items()
    }
    usual, own = tfds.core.GeneratorBasedBuilder, type(builder)
    as_usual = (own.as_dataset, own._as_dataset) == (
        usual.as_dataset,
        usual._as_dataset,
    )
    files = (
        path
        for path in Path(builder.data_dir).iterdir()
        if path.is_file() and path.name != "dataset_info.json"
    )
    return Data(
        **parts,
        classes=getattr(
            dict(builder.info.features or {}).get(label_key), "num_classes", None
        ),
        name=builder.name,
        version=str(builder.version),
        files=tuple(sorted(files)),
        shards={part: _shards(builder, name) for part, name in named.items()},
        stored=stored
        if as_usual
        else {},  # else they do not show what it makes of them
    )


def _stored(
    builder: Any, config: Any, part: str, name: str, preprocess: Callable
) -> Stored:
    try:
        dataset = builder.as_dataset(
            split=name, shuffle_files=False, read_config=config
        )
    except ValueError as error:
        rule = f"must be a split of {builder.name}{'' if part == 'train' else ', or null for none'}"
        raise ConfigError(
            f"dataset.{part}_split", rule, name, sorted(builder.info.splits)
        ) from error
    dataset = dataset.map(preprocess, num_parallel_calls=tf.data.AUTOTUNE)
    converted = tf.function(
        preprocess
    )  # as `map` does: the user's may have an `if` of a tensor

    @tf.autograph.experimental.do_not_convert
    def make(record: tf.Tensor) -> Any:
        return converted(builder.info.features.deserialize_example(record))

    records, shuffled = _records(builder, name)
    records = records.apply(
        tf.data.experimental.assert_cardinality(dataset.cardinality())
    )
    return Stored(dataset, records, make, shuffled if part == "train" else None)


def _records(
    builder: Any, name: str
) -> tuple[tf.data.Dataset, Callable[[tf.Tensor], tf.data.Dataset]]:
    """Return the records of a split in the order of its files, and a function from a seed to them by shuffled files."""
    # TFDS would parse each record before it is shuffled, which is half of the total cost.
    from tensorflow_datasets.core import file_adapters

    adapter = file_adapters.ADAPTER_FOR_FORMAT[
        builder.info.file_format or file_adapters.DEFAULT_FILE_FORMAT
    ]
    of_files = builder.info.splits[name].file_instructions
    names, counts = (
        [str(file.filename) for file in of_files],
        [(file.skip, file.take) for file in of_files],
    )

    def files() -> tf.data.Dataset:
        tensors = (
            tf.constant(names, tf.string),
            tf.constant(counts, tf.int64, [len(names), 2]),
        )
        return tf.data.Dataset.from_tensor_slices(tensors)

    @tf.autograph.experimental.do_not_convert
    def records_of(file: tf.Tensor, count: tf.Tensor) -> tf.data.Dataset:
        return adapter.make_tf_data(file, BUFFER).skip(count[0]).take(count[1])

    def shuffled(seed: tf.Tensor) -> tf.data.Dataset:
        order = files().shuffle(len(names), seed=seed, reshuffle_each_iteration=False)
        return order.interleave(
            records_of,
            FILES_AT_ONCE,
            num_parallel_calls=tf.data.AUTOTUNE,
            deterministic=True,
        )

    return files().flat_map(records_of), shuffled


def _shards(builder: Any, name: str) -> list[Shard]:
    return [
        Shard(Path(file.filename), file.skip, file.take)
        for file in builder.info.splits[name].file_instructions
    ]

"""Private interfaces of TFDS that are used here, as of TFDS 4.9.

tests/dataset/test_tfds_internals.py checks that they are unchanged, and in which
version.
"""

from typing import Any

import tensorflow as tf

READ_IN = "4.9"  # the version of TFDS in whose source this was read


def limit_download_retries(retries: int) -> None:
    """Let a download fail after this many retries; TFDS' default is ten."""
    from tensorflow_datasets.core.download import downloader

    downloader.MAX_RETRIES = retries


def records_of_file(
    builder: Any, file: tf.Tensor, buffer_bytes: int
) -> tf.data.Dataset:
    """Return the serialized records of one of the builder's files, in their order.

    Args:
        builder: a `tfds.core.DatasetBuilder`.
        file: path of the file, scalar string.
        buffer_bytes: how much is read from the file at a time.
    """
    from tensorflow_datasets.core import file_adapters

    file_format = builder.info.file_format or file_adapters.DEFAULT_FILE_FORMAT
    adapter = file_adapters.ADAPTER_FOR_FORMAT[file_format]
    return adapter.make_tf_data(file, buffer_bytes)


def overrides_reading(builder: Any) -> bool:
    """Return whether a builder has its own way of making examples from its files."""
    import tensorflow_datasets as tfds

    usual = tfds.core.GeneratorBasedBuilder
    cls = type(builder)
    # Not `is not`: TFDS wraps `as_dataset`, and each access makes a new wrapper.
    return cls.as_dataset != usual.as_dataset or cls._as_dataset != usual._as_dataset

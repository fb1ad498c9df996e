"""Uses of private interfaces of TFDS, as of TFDS 4.9.

tests/dataset/test_tfds_internals.py checks the version and that the interfaces are
unchanged.
"""

from typing import Any

import tensorflow as tf

READ_IN = "4.9"  # the version of TFDS for which these uses were written


def limit_download_retries(retries: int) -> None:
    """Set the number of retries after which a download fails. TFDS' default is ten."""
    from tensorflow_datasets.core.download import downloader

    downloader.MAX_RETRIES = retries


def records_of_file(
    builder: Any, file: tf.Tensor, buffer_bytes: int
) -> tf.data.Dataset:
    """Return the serialized records in a file of the builder, in order.

    Args:
        builder: a `tfds.core.DatasetBuilder`.
        file: path of the file, scalar string.
        buffer_bytes: size of the read buffer.
    """
    from tensorflow_datasets.core import file_adapters

    file_format = builder.info.file_format or file_adapters.DEFAULT_FILE_FORMAT
    adapter = file_adapters.ADAPTER_FOR_FORMAT[file_format]
    return adapter.make_tf_data(file, buffer_bytes)


def overrides_reading(builder: Any) -> bool:
    """Return whether a builder overrides how TFDS makes examples from files."""
    import tensorflow_datasets as tfds

    usual = tfds.core.GeneratorBasedBuilder
    cls = type(builder)
    # Compare by value, as each access to `as_dataset` makes a new wrapper object.
    return cls.as_dataset != usual.as_dataset or cls._as_dataset != usual._as_dataset

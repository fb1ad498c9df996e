"""What pipeline/dataset/tfds_internals.py uses of TFDS still is as it was read."""

from __future__ import annotations

from importlib import metadata

import numpy as np
import pytest
import tensorflow as tf
from tensorflow_datasets.core.download import downloader

from pipeline.dataset import tfds_internals
from pipeline.dataset.builtin.digits import Digits

WHERE = "see pipeline/dataset/tfds_internals.py"


class DecodingDigits(Digits):
    """Makes its examples in a way of its own."""

    # TFDS looks for a builder's files beside its module, which has to be in a package.
    __module__ = Digits.__module__

    def _as_dataset(self, *args, **options):
        return super()._as_dataset(*args, **options)


@pytest.fixture(scope="module")
def builder(tmp_path_factory):
    digits = Digits(data_dir=tmp_path_factory.mktemp("digits"))
    digits.download_and_prepare()
    return digits


def test_the_version_is_the_one_that_was_read():
    installed = metadata.version("tensorflow-datasets")
    assert installed.startswith(f"{tfds_internals.READ_IN}."), WHERE


def test_a_download_has_as_many_retries_as_were_set(monkeypatch):
    retries = []

    def note_retries(session, url, **options):
        retries.append(session.get_adapter(url).max_retries.total)
        raise InterruptedError

    monkeypatch.setattr(downloader.requests.Session, "get", note_retries)
    # The value of this process is set back after the test.
    monkeypatch.setattr(downloader, "MAX_RETRIES", downloader.MAX_RETRIES)
    tfds_internals.limit_download_retries(3)
    with (
        pytest.raises(InterruptedError),
        downloader._open_with_requests("https://localhost/file"),
    ):
        pass
    assert retries == [3], WHERE


def test_the_records_of_a_file_are_the_serialized_examples_in_order(builder):
    (file,) = builder.info.splits["validation"].filenames
    path = tf.constant(f"{builder.data_dir}/{file}")
    records = tfds_internals.records_of_file(builder, path, 2**20)
    features = records.map(builder.info.features.deserialize_example)
    labels = [int(example["label"]) for example in features]
    expected = builder.as_dataset(split="validation", shuffle_files=False)
    assert labels == [int(example["label"]) for example in expected], WHERE
    assert len(np.unique(labels)) == 10


def test_a_builder_that_reads_in_its_own_way_is_recognized(builder):
    assert not tfds_internals.overrides_reading(builder), WHERE
    own = DecodingDigits(data_dir=builder._data_dir_root)
    assert tfds_internals.overrides_reading(own), WHERE

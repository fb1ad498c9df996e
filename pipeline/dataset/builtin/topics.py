"""Python's help topics, from `pydoc_data.topics`, as a TFDS dataset."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds

from pipeline.dataset import tfds_files
from pipeline.dataset.splits import Data
from pipeline.dataset.texts.tokenizer import by_bytes

MOST = 128  # maximum size of a piece in bytes
# Name of the TFDS config. Help topics differ between versions of Python, so each
# version has its own config.
PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"


def topics(
    data_dir: str | None = None,
    download: bool = True,
    test_split: str | None = None,
    validation_split: str | None = "validation",
) -> Data:
    """Load Python's help topics as byte sequences, for next-byte prediction.

    x and y are int32 vectors of equal length, at most 127. y is x shifted by one byte,
    so that each byte is predicted from the bytes before it. A byte b is represented by
    b + 1, since 0 is padding.

    Args:
        data_dir: folder of TFDS datasets, or None for the default of TFDS.
        download: whether to prepare the dataset if it is missing.
        test_split: name of the test split in TFDS, or None to load none.
        validation_split: the same for the validation split.

    Raises:
        ConfigError: a split is not found, or the dataset is missing and may not be
            prepared.
    """

    @tf.autograph.experimental.do_not_convert
    def preprocess(features: dict[str, Any]) -> tuple[Any, Any]:
        tokens = tf.cast(features["bytes"], tf.int32) + 1
        return tokens[:-1], tokens[1:]

    data = tfds_files.read(
        Topics(data_dir=data_dir),
        download,
        ("train", validation_split, test_split),
        preprocess,
    )
    return replace(data, classes=257, decode=by_bytes().text)


class Topics(tfds.core.GeneratorBasedBuilder):
    """Paragraphs of Python's help topics in pieces of at most 128 bytes. Of every ten
    topics, eight are for training, one for validation and one for the test.
    """

    VERSION = tfds.core.Version("1.0.0")
    # TFDS requires this class attribute.
    BUILDER_CONFIGS = [tfds.core.BuilderConfig(name=PYTHON)]  # noqa: RUF012

    def _info(self) -> tfds.core.DatasetInfo:
        text = tfds.features.Tensor(shape=(None,), dtype=np.uint8)
        return self.dataset_info_from_configs(
            description=" ".join(str(self.__doc__).split()),
            features=tfds.features.FeaturesDict({"bytes": text}),
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        from pydoc_data.topics import topics

        texts_by_split: dict[str, list[str]] = {
            "train": [],
            "validation": [],
            "test": [],
        }
        for number, name in enumerate(sorted(topics)):
            split = {0: "validation", 1: "test"}.get(number % 10, "train")
            texts_by_split[split].append(topics[name])
        return {
            split: self._generate_examples(texts)
            for split, texts in texts_by_split.items()
        }

    def _generate_examples(
        self, texts: list[str]
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        pieces = (piece for piece in _pieces(texts) if len(piece) > 1)
        for number, piece in enumerate(pieces):
            yield number, {"bytes": np.frombuffer(piece, np.uint8)}


def _pieces(texts: list[str]) -> Iterator[bytes]:
    """Yield the paragraphs of help topics, cut into pieces of at most `MOST` bytes."""
    for text in texts:
        for paragraph in text.split("\n\n"):
            content = paragraph.strip().encode()
            for start in range(0, len(content), MOST):
                yield content[start : start + MOST]

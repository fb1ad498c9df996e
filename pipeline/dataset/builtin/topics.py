"""The help texts of Python's standard library (`pydoc_data.topics`), in pieces, as a TFDS dataset."""

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

MOST = 128  # bytes of a piece
PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"  # the texts differ


class Topics(tfds.core.GeneratorBasedBuilder):
    """Paragraphs of the texts, cut where longer than 128 bytes; every tenth text is for validation, or for the test."""

    VERSION = tfds.core.Version("1.0.0")
    BUILDER_CONFIGS = [tfds.core.BuilderConfig(name=PYTHON)]  # noqa: RUF012  (as TFDS reads it)

    def _info(self) -> tfds.core.DatasetInfo:
        features = tfds.features.FeaturesDict(
            {"bytes": tfds.features.Tensor(shape=(None,), dtype=np.uint8)}
        )
        return self.dataset_info_from_configs(
            description=self.__doc__, features=features
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        from pydoc_data.topics import topics

        texts = [topics[name] for name in sorted(topics)]
        parts: dict[str, list[str]] = {"train": [], "validation": [], "test": []}
        for number, text in enumerate(texts):
            parts[{0: "validation", 1: "test"}.get(number % 10, "train")].append(text)
        return {name: self._generate_examples(texts) for name, texts in parts.items()}

    def _generate_examples(
        self, texts: list[str]
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        paragraphs = (
            paragraph.strip().encode()
            for text in texts
            for paragraph in text.split("\n\n")
        )
        pieces = (
            each[start : start + MOST]
            for each in paragraphs
            for start in range(0, len(each), MOST)
        )
        for number, piece in enumerate(piece for piece in pieces if len(piece) > 1):
            yield number, {"bytes": np.frombuffer(piece, np.uint8)}

"""The handwritten digits bundled with scikit-learn, as a TFDS dataset.

Source: UCI repository, Alpaydin and Kaynak 1998.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from pipeline.dataset import tfds_files
from pipeline.dataset.splits import Data


def digits(
    data_dir: str | None = None,
    download: bool = True,
    test_split: str | None = None,
    validation_split: str | None = "validation",
) -> Data:
    """Load scikit-learn's handwritten digits, with inputs from 0 to 1.

    The split `train` has 1437 images; `validation` and `test` have 180 each.

    Args:
        data_dir: folder of TFDS datasets, or None for the default of TFDS.
        download: whether to prepare the dataset if it is missing.
        test_split: name of the test split in TFDS, or None to load none.
        validation_split: the same for the validation split.

    Raises:
        ConfigError: a split is not found, or the dataset is missing and may not be
            prepared.
    """
    return tfds_files.read(
        Digits(data_dir=data_dir),
        download,
        ("train", validation_split, test_split),
        tfds_files.inputs_and_labels("image", "label", 1 / 16, None),
    )


class Digits(tfds.core.GeneratorBasedBuilder):
    """1797 images of 8×8×1 with values 0 … 16, in fixed stratified splits of 1437, 180
    and 180.
    """

    VERSION = tfds.core.Version("1.0.0")

    def _info(self) -> tfds.core.DatasetInfo:
        image = tfds.features.Tensor(shape=(8, 8, 1), dtype=np.uint8)
        label = tfds.features.ClassLabel(num_classes=10)
        return self.dataset_info_from_configs(
            description=" ".join(str(self.__doc__).split()),
            features=tfds.features.FeaturesDict({"image": image, "label": label}),
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        # Import scikit-learn only when the dataset is prepared: the import takes a
        # second.
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        digits = load_digits()
        train, rest = train_test_split(
            np.arange(1797), test_size=360, random_state=0, stratify=digits.target
        )
        validation, test = train_test_split(
            rest, test_size=180, random_state=0, stratify=digits.target[rest]
        )
        splits = {"train": train, "validation": validation, "test": test}
        return {
            name: self._generate_examples(digits, indices)
            for name, indices in splits.items()
        }

    def _generate_examples(
        self, digits: Any, indices: np.ndarray
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        for index in sorted(indices.tolist()):
            image = digits.images[index, ..., None].astype(np.uint8)
            yield index, {"image": image, "label": int(digits.target[index])}

"""Finds the texts of each split: by files, by splits of TFDS, or by shares."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.common import file_patterns
from pipeline.common.errors import ConfigError
from pipeline.dataset import tfds_files
from pipeline.dataset.texts import sources
from pipeline.dataset.texts.sources import Group, Text

# A split as the config has it: files or a split of TFDS, a share of the training texts,
# or None.
Split = str | Sequence[str] | float | None


class Shares(NamedTuple):
    """A range of texts between two shares, from 0 to 1.

    The place of a text is a hash of it. So it depends on nothing else: equal texts are
    in the same range, and a text that is added to the others moves none of them.
    """

    first: float = 0.0
    end: float = 1.0

    def contains(self, text: Text) -> bool:
        """Return whether a text is in the range."""
        digest = hashlib.blake2b(text.content.encode(), digest_size=6).digest()
        place = int.from_bytes(digest) / 2**48
        return self.first <= place < self.end


ALL = Shares()
_KEYS = {
    "train": "dataset.files",
    "validation": "dataset.validation_split",
    "test": "dataset.test_split",
}


@dataclass(frozen=True)
class TextSplit:
    """The texts of a split.

    Attributes:
        groups: the texts, in groups of one or a few files each.
        shares: the range of these texts that is in the split.
        key: the key of the config that selects the split, for errors.
    """

    groups: Sequence[Group]
    shares: Shares
    key: str

    def texts(self, group: int) -> Iterator[Text]:
        """Yield the texts of a group that are in the split."""
        for text in self.groups[group]:
            if self.shares == ALL or self.shares.contains(text):
                yield text

    def all_texts(self) -> Iterator[Text]:
        """Yield the texts of all groups that are in the split."""
        for group in range(len(self.groups)):
            yield from self.texts(group)


@dataclass(frozen=True)
class Corpus:
    """Texts in splits.

    Attributes:
        name, version: name and version of the dataset; no version for plain files.
        files: the files that have the texts.
        splits: the texts of `train` and of the other splits, by the split's name.
    """

    name: str
    version: str
    files: Sequence[Path]
    splits: Mapping[str, TextSplit]


class Format(NamedTuple):
    """How texts are stored.

    Attributes:
        sample_by: what counts as one text of a file, one of `sources.SAMPLES`.
        text_key: the field of a `.jsonl` file, or the feature of a TFDS dataset.
    """

    sample_by: str
    text_key: str


def of_files(
    files: str | Sequence[str], validation: Split, test: Split, form: Format
) -> Corpus:
    """Return the texts of some files.

    Files that `validation` or `test` name are not trained on.

    Args:
        files: path, folder or pattern, or a list of them; see `file_patterns.matching`.
        validation: the same for the validation split, or a share of the texts, or None.
        test: the same for the test split.
        form: how the files store the texts.

    Raises:
        ConfigError: a pattern matches no file, no file is left for training, a file is
            in two splits, or the shares are out of range.
    """
    shares = _shares(validation, test)
    own_files: dict[str, list[Path]] = {}
    for part, split in (("validation", validation), ("test", test)):
        if split is not None and part not in shares:
            own_files[part] = _matching(split, _KEYS[part])
    not_trained = _resolved(own_files)
    training = []
    for path in _matching(files, _KEYS["train"]):
        if path.resolve() not in not_trained:
            training.append(path)
    if not training:
        rule = "must match files to train on, other than those of the other splits"
        raise ConfigError(_KEYS["train"], rule, files)

    groups = sources.file_groups(training, *form, _KEYS["train"])
    splits = {"train": TextSplit(groups, shares["train"], _KEYS["train"])}
    for part in ("validation", "test"):
        if part in own_files:
            own_groups = sources.file_groups(own_files[part], *form, _KEYS[part])
            splits[part] = TextSplit(own_groups, ALL, _KEYS[part])
        elif part in shares:
            splits[part] = TextSplit(groups, shares[part], _KEYS[part])
    all_files = [*training]
    for paths in own_files.values():
        all_files += paths
    return Corpus("text_files", "", all_files, splits)


def of_tfds(
    builder: Any, train: str, validation: Split, test: Split, form: Format
) -> Corpus:
    """Return the texts of a TFDS dataset.

    Args:
        builder: a `tfds.core.DatasetBuilder`, prepared.
        train: name of the training split in TFDS, or a slice.
        validation: the same for the validation split, or a share of the training texts,
            or None.
        test: the same for the test split.
        form: the feature that has the text.

    Raises:
        ConfigError: there is no such split or feature, or the shares are out of range.
    """
    shares = _shares(validation, test)
    key = "dataset.train_split"
    if not isinstance(train, str):
        raise ConfigError(key, f"must be a split of {builder.name}", train)
    groups = sources.tfds_groups(builder, "train", train, form.text_key, key)
    splits = {"train": TextSplit(groups, shares["train"], key)}
    for part, split in (("validation", validation), ("test", test)):
        if part in shares:
            splits[part] = TextSplit(groups, shares[part], _KEYS[part])
        elif isinstance(split, str):
            own_groups = sources.tfds_groups(
                builder, part, split, form.text_key, _KEYS[part]
            )
            splits[part] = TextSplit(own_groups, ALL, _KEYS[part])
        elif split is not None:
            rule = f"must be a split of {builder.name}, a share of the texts, or null"
            raise ConfigError(_KEYS[part], rule, split)
    files = tfds_files.files_of(builder)
    return Corpus(builder.name, str(builder.version), files, splits)


def _shares(validation: Split, test: Split) -> dict[str, Shares]:
    """Return the range of the training texts that each split with a share gets.

    The training split gets the rest.

    Raises:
        ConfigError: a share is not between 0 and 1, or nothing is left for training.
    """
    shares = {}
    end = 0.0
    for part, split in (("validation", validation), ("test", test)):
        if isinstance(split, bool) or not isinstance(split, int | float):
            continue
        first = end
        end += split
        if not split > 0 or not end < 1:
            rule = "must be a share above 0 and below 1 that leaves texts to train on"
            raise ConfigError(_KEYS[part], rule, split)
        shares[part] = Shares(first, end)
    shares["train"] = Shares(end, 1.0)
    return shares


def _matching(patterns: Any, key: str) -> list[Path]:
    """Return the files that a pattern or several of them match, each file once.

    Raises:
        ConfigError: a pattern is not a string, or matches no file.
    """
    entries = patterns if isinstance(patterns, list | tuple) else [patterns]
    paths: dict[Path, None] = {}  # an ordered set
    if not entries:
        raise ConfigError(key, "must name a file", patterns)
    for pattern in entries:
        if not isinstance(pattern, str):
            rule = (
                "must be the path of a file or a folder, a pattern, or a list of them"
            )
            raise ConfigError(key, rule, pattern)
        matches = file_patterns.matching(pattern)
        if not matches:
            suffixes = " or ".join(file_patterns.TEXT_SUFFIXES)
            rule = (
                f"must match a file: a path, a folder with {suffixes} files below it, "
                "or a pattern"
            )
            raise ConfigError(key, rule, pattern)
        paths |= dict.fromkeys(matches)
    return list(paths)


def _resolved(files: Mapping[str, Sequence[Path]]) -> set[Path]:
    """Return the resolved paths of the files of some splits.

    Raises:
        ConfigError: a file is in two splits.
    """
    resolved: set[Path] = set()
    for part, paths in files.items():
        for path in paths:
            if path.resolve() in resolved:
                rule = "must not name a file of another split"
                raise ConfigError(_KEYS[part], rule, str(path))
        resolved |= {path.resolve() for path in paths}
    return resolved

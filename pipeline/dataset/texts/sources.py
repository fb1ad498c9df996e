"""Reads texts one after the other, from files or from a TFDS dataset."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import tensorflow as tf

from pipeline.common.errors import ConfigError, described
from pipeline.dataset import tfds_files

# What counts as one text of a file; named as in `load_dataset("text", sample_by=…)` of
# Hugging Face.
SAMPLES = ("line", "paragraph", "document")
_MOST_GROUPS = 256  # number of groups, and so of files of a token cache, per split


class Text(NamedTuple):
    """A text, and where it is from.

    Attributes:
        content: the text.
        unit, number, source: its place, such as line 3 of a file.
    """

    content: str
    unit: str
    number: int
    source: str

    @property
    def place(self) -> str:
        return f"{self.unit} {self.number} of {self.source}"


class Group(Protocol):
    """Texts that are read one after the other in a fixed order, any number of times."""

    def __iter__(self) -> Iterator[Text]: ...

    def identity(self, checksums: Mapping[Path, str]) -> object:
        """Return what determines the texts, as a JSON value.

        Args:
            checksums: the checksums of all files.
        """
        ...


@dataclass(frozen=True)
class FileTexts:
    """The texts of some files, in the order of the files.

    In a `.jsonl` file, each line has one text. In any other file, blank texts are left
    out, and line ends are read as `\\n`.

    Attributes:
        paths: the files.
        sample_by: what counts as a text, one of `SAMPLES`. A paragraph ends at a blank
            line.
        text_key: the field of a `.jsonl` file that has the text.
        key: the key of the config that names the files, for errors.
    """

    paths: Sequence[Path]
    sample_by: str
    text_key: str
    key: str

    def __iter__(self) -> Iterator[Text]:
        """Yield the texts.

        Raises:
            ConfigError: a file cannot be read, is not UTF-8, or has a line that is not
                JSON with the field.
        """
        for path in self.paths:
            try:
                yield from self._texts_of(path)
            except UnicodeDecodeError as error:
                line = _line_that_is_not_utf8(path)
                rule = f"must name files in UTF-8: line {line} is not ({error.reason})"
                raise ConfigError(self.key, rule, str(path)) from error
            except OSError as error:
                rule = f"must name files that can be read ({described(error)})"
                raise ConfigError(self.key, rule, str(path)) from error

    def identity(self, checksums: Mapping[Path, str]) -> object:
        """Return the kinds and the checksums of the files; see `Group.identity`."""
        return [[path.suffix == ".jsonl", checksums[path]] for path in self.paths]

    def _texts_of(self, path: Path) -> Iterator[Text]:
        # A byte order mark, which some editors write, is not a part of the text.
        with path.open(encoding="utf-8-sig") as lines:
            if path.suffix == ".jsonl":
                yield from self._json_texts(path, lines)
            elif self.sample_by == "document":
                content = lines.read()
                if content.strip():
                    yield Text(content, "line", 1, str(path))
            elif self.sample_by == "paragraph":
                yield from _paragraphs(path, lines)
            else:
                yield from _lines(path, lines)

    def _json_texts(self, path: Path, lines: Iterable[str]) -> Iterator[Text]:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            content = _json_field(line, self.text_key)
            if content is None:
                rule = (
                    f"must name files whose lines are JSON with a text in the field "
                    f"{self.text_key!r} (dataset.text_key): line {number} is not such "
                    "a line"
                )
                raise ConfigError(self.key, rule, str(path))
            yield Text(content, "line", number, str(path))


@dataclass(frozen=True)
class TfdsTexts:
    """The texts of a split of a TFDS dataset, in the order of the split.

    Attributes:
        texts: the texts as a dataset of strings.
        part: the part of the split, as TFDS names it.
        name: the name of the split and the dataset, for errors.
        key: the key of the config that names the split, for errors.
    """

    texts: tf.data.Dataset
    part: str
    name: str
    key: str

    def __iter__(self) -> Iterator[Text]:
        """Yield the texts.

        Raises:
            ConfigError: a text is not UTF-8.
        """
        for number, content in enumerate(self.texts.as_numpy_iterator()):
            try:
                decoded = content.decode()
            except UnicodeDecodeError as error:
                rule = (
                    f"must have texts in UTF-8: example {number} is not "
                    f"({error.reason})"
                )
                raise ConfigError(self.key, rule, self.name) from error
            yield Text(decoded, "example", number, self.name)

    def identity(self, checksums: Mapping[Path, str]) -> object:
        """Return the part of the split; see `Group.identity`."""
        del checksums
        return self.part


def file_groups(
    paths: Sequence[Path], sample_by: str, text_key: str, key: str
) -> list[FileTexts]:
    """Return the texts of files in groups: one file each, or several in a row.

    For the arguments, see `FileTexts`.
    """
    size = -(-len(paths) // _MOST_GROUPS)
    groups = []
    for start in range(0, len(paths), size):
        members = paths[start : start + size]
        groups.append(FileTexts(members, sample_by, text_key, key))
    return groups


def tfds_groups(
    builder: Any, part: str, split: str, text_key: str, key: str
) -> list[TfdsTexts]:
    """Return the texts of a TFDS split in groups, as many as it has files.

    Args:
        builder: a `tfds.core.DatasetBuilder`, prepared.
        part: `train`, `validation` or `test`, for errors.
        split: name of the split in TFDS, or a slice.
        text_key: the feature with the text.
        key: the key of the config that names the split, for errors.

    Raises:
        ConfigError: there is no such split or no such feature.
    """
    import tensorflow_datasets as tfds

    examples = tfds_files.as_dataset(builder, part, split)
    spec = examples.element_spec.get(text_key)
    if spec != tf.TensorSpec([], tf.string):
        rule = f"must be a feature of {builder.name} with one text per example"
        raise ConfigError(
            "dataset.text_key", rule, text_key, sorted(examples.element_spec)
        )
    shards = len(builder.info.splits[split].file_instructions)
    count = min(shards, int(examples.cardinality()), _MOST_GROUPS)
    groups = []
    for subsplit in tfds.even_splits(split, max(1, count)):
        examples = tfds_files.as_dataset(builder, part, subsplit)
        texts = examples.map(lambda features: features[text_key])
        name = f"the split {split} of {builder.name}"
        groups.append(TfdsTexts(texts, str(subsplit), name, key))
    return groups


def _lines(path: Path, lines: Iterable[str]) -> Iterator[Text]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield Text(line.removesuffix("\n"), "line", number, str(path))


def _paragraphs(path: Path, lines: Iterable[str]) -> Iterator[Text]:
    paragraph: list[str] = []
    begin = 1
    for number, line in enumerate(lines, start=1):
        if line.strip():
            if not paragraph:
                begin = number
            paragraph.append(line)
        elif paragraph:
            yield _joined(paragraph, begin, path)
            paragraph = []
    if paragraph:
        yield _joined(paragraph, begin, path)


def _joined(lines: Sequence[str], begin: int, path: Path) -> Text:
    return Text("".join(lines).removesuffix("\n"), "line", begin, str(path))


def _json_field(line: str, name: str) -> str | None:
    """Return the text in a field of a line of JSON, or None if there is none."""
    try:
        fields = json.loads(line)
    except ValueError:
        return None
    if not isinstance(fields, dict):
        return None
    content = fields.get(name)
    if not isinstance(content, str):
        return None
    try:
        content.encode()
    except UnicodeEncodeError:  # half of an escaped surrogate pair is not a character
        return None
    return content


def _line_that_is_not_utf8(path: Path) -> int:
    """Return the number of the first line of a file that is not UTF-8."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return number
    return 1

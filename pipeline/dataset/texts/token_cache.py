"""Keeps the tokens of texts in a folder on disk, so that they are computed only once.

    PARENT/tokens-<key>/index.json             numbers of texts and pieces
    PARENT/tokens-<key>/train-00000.tfrecord   pieces of the first group, and so on

The key is a checksum of everything that determines the tokens. The files are written to
a temporary folder, which gets its final name when it is complete. So a process that is
killed leaves nothing that looks complete. Of several processes, one writes the files,
and the others wait for it.
"""

import hashlib
import json
import shutil
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import tensorflow as tf
from filelock import FileLock

from pipeline.common import durable, recorded
from pipeline.common.errors import ConfigError, first_line, say
from pipeline.dataset.texts.pieces import (
    Chunk,
    GroupCounts,
    SplitTokens,
    TokenizedSplit,
)

_KEY = "dataset.token_cache"
_FORMAT = 1  # version of the files, and of how texts are cut
_INDEX = "index.json"
_FORM = [{"texts": int, "short": int, "pieces": int}]  # of a split, by group
_BUFFER = 2**20  # size of the read buffer per file, in bytes
# The features of a record, which has one chunk.
_FEATURES = {
    "tokens": tf.io.FixedLenFeature([], tf.string),
    "lengths": tf.io.FixedLenSequenceFeature([], tf.int64, allow_missing=True),
}


def cached(
    parent: Path, identity: Mapping[str, object], splits: Mapping[str, TokenizedSplit]
) -> dict[str, SplitTokens]:
    """Return the tokens of splits from the cache; write the cache if it is missing.

    Args:
        parent: the folder of all caches.
        identity: all that decides the tokens and the pieces, as values of JSON.
        splits: the splits, by name.

    Raises:
        ConfigError: the cache cannot be written or read, or the texts cannot be read or
            tokenized.
    """
    text = json.dumps({"format": _FORMAT, **identity}, sort_keys=True)
    key = hashlib.sha256(text.encode()).hexdigest()[:32]
    folder = parent / f"tokens-{key}"
    if not folder.exists():
        try:
            parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{folder}.lock"):
                # Another process may have written it while this one waited.
                if not folder.exists():
                    _write(folder, splits)
        except (OSError, tf.errors.OpError) as error:
            rule = f"must be a folder that can be written ({first_line(error)})"
            raise ConfigError(_KEY, rule, str(parent)) from error

    tokens = {}
    for name, counts in _read_index(folder, splits).items():
        tokens[name] = _reader(folder, name, counts, _dtype(splits[name]))
    return tokens


def _reader(
    folder: Path, name: str, counts: Sequence[GroupCounts], dtype: tf.DType
) -> SplitTokens:
    """Return the tokens of a split that is in the cache.

    Args:
        folder: the folder of the cache.
        name: the name of the split.
        counts: the `GroupCounts` of each group.
        dtype: the type in which tokens are stored.
    """
    files = [_file(folder, name, group) for group in range(len(counts))]

    @tf.autograph.experimental.do_not_convert
    def chunk(record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        features = tf.io.parse_single_example(record, _FEATURES)
        tokens = tf.io.decode_raw(features["tokens"], dtype)
        return tf.cast(tokens, tf.int32), features["lengths"]

    def chunks_of_group(group: tf.Tensor) -> tf.data.Dataset:
        file = tf.gather(tf.constant([str(file) for file in files]), group)
        return tf.data.TFRecordDataset(file, buffer_size=_BUFFER).map(chunk)

    return SplitTokens(chunks_of_group, counts, files)


def _write(folder: Path, splits: Mapping[str, TokenizedSplit]) -> None:
    """Write the cache to a temporary folder, and rename it."""
    # Other processes wait for the lock, so only a killed process can have left these.
    for leftover in folder.parent.glob(f".{folder.name}-*"):
        shutil.rmtree(leftover)

    say(f"the texts are tokenized once, into {folder}")
    # Unlike the folders of `tempfile`, others may read this one.
    temporary = folder.with_name(f".{folder.name}-{uuid.uuid4().hex}")
    temporary.mkdir()
    try:
        index = {}
        for name, split in splits.items():
            counts = _write_split(temporary, name, split)
            split.check(counts)
            index[name] = [asdict(group) for group in counts]
        (temporary / _INDEX).write_text(json.dumps(index), encoding="utf-8")
        durable.sync_tree(temporary)
        temporary.rename(folder)
        durable.sync(folder.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _write_split(folder: Path, name: str, split: TokenizedSplit) -> list[GroupCounts]:
    """Write the pieces of a split, one file per group; return the groups' counts."""
    dtype = _dtype(split).as_numpy_dtype
    counts = []
    for group in range(len(split.split.groups)):
        with tf.io.TFRecordWriter(str(_file(folder, name, group))) as writer:

            def write(chunk: Chunk, writer: tf.io.TFRecordWriter = writer) -> None:
                writer.write(_record(chunk, dtype))

            counts.append(split.count(group, write))
    return counts


def _record(chunk: Chunk, dtype: type) -> bytes:
    tokens = tf.train.BytesList(value=[chunk.tokens.astype(dtype).tobytes()])
    lengths = tf.train.Int64List(value=chunk.lengths)
    features = {
        "tokens": tf.train.Feature(bytes_list=tokens),
        "lengths": tf.train.Feature(int64_list=lengths),
    }
    example = tf.train.Example(features=tf.train.Features(feature=features))
    return bytes(example.SerializeToString())


def _read_index(
    folder: Path, splits: Mapping[str, TokenizedSplit]
) -> dict[str, list[GroupCounts]]:
    """Return the `GroupCounts` of each group, by the name of the split.

    Raises:
        ConfigError: the index is missing or damaged.
    """
    try:
        index = recorded.read(folder / _INDEX, dict.fromkeys(splits, _FORM))
    except (OSError, recorded.FormError) as error:
        rule = f"has a damaged cache, which you can delete ({first_line(error)})"
        raise ConfigError(_KEY, rule, str(folder)) from error
    counts = {}
    for name in splits:
        counts[name] = [GroupCounts(**group) for group in index[name]]
    return counts


def _file(folder: Path, name: str, group: int) -> Path:
    return folder / f"{name}-{group:05}.tfrecord"


def _dtype(split: TokenizedSplit) -> tf.DType:
    """Return the smallest type that can hold all tokens."""
    if split.tokenizer.vocabulary <= 2**8:
        return tf.uint8
    if split.tokenizer.vocabulary <= 2**16:
        return tf.uint16
    return tf.int32

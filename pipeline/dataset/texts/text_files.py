"""Text files, or texts of a TFDS dataset, as examples of next-token prediction."""

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.common.errors import ConfigError, count
from pipeline.dataset import tfds_files
from pipeline.dataset.checksums import sha256_of
from pipeline.dataset.splits import Data, Shard
from pipeline.dataset.texts import corpus
from pipeline.dataset.texts.corpus import Corpus, Format, Split
from pipeline.dataset.texts.pieces import SplitTokens, TokenizedSplit, examples_of
from pipeline.dataset.texts.sources import SAMPLES
from pipeline.dataset.texts.token_cache import cached
from pipeline.dataset.texts.tokenizer import (
    Tokenizer,
    by_bytes,
    check_vocabulary,
    named,
)

# Number of training texts whose tokens are a part of the key of a token cache, because
# a tokenizer may have changed without a new version.
_PROBED = 100


def text_files(  # noqa: PLR0913  keys of the config
    files: str | Sequence[str] | None = None,
    name: str | None = None,
    builder: str | None = None,
    data_dir: str | None = None,
    download: bool = True,
    train_split: str = "train",
    validation_split: Split = 0.1,
    test_split: Split = None,
    sample_by: str = "line",
    text_key: str = "text",
    longest: int = 128,
    tokenizer: Mapping[str, Any] | None = None,
    vocabulary: int | None = None,
    token_cache: str | None = None,
) -> Data:
    """Load texts as sequences of tokens, for next-token prediction.

    x and y are int32 vectors of equal length, at most `longest`. y is x shifted by one
    token. A token t is represented by t + 1, since 0 is padding. Longer texts are cut,
    so that every token but the first of a text is a label exactly once. Texts of fewer
    than two tokens are left out, and counted in a note.

    Args:
        files: a file, a folder or a glob pattern, or a list of them. A folder stands
            for the `.txt` and `.jsonl` files below it. Files are UTF-8.
        name: name of a dataset in TFDS, in place of `files`.
        builder: dotted name of your own `tfds.core.DatasetBuilder`, in place of `name`.
        data_dir: folder of TFDS datasets, or None for the default of TFDS.
        download: whether TFDS may download and prepare the dataset if it is missing.
        train_split: name of the training split in TFDS, or a slice.
        validation_split: files, as in `files`, or a split of TFDS; or the share of the
            training texts to hold out, above 0 and below 1; or None.
        test_split: the same for the test split.
        sample_by: what counts as one text of a file: a `line`, a `paragraph`, which
            ends at a blank line, or the whole `document`. In a `.jsonl` file, each line
            has one text.
        text_key: the field of `.jsonl` files, or the feature in TFDS, with the text.
        longest: maximum number of tokens of x.
        tokenizer: the node of a tokenizer, or None for the bytes of UTF-8. Its target
            gives a function from a text to a list or an array of tokens.
        vocabulary: number of tokens, or None for the tokenizer's `vocab_size`.
        token_cache: a folder in which the tokens are kept, or None to tokenize the
            texts whenever they are read.

    Raises:
        ConfigError: an argument is wrong, the texts cannot be read or tokenized, or a
            split has no texts to learn from.
    """
    if sample_by not in SAMPLES:
        rule = "must say what counts as one text of a file"
        raise ConfigError("dataset.sample_by", rule, sample_by, SAMPLES)
    if isinstance(longest, bool) or not isinstance(longest, int) or longest < 1:
        rule = "must be a number of tokens, at least 1"
        raise ConfigError("dataset.longest", rule, longest)
    form = Format(sample_by, text_key)
    if [files, name, builder].count(None) != 2:
        rule = "must be given, or else one of name and builder for a dataset of TFDS"
        raise ConfigError("dataset.files", rule, files)
    if files is not None and train_split != "train":
        rule = (
            "must be left out with dataset.files: the files that are in no other "
            "split are trained on"
        )
        raise ConfigError("dataset.train_split", rule, train_split)
    if files is not None:
        texts = corpus.of_files(files, validation_split, test_split, form)
    else:
        tfds_builder = tfds_files.find_builder(name, builder, data_dir)
        tfds_files.prepare(tfds_builder, tfds_files.may_download(download))
        texts = corpus.of_tfds(
            tfds_builder, train_split, validation_split, test_split, form
        )

    encoder = _tokenizer(tokenizer, vocabulary)
    splits = {}
    for part, split in texts.splits.items():
        splits[part] = TokenizedSplit(split, encoder, longest)
    if token_cache is None:
        tokens = {part: split.in_pipeline() for part, split in splits.items()}
    else:
        identity = _identity(texts, encoder, form, longest)
        tokens = cached(Path(token_cache), identity, splits)
    return _data(texts, encoder, tokens)


def _tokenizer(node: Any, vocabulary: int | None) -> Tokenizer:
    if vocabulary is not None:
        check_vocabulary(vocabulary, "dataset.vocabulary")
    if node is not None:
        return named(node, vocabulary)
    if vocabulary is not None:
        rule = "must be null without a tokenizer: the tokens are the 256 byte values"
        raise ConfigError("dataset.vocabulary", rule, vocabulary)
    return by_bytes()


def _identity(
    texts: Corpus, encoder: Tokenizer, form: Format, longest: int
) -> dict[str, Any]:
    """Return all that decides the tokens and the pieces, for the key of a cache."""
    checksums = {path: sha256_of(path) for path in texts.files}
    splits = {}
    for part, split in texts.splits.items():
        groups = [group.identity(checksums) for group in split.groups]
        splits[part] = [split.shares, groups]
    probe = hashlib.sha256()
    for text in itertools.islice(texts.splits["train"].all_texts(), _PROBED):
        probe.update(encoder.tokens(text).tobytes())
    return {
        "files": list(checksums.values()),
        "splits": splits,
        "form": form,
        "longest": longest,
        "tokenizer": encoder.arguments,
        "tokenizer_files": [sha256_of(path) for path in encoder.files],
        "version": encoder.version,
        "vocabulary": encoder.vocabulary,
        "probe": probe.hexdigest(),
    }


def _data(texts: Corpus, encoder: Tokenizer, tokens: Mapping[str, SplitTokens]) -> Data:
    """Return the examples of all splits, and what a run records about them."""
    shards = {}
    examples = {}
    for part, split in tokens.items():
        examples[part] = examples_of(split)
        if split.files:
            shards[part] = _shards(split)
    validation = None
    if "validation" in examples:
        validation = examples["validation"].in_order
    test = None
    if "test" in examples:
        test = examples["test"].in_order
    decode = None
    if encoder.decode is not None:
        decode = encoder.text
    return Data(
        train=examples["train"].in_order,
        validation=validation,
        test=test,
        classes=encoder.vocabulary + 1,
        name=texts.name,
        version=", ".join(filter(None, [texts.version, encoder.version])),
        files=(*texts.files, *encoder.files),
        shards=shards,
        shuffled=examples["train"].by_seed,
        decode=decode,
        notes=_notes(tokens),
        unbatched=tuple(tokens),
    )


def _shards(split: SplitTokens) -> list[Shard]:
    shards = []
    for path, group in zip(split.files, split.counts, strict=True):
        shards.append(Shard(path, 0, group.pieces))
    return shards


def _notes(tokens: Mapping[str, SplitTokens]) -> dict[str, str]:
    """Return a line about the short texts of each split that has some."""
    notes = {}
    for part, split in tokens.items():
        texts = sum(group.texts for group in split.counts)
        short = sum(group.short for group in split.counts)
        if short:
            notes[part] = (
                "texts of fewer than two tokens are left out, as they have no next "
                f"token to predict: {short} of {count(texts, 'text')}"
            )
    return notes

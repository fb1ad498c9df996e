"""Turns texts into tokens: by bytes, or by the tokenizer that the config names."""

import functools
import inspect
import json
import numbers
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from pipeline.common.errors import ConfigError, described
from pipeline.config.plain import leaves
from pipeline.dataset.checksums import sha256_of
from pipeline.dataset.texts.sources import Text
from pipeline.trust import instantiate

KEY = "dataset.tokenizer"
# Maximum number of tokens: they are stored as int32, shifted by one.
_LARGEST = 2**31 - 2


class Tokenizer:
    """A function from a text to its tokens, and what a run records about it.

    Args:
        encode: a function from a text to its tokens, a list or an array of integers.
        vocabulary: the number of tokens, which are numbered from 0.
        version: the version for the record, such as `tokenizer 1.2`.
        decode: a function from tokens, a list of integers, to a text, or None.
        arguments: the arguments with which the tokenizer was built, as JSON.
        files: the files that these arguments name.
    """

    def __init__(
        self,
        encode: Callable[[str], Any],
        vocabulary: int,
        version: str,
        decode: Callable[[list[int]], str] | None = None,
        arguments: str = "",
        files: Sequence[Path] = (),
    ):
        self.vocabulary = vocabulary
        self.version = version
        self.decode = decode
        self.arguments = arguments
        self.files = tuple(files)
        self._encode = encode
        # tf.data reads several splits at a time, each in a thread of its own, and not
        # every tokenizer may be called from several threads.
        self._lock = threading.Lock()

    def tokens(self, text: Text) -> np.ndarray:
        """Return the tokens of a text, of shape (tokens,).

        Raises:
            ConfigError: the tokenizer fails, or does not return tokens.
        """
        try:
            with self._lock:
                encoded = self._encode(text.content)
        except Exception as error:
            rule = f"fails for {text.place} ({described(error)})"
            raise ConfigError(KEY, rule) from error

        tokens = _as_integers(encoded)
        if tokens is None:
            rule = (
                "must return a list or an array of whole numbers, "
                f"which it does not for {text.place}"
            )
            raise ConfigError(KEY, rule, encoded)
        outside = tokens[(tokens < 0) | (tokens >= self.vocabulary)]
        if outside.size:
            rule = (
                f"must return numbers from 0 to {self.vocabulary - 1}, "
                f"which it does not for {text.place}"
            )
            raise ConfigError(KEY, rule, int(outside[0]))
        return tokens

    def text(self, tokens: np.ndarray) -> str:
        """Return the text of the tokens of an example, without padding.

        In an example, a token t is represented by t + 1, since 0 is padding.
        """
        if self.decode is None:
            raise ValueError("the tokenizer has no method decode")
        return self.decode([token - 1 for token in tokens.tolist() if token > 0])


def by_bytes() -> Tokenizer:
    """Return the tokenizer whose tokens are the bytes of UTF-8."""

    def encode(text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8)

    return Tokenizer(encode, 256, "bytes", text_of_bytes)


def text_of_bytes(values: Sequence[int]) -> str:
    """Return the text of some bytes, with a `\ufffd` for what is not UTF-8."""
    return bytes(values).decode(errors="replace")


def named(node: Any, vocabulary: int | None) -> Tokenizer:
    """Return the tokenizer that a node of the config names.

    Args:
        node: the node, plain, with a `_target_`.
        vocabulary: the number of tokens, or None for the `vocab_size` of the tokenizer.

    Raises:
        ConfigError: the tokenizer cannot be built or called, or its number of tokens or
            its version is not known.
    """
    if not isinstance(node, Mapping):
        rule = (
            "must be a node with a _target_, in a dataset with _recursive_: false, "
            "so that its arguments are known"
        )
        raise ConfigError(KEY, rule, type(node).__name__)
    tokenizer = instantiate.build(OmegaConf.create(dict(node)), KEY)
    if not callable(tokenizer):
        rule = (
            "must build an object that can be called with a text and returns its tokens"
        )
        raise ConfigError(f"{KEY}._target_", rule, type(tokenizer).__name__)
    if vocabulary is None:
        vocabulary = _vocabulary_of(tokenizer)
    decode = getattr(tokenizer, "decode", None)
    if not callable(decode):
        decode = None
    return Tokenizer(
        tokenizer,
        vocabulary,
        _version_of(tokenizer),
        decode,
        arguments=json.dumps(node, sort_keys=True),
        files=list(_files_in(node)),
    )


def _as_integers(encoded: Any) -> np.ndarray | None:
    """Return a tokenizer's result as a vector of integers, or None if it is not one.

    An empty list counts as one.
    """
    if encoded is None:
        return None
    try:
        tokens = np.asarray(encoded)
    except ValueError:  # lists of several lengths
        return None
    if tokens.ndim != 1:
        return None
    if not tokens.size:
        return tokens.astype(np.int64)
    if tokens.dtype.kind not in "iu":
        return None
    return tokens.astype(np.int64)


def _vocabulary_of(tokenizer: Any) -> int:
    """Return the `vocab_size` of a tokenizer, an attribute or a method.

    Raises:
        ConfigError: there is none, or it is not a number of tokens.
    """
    size = getattr(tokenizer, "vocab_size", None)
    if callable(size):
        size = size()
    if size is None:
        rule = (
            "must be the number of tokens, because the tokenizer has no attribute "
            "vocab_size that gives it"
        )
        raise ConfigError("dataset.vocabulary", rule, None)
    check_vocabulary(size, f"{KEY}.vocab_size")
    return int(size)


def check_vocabulary(size: Any, key: str) -> None:
    """Raise a `ConfigError` about `key` if a number of tokens is not valid."""
    is_integer = isinstance(size, numbers.Integral) and not isinstance(size, bool)
    if not is_integer or not 1 <= size <= _LARGEST:
        rule = f"must be a whole number of tokens, from 1 to {_LARGEST}"
        raise ConfigError(key, rule, size)


def _version_of(tokenizer: Any) -> str:
    """Return the version of a tokenizer for the record.

    This is the attribute `version` or `__version__` of the tokenizer; without one, the
    version of the package that defines the tokenizer; or else a checksum of the file
    that does.

    Raises:
        ConfigError: none of them exists.
    """
    while isinstance(tokenizer, functools.partial):
        tokenizer = tokenizer.func
    for name in ("version", "__version__"):
        version = getattr(tokenizer, name, None)
        if isinstance(version, str | int | float):
            return f"tokenizer {version}"

    definition = tokenizer
    if not inspect.isroutine(tokenizer) and not inspect.isclass(tokenizer):
        definition = type(tokenizer)
    package = str(definition.__module__).partition(".")[0]
    version = getattr(sys.modules.get(package), "__version__", None)
    if isinstance(version, str):
        return f"{package} {version}"

    try:
        source = Path(str(inspect.getsourcefile(definition)))
        return f"{source.name} {sha256_of(source)[:12]}"
    except (TypeError, OSError) as error:
        rule = "must have a version: give the tokenizer an attribute version"
        raise ConfigError(f"{KEY}._target_", rule, definition.__qualname__) from error


def _files_in(node: Mapping[str, Any]) -> Iterator[Path]:
    """Yield the files that the arguments in a node name."""
    for value in leaves(node).values():
        entries = value if isinstance(value, list) else [value]
        for entry in entries:
            if isinstance(entry, str) and os.path.isfile(entry):
                yield Path(entry)

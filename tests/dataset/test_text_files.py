"""Texts of files and of TFDS as tokens: what is read, cut, split, cached and rejected."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds
from omegaconf import OmegaConf

from pipeline.common.errors import ConfigError
from pipeline.config.stages import Slice
from pipeline.dataset.batches import effective_batches
from pipeline.dataset.load import load
from pipeline.dataset.splits import Data
from pipeline.tracking import provenance
from tests.parameters import mostly_slow
from tests.running import ROOT

HERE = __name__
SENTENCES = [f"Sentence {number} is about {number**3}." for number in range(200)]


class Words:
    """A tokenizer by words, with the unknown ones as the last token."""

    def __init__(self, file: str, version: str = "1"):
        self.words = Path(file).read_text(encoding="utf-8").split()
        self.vocab_size = len(self.words) + 1
        self.version = version

    def __call__(self, text):
        unknown = len(self.words)
        numbers = {word: number for number, word in enumerate(self.words)}
        return [numbers.get(word, unknown) for word in text.split()]

    def decode(self, tokens):
        return " ".join([*self.words, "?"][token] for token in tokens)


def letters(text, returns="numbers"):
    """Return a number from 0 to 25 per letter, or something else as `returns` says."""
    numbers = [ord(letter) - ord("a") for letter in text.lower() if letter.isalpha()]
    others = {
        "floats": [0.5, 1.0],
        "nothing": None,
        "no list": {"input_ids": numbers},
        "too much": [*numbers, 26],
        "negative": [-1, *numbers],
        "nested": [[1], [2, 3]],
        "empty": [],
    }
    if returns == "an error":
        raise KeyError("out of order")
    return others.get(returns, numbers)


class Sayings(tfds.core.GeneratorBasedBuilder):
    """A TFDS dataset of strings."""

    VERSION = tfds.core.Version("1.2.0")

    def _info(self):
        features = {"said": tfds.features.Text(), "number": np.int64}
        return tfds.core.DatasetInfo(
            builder=self, features=tfds.features.FeaturesDict(features)
        )

    def _split_generators(self, dl_manager):
        return {
            "train": self._generate_examples(SENTENCES),
            "test": self._generate_examples(SENTENCES[:5]),
        }

    def _generate_examples(self, sentences):
        for number, sentence in enumerate(sentences):
            yield number, {"said": sentence, "number": number}


def node(**keys):
    config = OmegaConf.load(ROOT / "conf" / "dataset" / "text_files.yaml")
    return OmegaConf.create({**OmegaConf.to_container(config), **keys})


def loaded(**keys) -> Data:
    return load(node(**keys))


def texts_of(data: Data, name: str) -> list[str]:
    """Return the texts of the examples in a split: the inputs and the last label."""
    texts = []
    for x, y in data.splits[name].as_numpy_iterator():
        np.testing.assert_array_equal(x[1:], y[:-1])
        texts.append(data.decode(np.append(x, y[-1])))
    return texts


def write(folder: Path, **contents: str) -> None:
    for name, content in contents.items():
        file = folder / name.replace("_", ".")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content, encoding="utf-8")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return the working directory, with texts in two files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    (tmp_path / "texts").mkdir()
    write(tmp_path / "texts", a_txt="\n".join(SENTENCES[:120]))
    rows = [json.dumps({"text": sentence}) for sentence in SENTENCES[120:]]
    write(tmp_path / "texts", b_jsonl="\n".join(rows))
    words = " ".join(SENTENCES[:50]).split()
    write(tmp_path, words_txt=" ".join(dict.fromkeys(words)))
    return tmp_path


@pytest.mark.parametrize(
    ("sample_by", "texts"),
    [
        ("line", ["Größe", "one line", "  two", "another", "the last"]),
        ("paragraph", ["Größe\none line\n  two", "another\nthe last"]),
        ("document", ["\n\nGröße\none line\n  two\n \t\n\nanother\nthe last\n"]),
    ],
)
def test_a_text_is_a_line_a_paragraph_or_a_document(folder, sample_by, texts):
    content = "\n\nGröße\r\none line\n  two\n \t\n\nanother\nthe last\n"
    (folder / "one.txt").write_bytes(b"\xef\xbb\xbf" + content.encode())
    data = loaded(files="one.txt", validation_split=None, sample_by=sample_by)
    assert texts_of(data, "train") == texts
    assert data.count("train") == len(texts)
    assert data.classes == 257


def test_a_long_text_is_cut_so_that_each_token_but_the_first_is_predicted_once(folder):
    write(folder, long_txt="abcdefghij\nk\nlm\nabcd\nabcde")
    data = loaded(files="long.txt", validation_split=None, longest=3)
    pieces = texts_of(data, "train")
    assert pieces == ["abcd", "defg", "ghij", "lm", "abcd", "abcd", "de"]
    labels = [y for _, y in data.train.as_numpy_iterator()]
    assert bytes((np.concatenate(labels) - 1).tolist()) == b"bcdefghijmbcdbcde"
    line = "texts of fewer than two tokens are left out, as they have no next token"
    assert data.notes["train"] == f"{line} to predict: 1 of 5 texts"


def test_files_are_named_by_path_folder_and_pattern(folder):
    write(folder / "texts", **{"deep/c_txt": "in c", "notes_md": "no text"})
    keys = {"validation_split": None, "longest": 1000}
    everything = texts_of(loaded(files="texts", **keys), "train")
    assert everything == [*SENTENCES, "in c"]
    by_pattern = texts_of(loaded(files=["texts/**/*.txt"], **keys), "train")
    assert by_pattern == [*SENTENCES[:120], "in c"]
    twice = loaded(files=["texts/b.jsonl", "texts/*"], **keys)
    assert texts_of(twice, "train")[:80] == SENTENCES[120:]
    assert sorted(path.name for path in twice.files) == ["a.txt", "b.jsonl", "notes.md"]


def test_splits_are_by_files_or_by_shares_that_depend_on_the_texts_alone(folder):
    write(folder / "texts", c_txt="held out")
    data = loaded(files="texts", validation_split="texts/c.txt", longest=1000)
    assert texts_of(data, "validation") == ["held out"]
    assert texts_of(data, "train") == SENTENCES

    shares = {"validation_split": 0.2, "test_split": 0.1, "longest": 1000}
    data = loaded(files="texts/[ab]*", **shares)
    splits = {name: texts_of(data, name) for name in data.splits}
    everything = itertools.chain.from_iterable(splits.values())
    assert sorted(everything) == sorted(SENTENCES)
    assert 25 < len(splits["validation"]) < 55
    assert 10 < len(splits["test"]) < 32
    # Other files, another order and a text that is there twice: no text moves.
    write(
        folder / "other", z_txt="\n".join(["new", *reversed(SENTENCES), SENTENCES[0]])
    )
    again = loaded(files="other", **shares)
    for name, texts in splits.items():
        assert set(texts_of(again, name)) - {"new"} == set(texts)


def test_a_tokenizer_of_ones_own_has_its_version_and_its_files_in_the_record(folder):
    words = {"_target_": f"{HERE}.Words", "file": "words.txt"}
    data = loaded(files="texts", validation_split=None, tokenizer=words)
    vocabulary = (folder / "words.txt").read_text().split()
    assert data.classes == len(vocabulary) + 2
    assert texts_of(data, "train")[:50] == SENTENCES[:50]
    assert texts_of(data, "train")[-1] == "Sentence ? is about ?"
    assert data.version == "tokenizer 1"
    assert [path.name for path in data.files] == ["a.txt", "b.jsonl", "words.txt"]

    # Without a version of its own: that of the package, or a checksum of the module.
    plain = {"_target_": f"{HERE}.letters", "_partial_": True}
    version = loaded(files="texts", tokenizer=plain, vocabulary=26).version
    assert version.startswith("test_text_files.py ")
    data = loaded(files="texts")
    assert data.version == "bytes"


def test_a_rerun_with_another_version_of_the_tokenizer_is_rejected(folder):
    def record(version):
        words = {"_target_": f"{HERE}.Words", "file": "words.txt", "version": version}
        return provenance.dataset(loaded(files="texts", tokenizer=words))

    provenance.check_dataset(record("1"), record("1"), "abc")
    line = r"must have the version 'tokenizer 1' of run abc\. Received: 'tokenizer 2'"
    with pytest.raises(ConfigError, match=line):
        provenance.check_dataset(record("1"), record("2"), "abc")


KEYS_OF_CUTS = [
    {"validation_split": 0.3, "longest": 15},
    {"validation_split": "texts/a.txt", "test_split": 0.2, "sample_by": "document"},
    {"tokenizer": {"_target_": f"{HERE}.Words", "file": "words.txt"}, "longest": 3},
]
CUTS = list(itertools.product(KEYS_OF_CUTS, [True, False]))


@pytest.mark.parametrize(("keys", "in_memory"), mostly_slow(CUTS, [CUTS[1]]))
def test_rows_are_equal_with_a_cache_and_without(folder, keys, in_memory):
    """In each split, and in training in the order of an epoch."""
    plain = loaded(files="texts", **keys)
    data = loaded(files="texts", token_cache="cache", **keys)
    again = loaded(files="texts", token_cache="cache", **keys)
    for name in plain.splits:
        expected = texts_of(plain, name)
        assert texts_of(data, name) == expected
        assert texts_of(again, name) == expected
    assert (again.files, again.version) == (plain.files, plain.version)

    rows = []
    for source in (plain, data, again):
        epoch = effective_batches(
            node(in_memory=in_memory, shuffle_buffer=20), source, [Slice(16, 1)], 3
        )
        rows.append([batch[0] for batch in epoch.as_numpy_iterator()])
    for batch, cached, recalled in zip(*rows, strict=True):
        np.testing.assert_array_equal(batch, cached)
        np.testing.assert_array_equal(batch, recalled)


@pytest.mark.slow
def test_a_cache_is_used_until_something_that_decides_the_tokens_changes(folder):
    def folders():
        return {path.name for path in Path("cache").glob("tokens-*") if path.is_dir()}

    words = {"_target_": f"{HERE}.Words", "file": "words.txt"}
    keys = {"files": "texts", "token_cache": "cache", "tokenizer": words}
    loaded(**keys)
    first = folders()
    os.rename("texts", "moved")
    loaded(**{**keys, "files": "moved"})
    assert folders() == first
    os.rename("moved", "texts")

    changes = [
        {"longest": 5},
        {"sample_by": "paragraph"},
        {"validation_split": 0.2},
        {"tokenizer": {**words, "version": "2"}},
        {"vocabulary": 1000},
    ]
    for change in changes:
        before = folders()
        loaded(**{**keys, **change})
        assert len(folders() - before) == 1
    for file in ("texts/a.txt", "words.txt"):
        before = folders()
        with open(file, "a", encoding="utf-8") as stream:
            stream.write(" more")
        loaded(**keys)
        assert len(folders() - before) == 1


def test_a_tokenizer_that_changes_under_the_same_version_is_noticed(
    folder, monkeypatch
):
    keys = {
        "files": "texts",
        "token_cache": "cache",
        "vocabulary": 1000,
        "tokenizer": {"_target_": f"{HERE}.Words", "file": "words.txt"},
    }
    before = texts_of(loaded(**keys), "train")
    monkeypatch.setattr(Words, "__call__", lambda self, text: [3, 2, 1])
    assert set(texts_of(loaded(**keys), "train")) != set(before)


def _load_in_child(folder: str, kill_after: int | None) -> None:
    """Load with a cache; be killed as the tokenizer is called the given time."""
    os.chdir(folder)
    if kill_after is not None:
        call = Words.__call__
        calls = iter(range(10**6))

        def killing(self, text):
            if next(calls) == kill_after:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(self, text)

        Words.__call__ = killing
    words = {"_target_": f"{HERE}.Words", "file": "words.txt"}
    loaded(files="texts", token_cache="cache", tokenizer=words)


def _child(*arguments) -> multiprocessing.Process:
    # A forked process, in which TensorFlow's threads are missing, could wait for ever.
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_load_in_child, args=arguments)
    process.start()
    return process


@pytest.mark.slow
def test_a_cache_of_a_killed_process_and_of_two_at_once_is_whole(folder):
    killed = _child(str(folder), 150)
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    names = [path.name for path in Path("cache").iterdir()]
    assert [name for name in names if name.startswith(".tokens-")]
    assert not [name for name in names if Path("cache", name, "index.json").exists()]

    processes = [_child(str(folder), None) for _ in range(2)]
    for process in processes:
        process.join()
        assert process.exitcode == 0
    (cache,) = [path for path in Path("cache").iterdir() if path.is_dir()]
    assert cache.name.startswith("tokens-")
    words = {"_target_": f"{HERE}.Words", "file": "words.txt"}
    whole = loaded(files="texts", tokenizer=words)
    data = loaded(files="texts", tokenizer=words, token_cache="cache")
    for name in whole.splits:
        assert texts_of(data, name) == texts_of(whole, name)


def test_a_damaged_cache_is_named(folder):
    loaded(files="texts", token_cache="cache")
    (index,) = Path("cache").glob("*/index.json")
    index.write_text("{")
    line = r"^dataset\.token_cache has a damaged cache, which you can delete \(index"
    with pytest.raises(ConfigError, match=line):
        loaded(files="texts", token_cache="cache")


@pytest.mark.slow
def test_texts_of_tfds_are_those_of_its_splits_or_of_shares(folder):
    keys = {"builder": f"{HERE}.Sayings", "data_dir": "tfds", "text_key": "said"}
    data = loaded(**keys, validation_split="test", longest=1000)
    # TFDS prepares a split in an order of its own.
    assert sorted(texts_of(data, "train")) == sorted(SENTENCES)
    assert sorted(texts_of(data, "validation")) == SENTENCES[:5]
    assert (data.name, data.version) == ("sayings", "1.2.0, bytes")
    assert data.files

    cached = loaded(**keys, validation_split=0.2, token_cache="cache", longest=1000)
    plain = loaded(**keys, validation_split=0.2, longest=1000)
    for name in ("train", "validation"):
        assert texts_of(cached, name) == texts_of(plain, name)
    assert cached.count("train") + cached.count("validation") == len(SENTENCES)


def test_pieces_of_one_length_are_no_batches(folder):
    write(folder, one_txt="a" * 1000)
    data = loaded(files="one.txt", validation_split=None, longest=8)
    assert set(map(len, texts_of(data, "train"))) == {9, 8}


def letters_as(returns, **keys):
    tokenizer = {"_target_": f"{HERE}.letters", "_partial_": True, "returns": returns}
    return {"files": "texts/a.txt", "vocabulary": 26, "tokenizer": tokenizer, **keys}


IN_LINE = r", which it does not for line 1 of texts/a\.txt\. Received: "
WRONG = [
    ({}, r"files must be given, or else one of name and builder .* Received: null"),
    ({"files": "texts", "name": "x"}, r"files must be given, or else one of name"),
    ({"files": "no/*.txt"}, r"files must match a file: .* Received: 'no/\*\.txt'"),
    ({"files": "hollow"}, r"files must match a file: .* Received: 'hollow'"),
    ({"files": "texts", "validation_split": []}, r"validation_split must name a file"),
    ({"files": "texts", "train_split": "a"}, r"train_split must be left out with dat"),
    ({"files": ["texts", 3]}, r"files must be the path of a file .* Received: 3"),
    (
        {"files": "blank.txt"},
        r"files must select a text of two tokens or more, .* Received: 'no text'",
    ),
    (
        {"files": "short.txt", "validation_split": None},
        r"files must select a text of two .* Received: '2 shorter texts'",
    ),
    (
        {"files": "latin.txt"},
        r"files must name files in UTF-8: line 2 is not .* Received: 'latin\.txt'",
    ),
    (
        {"files": "wrong.jsonl"},
        r"files must name files whose lines are JSON with .* 'text' .*: line 2 is not",
    ),
    (
        {"files": "texts", "validation_split": "texts"},
        r"files must match files to train on, other than those of the other splits",
    ),
    (
        {"files": "t*", "validation_split": "texts", "test_split": "texts/a.txt"},
        r"test_split must not name a file of another split. Received: 'texts/a\.txt'",
    ),
    ({"files": "texts", "validation_split": 1}, r"validation_split must be a share "),
    (
        {"files": "texts", "validation_split": 0.6, "test_split": 0.5},
        r"test_split must be a share above 0 and below 1 that leaves texts to train on",
    ),
    (
        {"files": "texts", "validation_split": 1e-6},
        r"validation_split must select a text .*: change the share, or name files",
    ),
    (
        {"files": "texts", "sample_by": "word"},
        r"sample_by .* Choices: line, paragraph,",
    ),
    ({"files": "texts", "longest": 0}, r"longest must be a number of tokens, at least"),
    ({"files": "texts", "vocabulary": 9}, r"vocabulary must be null without a token"),
    ({"files": "texts", "tokenizer": "bert"}, r"tokenizer must be a node with a _targ"),
    (letters_as("numbers", vocabulary=None), r"vocabulary must be the number of token"),
    (letters_as("floats"), rf"tokenizer must return a list .*{IN_LINE}\[0\.5, 1\.0\]"),
    (letters_as("nothing"), rf"tokenizer must return a list or an .*{IN_LINE}null"),
    (letters_as("no list"), rf"tokenizer must return a list or an .*{IN_LINE}{{input"),
    (letters_as("nested"), rf"tokenizer must return a list or an .*{IN_LINE}\[\[1\]"),
    (letters_as("too much"), rf"tokenizer must return numbers from 0 to 25{IN_LINE}26"),
    (letters_as("negative"), rf"tokenizer must return numbers from 0 to 25{IN_LINE}-1"),
    (
        letters_as("empty"),
        r"files must select a text of two tokens .*108 shorter texts",
    ),
    (
        letters_as("an error"),
        r"tokenizer fails for line 1 of texts/a\.txt \(KeyError: 'out of order'\)",
    ),
    (
        {"files": "texts", "token_cache": "texts/a.txt"},
        r"token_cache must be a folder that can be written .* Received: 'texts/a\.txt'",
    ),
    (
        {"builder": f"{HERE}.Sayings", "data_dir": "tfds", "text_key": "number"},
        r"text_key must be a feature of sayings with one text .* Choices: number, said",
    ),
]


@pytest.mark.parametrize(("keys", "line"), WRONG)
def test_what_is_wrong_is_said_in_one_line(folder, keys, line):
    (folder / "hollow").mkdir()
    write(folder, blank_txt=" \n\n", short_txt="a\nb\n")
    write(folder, wrong_jsonl='{"text": "it"}\n{"txt": "it"}\n')
    (folder / "latin.txt").write_bytes("Größe\n".encode() + b"caf\xe9\n")
    before = sorted(folder.rglob("*"))
    with pytest.raises(ConfigError, match=rf"^dataset\.{line}") as raised:
        loaded(**keys)
    assert "\n" not in str(raised.value)
    if "builder" not in keys:  # TFDS has prepared the dataset
        after = [path for path in folder.rglob("*") if "home" not in path.parts]
        assert sorted(after) == [path for path in before if "home" not in path.parts]


def test_what_becomes_wrong_while_training_is_located(folder):
    """As texts that are streamed without a cache are read again in each epoch."""
    data = loaded(files="texts", validation_split=None)
    (folder / "texts" / "a.txt").write_bytes(b"\xff\n")
    with pytest.raises(tf.errors.OpError, match="must name files in UTF-8: line 1 is"):
        texts_of(data, "train")

"""`dataset.validations`: what is loaded, recorded, and refused in one line."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf
from omegaconf import OmegaConf

from pipeline.common.errors import ConfigError
from pipeline.dataset import cache
from pipeline.dataset.batches import evaluation_batches, first_examples
from pipeline.dataset.checksums import DataFiles
from pipeline.dataset.load import load
from pipeline.dataset.splits import Data
from pipeline.tracking import provenance
from pipeline.trust.gate import Gate, strict
from tests.parameters import mostly_slow

DIGITS = "pipeline.dataset.digits"
HERE = __name__


def loaded(target, **keys) -> Data:
    return load(OmegaConf.create({"_target_": target, **keys}))


def numbers(start, end):
    """Return the examples x = y = start, …, end - 1."""
    values = np.arange(start, end, dtype="float32")
    return tf.data.Dataset.from_tensor_slices((values[:, None], values))


def counted(validation_split="0:3"):
    """A dataset whose validation splits are named by their first and last number."""
    validation = None
    if validation_split is not None:
        validation = numbers(*map(int, validation_split.split(":")))
    return numbers(0, 10), validation


def pictures():
    """Return images of the form of the digits, without a file."""
    pictures = np.zeros((4, 8, 8, 1), "float32")
    labels = np.zeros(4, "int64")
    split = tf.data.Dataset.from_tensor_slices((pictures, labels))
    return split, split


def only_trains():
    return numbers(0, 5), None


def of_other_form(kind):
    x = np.zeros((4, 1), "float32")
    y = np.zeros(4, "float32")
    validation = {
        "pairs": ((x, x), y),
        "matrices": (x[:, None], y),
        "without labels": (x,),
        "labels of rank 1": (x, x),
    }[kind]
    return None, tf.data.Dataset.from_tensor_slices(validation)


def named():
    return Data(None, counted("5:8")[1], name="another")


def of_classes(classes):
    return Data(numbers(0, 5), numbers(0, 5), classes=classes)


def ragged(validation_split="2"):
    """Sequences of unequal length, with a label at each position."""

    def sequences(lengths):
        rows = tf.ragged.constant([[1.0] * length for length in lengths])
        data = tf.data.Dataset.from_tensor_slices(rows)
        return data.map(lambda row: (row, row))

    return sequences([1, 2, 3]), sequences([1, int(validation_split)])


def in_batches(validation_split="0:3"):
    train, validation = counted(validation_split)
    return train.batch(4), validation.batch(2)


def inputs(data, name, pad=None):
    """Return the inputs of a split as they are evaluated, in batches of 4."""
    batches = evaluation_batches(data, name, 4, pad, None, False)
    return np.concatenate([batch[0] for batch in batches.as_numpy_iterator()])


def test_a_split_is_that_of_the_same_dataset_and_a_node_one_of_its_own():
    sets = {
        "late": "5:8",
        "some": {"split": "2:4", "every": 3},
        "other": {"_target_": f"{HERE}.counted", "validation_split": "7:9", "every": 2},
    }
    data = loaded(f"{HERE}.counted", validations=sets)
    assert list(data.splits) == [
        *("train", "validation"),
        *("validations.late", "validations.some", "validations.other"),
    ]
    expected = {
        "validation": [0, 1, 2],
        "validations.late": [5, 6, 7],
        "validations.some": [2, 3],
        "validations.other": [7, 8],
    }
    for name, values in expected.items():
        assert inputs(data, name)[:, 0].tolist() == values

    # The test split of the dataset and its null validation split are of no concern.
    sets = {"late": "5:8"}
    data = loaded(f"{HERE}.counted", validation_split=None, validations=sets)
    assert list(data.splits) == ["train", "validations.late"]


@pytest.mark.parametrize("form", mostly_slow(["late", "late.split"], ["late.split"]))
def test_files_of_a_set_are_read_elsewhere_only_if_the_user_gives_them(
    form, tmp_path, monkeypatch
):
    for folder in ("work", "elsewhere"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "texts.txt").write_text("one\ntwo\nthree\n")
    monkeypatch.chdir(tmp_path / "work")
    path = str(tmp_path / "elsewhere/texts.txt")
    validation_set = {"split": path} if form == "late.split" else path
    keys = {"files": "texts.txt", "validation_split": None}
    keys["validations"] = {"late": validation_set}

    key = f"dataset.validations.{form}"
    gate = Gate(tmp_path / "work/run")
    rule = rf"^{key} must lie in .*; .* give it again: {key}="
    with strict(gate), pytest.raises(ConfigError, match=rule):
        loaded("pipeline.dataset.text_files", **keys)
    with strict(replace(gate, given={key: path})):
        data = loaded("pipeline.dataset.text_files", **keys)
    assert len(list(data.splits["validations.late"])) == 3


def test_splits_of_tfds_are_stored_records_with_their_files():
    sets = {
        "late": "validation[50%:]",
        "all": {"_target_": DIGITS, "validation_split": "test"},
    }
    data = loaded(DIGITS, validations=sets)
    late = inputs(data, "validations.late")
    assert np.array_equal(late, inputs(data, "validation")[90:])
    for name in ("validations.late", "validations.all"):
        assert data.made_of(name) is not None
        assert all(shard.path in data.all_files for shard in data.shards[name])
    own = loaded(DIGITS, test_split="test")
    assert np.array_equal(inputs(data, "validations.all"), inputs(own, "test"))


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        (
            {"_target_": DIGITS, "validations": {"late": "dev"}},
            "dataset.validations.late must be a split of digits, or null for none. "
            "Received: 'dev'. Choices: test, train, validation.",
        ),
        (
            {
                "_target_": "pipeline.dataset.diabetes",
                "validations": {"late": "test"},
            },
            "dataset.validations.late must be the node of a dataset, with a _target_: "
            "pipeline.dataset.diabetes cannot load a split by its name, as it has no "
            "argument validation_split. Received: 'test'.",
        ),
        (
            {
                "_target_": DIGITS,
                "validations": {"late": {"_target_": DIGITS, "test_split": "dev"}},
            },
            "dataset.validations.late.test_split must be a split of digits",
        ),
        (
            {"validations": {"late": {"_target_": f"{HERE}.only_trains"}}},
            "dataset.validations.late must be a dataset with a validation split: it "
            f"has only a training split. Received: '{HERE}.only_trains'.",
        ),
        (
            {"validations": {"late": {"_target_": f"{HERE}.nowhere"}}},
            "dataset.validations.late._target_ must name something that exists",
        ),
        (
            {"validations": {"late": {"_target_": f"{HERE}.counted", "split": "1:2"}}},
            f"dataset.validations.late.split must be an argument of {HERE}.counted.",
        ),
        (
            {"validations": {"late": {"_target_": f"{HERE}.inputs", "data": 1}}},
            "dataset.validations.late.name must be given",
        ),
        (
            {
                "_target_": f"{HERE}.of_classes",
                "classes": 2,
                "validations": {
                    "late": {"_target_": f"{HERE}.of_classes", "classes": 3}
                },
            },
            "dataset.validations.late must have at most the 2 classes of custom. "
            "Received: 3.",
        ),
    ],
)
def test_what_cannot_be_a_set_is_refused_in_one_line(keys, line):
    with pytest.raises(ConfigError) as raised:
        loaded(**{"target": f"{HERE}.counted", **renamed(keys)})
    assert str(raised.value).startswith(line)


def renamed(keys):
    """Return the keys of a node as arguments of `loaded`."""
    names = {"_target_": "target"}
    return {names.get(key, key): value for key, value in keys.items()}


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("pairs", "x"),
        ("matrices", "x"),
        ("labels of rank 1", "y"),
        ("without labels", "with labels"),
    ],
)
def test_its_examples_have_the_form_of_those_for_training(kind, part):
    node = {"_target_": f"{HERE}.of_other_form", "kind": kind}
    with pytest.raises(ConfigError) as raised:
        loaded(f"{HERE}.counted", validations={"late": node})
    assert "validations.late" in str(raised.value)
    assert f" {part}" in str(raised.value)


def test_it_is_padded_as_the_dataset_is():
    pad = {"multiple": 4, "value": 0}
    data = loaded(f"{HERE}.ragged", pad=pad, validations={"long": "5"})
    assert inputs(data, "validations.long", pad).tolist() == [
        [1, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 1, 0, 0, 0],
    ]
    weights = first_examples(data, "validations.long", 2, pad)[2]
    assert weights.numpy().sum() == 6


def test_a_loader_of_batches_has_sets_of_batches():
    data = loaded(
        f"{HERE}.in_batches", batched=True, validations={"late": "5:8", "more": "0:9"}
    )
    assert inputs(data, "validations.late")[:, 0].tolist() == [5, 6, 7]
    assert inputs(data, "validations.late")[:, 0].tolist() == [5, 6, 7]  # another pass
    assert len(inputs(data, "validations.more")) == 9
    node = {"_target_": f"{HERE}.counted", "validation_split": "5:8"}
    with pytest.raises(ConfigError, match=r"batches .* in its validations.late split"):
        loaded(f"{HERE}.in_batches", batched=True, validations={"late": node})


def test_the_sets_stay_in_memory_while_they_fit_together(monkeypatch):
    """An example is of 8 bytes; all sets may take a 32nd of the memory."""
    data = loaded(f"{HERE}.counted", validations={"late": "0:4", "some": "0:5"})
    node = OmegaConf.create({})
    names = ("validation", "validations.late", "validations.some")
    for examples, kept in ((2, 0), (3, 1), (6, 1), (7, 2), (12, 3)):
        monkeypatch.setattr(cache, "limit", lambda size=32 * 8 * examples: size)
        keeps = [cache.keeps_validation(node, data, 1, name) for name in names]
        assert keeps == [True] * kept + [False] * (3 - kept)
    assert not cache.keeps_validation(node, data, 1, "train")


OTHER = {"_target_": f"{HERE}.named"}


def record_of(target=f"{HERE}.counted", **sets):
    data = loaded(target, validations=sets)
    return json.loads(json.dumps(provenance.dataset(data)))


def test_the_record_has_each_set_with_its_checksum():
    record = record_of(late="5:8")
    assert record["examples"] == {"train": 10, "validation": 3, "validations.late": 3}
    assert set(record["content"]) == {"train", "validation", "validations.late"}

    # The digits have files, so their checksums are those of the files.
    record = record_of(f"{HERE}.pictures", other={"_target_": DIGITS})
    assert record["examples"]["validations.other"] == 180
    assert set(record["content"]) == {"train", "validation"}
    assert "digits-validation.tfrecord-00000-of-00001" in record["files"]
    digits = {"name": "digits", "version": "1.0.0"}
    assert record["validations"]["validations.other"] == digits


@pytest.mark.parametrize(
    ("now", "difference"),
    [
        ({"late": "5:8"}, ""),
        ({"late": "5:8", "more": "0:2"}, ""),
        ({"late": "4:7"}, "the split validations.late differs"),
        ({"late": "5:9"}, "differs"),
        ({}, "dataset.validations.late must be that of run"),
        ({"late": OTHER}, "dataset.validations.late must be that of"),
    ],
)
def test_a_rerun_or_a_resumed_run_has_the_sets_of_the_record(now, difference):
    recorded = record_of(late="5:8")
    if not difference:
        provenance.check_dataset(recorded, record_of(**now), "abc")
        return
    with pytest.raises(ConfigError, match=difference):
        provenance.check_dataset(recorded, record_of(**now), "abc")


def test_a_record_from_before_there_were_sets_is_compared_with_what_it_has():
    recorded = record_of()
    del recorded["validations"]
    provenance.check_dataset(recorded, record_of(late="5:8"), "abc")


def test_the_files_of_all_sets_are_watched():
    data = loaded(f"{HERE}.pictures", validations={"other": {"_target_": DIGITS}})
    assert data.files == ()
    paths = {path.name for path in DataFiles(data.all_files).paths}
    assert "digits-validation.tfrecord-00000-of-00001" in paths

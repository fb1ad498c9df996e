"""The groups of keys in the help text and in the config reference."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from pipeline.config import key_guide
from pipeline.config.compose import directory
from pipeline.config.schema import ShownConfig, keys_in

CONF = Path(directory())
# An argument of the chosen optimizer: the only key that the schema does not list.
ARGUMENT = "optimizer.learning_rate"


def test_each_key_of_the_schema_is_in_exactly_one_group():
    grouped: Counter[str] = Counter()
    for group in key_guide.KEY_GROUPS:
        grouped.update(group.keys)
    assert set(grouped.values()) == {1}
    schema = {key.name for key in keys_in(ShownConfig)}
    assert set(grouped) == schema | {ARGUMENT}


def test_the_first_group_has_twelve_keys():
    assert key_guide.KEY_GROUPS[0] is key_guide.FIRST_KEYS
    assert len(key_guide.FIRST_KEYS.keys) == 12


def test_each_key_is_described():
    for group in key_guide.KEY_GROUPS:
        for key in group.keys:
            assert key_guide.described(key, CONF).text, key
    with pytest.raises(KeyError, match=r"optimizer\.nope"):
        key_guide.described("optimizer.nope", CONF)


def test_a_comment_may_begin_with_the_type():
    described = key_guide.descriptions()
    epochs = described["training.epochs"]
    assert epochs.kind is None
    assert epochs.text.startswith("the horizon in epochs; exactly one of")
    micro = described["accumulation.micro_batch_size"]
    assert micro.kind == "int | auto | auto_fastest | null"
    assert micro.text.startswith("examples per forward and backward pass on one")


@pytest.mark.parametrize("group", ["dataset", "model", "optimizer", "schedule"])
def test_each_argument_in_a_choice_is_described(group):
    for file in sorted((CONF / group).glob("*.yaml")):
        choice_keys = key_guide.choice_keys(file)
        assert choice_keys, file
        for choice_key in choice_keys:
            assert key_guide.described(f"{group}.{choice_key.name}", CONF).text

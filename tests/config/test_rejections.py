"""Overrides that are rejected, and the line that each gets.

They are composed and resolved in this process, without TensorFlow. `wrong_configs` has
those that a command is run for.
"""

from __future__ import annotations

import pytest

from pipeline.common.errors import ConfigError
from pipeline.config import compose, schema
from pipeline.config.resolve import resolve


def rejection(*overrides: str) -> str:
    """Return the message of the error for `overrides`."""
    with pytest.raises(ConfigError) as caught:
        resolve(compose.composed(overrides), overrides, {})
    return str(caught.value)


# --- flags ---


@pytest.mark.parametrize("value", ["2", "0.5", "on", "null"])
@pytest.mark.parametrize("key", ["hardware.open_ports", "tracking.confined"])
def test_a_flag_with_a_security_meaning_is_true_or_false_only(key, value):
    assert rejection(f"{key}={value}").startswith(f"{key} must be true or false.")


def test_no_flag_is_left_to_omegaconf_which_accepts_any_number():
    assert [key.name for key in schema.keys_in(schema.Config) if key.hint is bool] == []


# --- links ---


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("training.class_weight={0: '${nope}'}", "training.class_weight.0"),
        ("+dataset.classes={0: {1: '${nope}'}}", "dataset.classes.0.1"),
        ("+model.units={1.5: '${nope}'}", "model.units.1.5"),
        ("+model.units={true: '${nope}'}", "model.units.True"),
        ("+tracking.tags={team.name: '${nope}'}", "tracking.tags.team.name"),
        ("+model.units=[1,'${nope}']", "model.units[1]"),
        ("hardware.gpu=[0,'${nope}']", "hardware.gpu[1]"),
        (
            "training.metrics.accuracy._target_=${nope}",
            "training.metrics.accuracy._target_",
        ),
    ],
)
def test_a_wrong_link_is_shown_with_its_key_wherever_it_stands(override, key):
    assert rejection(override) == (
        f"{key} must refer to a key that exists. Received: '${{nope}}'."
    )

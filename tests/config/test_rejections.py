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

"""Values that this package writes into overrides."""

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from pipeline.config.overrides import hydra_quoted


@pytest.mark.parametrize("text", ["a b", "it's", "a\\b", "a\\", "a\\'b"])
def test_a_quoted_value_is_read_as_it_was(text):
    override = f"key={hydra_quoted(text)}"
    assert OverridesParser.create().parse_override(override).value() == text

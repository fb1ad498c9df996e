"""Keys that overrides set, and values that this package writes into them."""

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from pipeline.config.overrides import hydra_quoted, keys_set


@pytest.mark.parametrize("text", ["a b", "it's", "a\\b", "a\\", "a\\'b"])
def test_a_quoted_value_is_read_as_it_was(text):
    override = f"key={hydra_quoted(text)}"
    assert OverridesParser.create().parse_override(override).value() == text


@pytest.mark.parametrize(
    ("override", "keys"),
    [
        ("training.updates=5", {"training.updates"}),
        ("+tracking.tags.team=a=b", {"tracking.tags.team"}),
        ("~model.dropout", {"model.dropout"}),
        ("model=mlp", {"model"}),
        (
            "training={updates: 5, epochs: null}",
            {"training.updates", "training.epochs"},
        ),
        ("+a={b: {c: 1, d: {}}}", {"a.b.c", "a.b.d"}),
        ("accumulation.batch_schedule=[{a: 1}]", {"accumulation.batch_schedule"}),
        ("seed=1,2", {"seed"}),
        ("seed=[1", {"seed"}),  # not of Hydra's grammar
        (f"seed={'9' * 5000}", {"seed"}),
        ("--config-dir", {"--config-dir"}),
    ],
)
def test_the_keys_that_an_override_sets(override, keys):
    assert keys_set([override]) == keys

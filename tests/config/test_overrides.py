"""Keys that overrides set, and values that this package writes into them."""

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from pipeline.config.compose import composed
from pipeline.config.overrides import hydra_quoted, keys_set, with_class_index


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


@pytest.mark.parametrize(
    ("override", "written"),
    [
        ("training.class_weight.1=5", "++training.class_weight={1: 5}"),
        ("+training.class_weight.012=0.5", "++training.class_weight={12: 0.5}"),
        ("training.class_weight.1=1,5", "++training.class_weight={1: 1},{1: 5}"),
        ("training.class_weight.1=${seed}", "++training.class_weight={1: ${seed}}"),
        ("training.class_weight={1: 5}", None),
        ("training.class_weight.one=5", None),
        ("training.class_weight.1=choice(1,5)", None),
        ("~training.class_weight.1", None),
    ],
)
def test_the_weight_of_one_class_is_written_as_a_mapping(override, written):
    assert with_class_index(override) == (written or override)


@pytest.mark.parametrize("sign", ["", "+", "++"])
def test_the_weight_of_one_class_replaces_that_of_a_file(tmp_path, monkeypatch, sign):
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    text = "# @package _global_\ntraining:\n  class_weight: {0: 1, 1: 2}\n"
    (tmp_path / "conf" / "experiment" / "mine.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    arguments = ["--config-dir", "conf", "experiment=mine"]

    config = composed([*arguments, f"{sign}training.class_weight.1=5"])
    assert config.training.class_weight == {0: 1, 1: 5}


def test_the_weights_of_two_classes_are_set_one_by_one():
    overrides = ["training.class_weight.1=5", "training.class_weight.0=2"]
    assert composed(overrides).training.class_weight == {1: 5, 0: 2}

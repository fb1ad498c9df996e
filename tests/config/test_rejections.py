"""Overrides that are rejected, and the line that each gets.

They are composed and resolved in this process, without TensorFlow. `wrong_configs` has
those that a command is run for.
"""

from __future__ import annotations

import itertools
import re

import pytest

from pipeline.common.errors import ConfigError
from pipeline.config import compose, schema
from pipeline.config.resolve import resolve
from tests.parameters import mostly_slow


def rejection(*overrides: str) -> str:
    """Return the message of the error for `overrides`."""
    with pytest.raises(ConfigError) as caught:
        resolve(compose.composed(overrides), overrides, {})
    return str(caught.value)


# --- flags ---


@pytest.mark.parametrize(
    ("key", "value"),
    mostly_slow(
        itertools.product(
            ["hardware.open_ports", "tracking.confined"], ["2", "0.5", "on", "null"]
        ),
        [("hardware.open_ports", "2"), ("tracking.confined", "null")],
    ),
)
def test_a_flag_with_a_security_meaning_is_true_or_false_only(key, value):
    assert rejection(f"{key}={value}").startswith(f"{key} must be true or false.")


def test_no_flag_is_left_to_omegaconf_which_accepts_any_number():
    assert [key.name for key in schema.keys_in(schema.Config) if key.hint is bool] == []


# --- entries that {} does not remove ---

STOP = "+training.callbacks.stop._target_=keras.callbacks.EarlyStopping"
EMPTIED = "must have its entries removed one by one, because {} is merged with them: "


def test_an_empty_mapping_that_removes_nothing_is_rejected(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\ntraining:\n  callbacks:\n"
        "    log: {_target_: keras.callbacks.CSVLogger}\n"
        "    stop: {_target_: keras.callbacks.EarlyStopping}\n"
    )
    mine = ("--config-dir", str(tmp_path), "experiment=mine")
    both = f"{EMPTIED}'~training.callbacks.log' '~training.callbacks.stop'."
    one = f"{EMPTIED}'~training.callbacks.log'."
    assert both in rejection(*mine, "training.callbacks={}")
    assert both in rejection(*mine, "training={callbacks: {}}")
    monitored = "+training.callbacks.stop.monitor=loss"
    assert one in rejection(*mine, "training.callbacks={}", monitored)


def test_an_empty_mapping_with_entries_of_the_command_line_is_accepted():
    overrides = ["training.callbacks={}", STOP]
    spec = resolve(compose.composed(overrides), overrides, {})
    assert list(spec.config.training.callbacks) == ["stop"]


def test_an_empty_mapping_that_a_sweep_has_recorded_is_accepted():
    overrides = ["training.metrics={}", "tracking.sweep=0123"]
    spec = resolve(compose.composed(overrides), overrides, {})
    assert list(spec.config.training.metrics) == ["accuracy"]


# --- links ---

WRONG_LINKS = [
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
]


@pytest.mark.parametrize(
    ("override", "key"),
    mostly_slow(
        WRONG_LINKS, [WRONG_LINKS[1], WRONG_LINKS[3], WRONG_LINKS[4], WRONG_LINKS[6]]
    ),
)
def test_a_wrong_link_is_shown_with_its_key_wherever_it_stands(override, key):
    assert rejection(override) == (
        f"{key} must refer to a key that exists. Received: '${{nope}}'."
    )


# --- counts, addresses, and the arguments of Keras' optimizers ---

ADDRESSES = [
    ("SQLITE:///a.db", "must name a file: sqlite:///PATH"),
    ("Sqlite:///", "must name a file: sqlite:///PATH"),
    ("http", "must have the form http://HOST:PORT"),
    ("https:", "must have the form https://HOST:PORT"),
    ("http://", "must have the form http://HOST:PORT"),
    ("http:/host:5000", "must have the form http://HOST:PORT"),
    ("http://host:port", "must have the form http://HOST:PORT"),
    ("http://host:99999", "must have the form http://HOST:PORT"),
    ("postgresql", "must have the form postgresql://HOST:PORT"),
]


@pytest.mark.parametrize(
    "override",
    mostly_slow(
        [
            "hardware.profile={start: 99999999999, updates: 5}",
            "hardware.profile={start: 1, updates: 99999999999}",
            "dataset.pad={multiple: 99999999999, value: 0}",
            "hardware.gpu=[0,99999999999]",
        ],
        [
            "dataset.pad={multiple: 99999999999, value: 0}",
            "hardware.gpu=[0,99999999999]",
        ],
    ),
)
def test_a_count_is_limited_also_in_a_mapping_or_list(override):
    assert "must be at most 2147483647. Received: 99999999999." in rejection(override)


@pytest.mark.parametrize(
    ("uri", "rule"),
    mostly_slow(ADDRESSES, [ADDRESSES[0], ADDRESSES[4], ADDRESSES[7], ADDRESSES[8]]),
)
def test_an_address_of_a_store_is_whole(uri, rule):
    line = f"tracking.uri {rule}. Received: '{uri}'."
    assert rejection(f"tracking.uri={uri}") == line


def test_keras_optimizers_are_checked_by_both_of_their_names():
    target = "optimizer._target_=tensorflow.keras.optimizers.Adam"
    assert rejection(target, "+optimizer.clipnorm=-1").startswith(
        "optimizer.clipnorm must be a positive number, or null. Received: -1."
    )


# --- mappings and lists ---

LOSSES = "[{_target_: keras.losses.Huber}]"


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (
            f"training.loss={LOSSES}",
            "training.loss must be a mapping, like the value that it is merged with; "
            "to set a list, put training.loss=null before it. Received: "
            "[{_target_: 'keras.losses.Huber'}].",
        ),
        (
            f"training={{loss: {LOSSES}}}",
            "training must have mappings and lists in the same places as the value "
            "that it is merged with. Received: {loss: [{_target_: "
            "'keras.losses.Huber'}]}.",
        ),
        ("training.keep_best=[1]", "training.keep_best must be a mapping. Received: "),
        (
            "training.keep_best=true",
            "training.keep_best must be null, or a mapping with the keys metric and mode. "
            "Received: true.",
        ),
        ("tracking.tags=[1]", "tracking.tags must be a mapping. Received: [1]."),
        (
            "model.hidden={a: 1}",
            "model.hidden must be a list, like the value that it is merged with; to "
            "set a mapping, put model.hidden=null before it. Received: {a: 1}.",
        ),
        ("hardware=[1]", "hardware must name one of the options of this group."),
    ],
)
def test_a_value_of_the_wrong_form_is_shown_with_its_rule(override, line):
    assert rejection(override).startswith(line)


def test_a_list_of_losses_is_legal_after_null():
    overrides = ["training.loss=null", f"training.loss={LOSSES}"]
    spec = resolve(compose.composed(overrides), overrides, {})
    assert spec.config.training.loss == [{"_target_": "keras.losses.Huber"}]


def test_a_list_of_losses_in_a_config_that_is_merged(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(f"defaults: [config, _self_]\ntraining: {{loss: {LOSSES}}}\n")
    line = rejection("--config-dir", str(tmp_path), "--config-name", "mine")
    assert line.startswith(
        "training.loss must be a mapping, like the value that it is merged with"
    )
    assert line.endswith("(in mine). Received: [{_target_: 'keras.losses.Huber'}].")


# --- the override that is to blame ---


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ("~dataset", "model=5"),
            "model must name one of the options of this group. Received: 5.",
        ),
        (
            ("training.keep_best=null", "training.keep_best.metric=val/loss"),
            "training.keep_best must not be null if "
            "training.keep_best.metric=val/loss sets a key in it.",
        ),
        (
            ("training={keep_best: null}", "+training.keep_best.mode=min"),
            "training.keep_best must not be null if training.keep_best.mode=min",
        ),
    ],
)
def test_the_override_that_is_to_blame_is_named(overrides, line):
    assert rejection(*overrides).startswith(line)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("{rule: adascale}", "scaling.rule=adascale was removed in version 0.2.0: "),
        (
            "{rule: \"'adascale'\"}",
            "scaling.rule must be one of its choices (in scaling",
        ),
        ("{rules: 1}", "scaling.rules must be a key of scaling (in scaling/gone). Rec"),
        ("rate: ${nope}", "scaling.rate must refer to a key that exists. Received: "),
    ],
)
def test_an_error_in_a_file_has_its_value_and_its_file(tmp_path, text, line):
    (tmp_path / "scaling").mkdir()
    (tmp_path / "scaling" / "gone.yaml").write_text(text)
    assert rejection("--config-dir", str(tmp_path), "scaling=gone").startswith(line)


def test_a_file_of_a_new_group_has_to_name_its_package(tmp_path, monkeypatch):
    (tmp_path / "conf" / "callbacks").mkdir(parents=True)
    text = "# The package has to be named first.\n# @package training.callbacks\na: 1\n"
    (tmp_path / "conf" / "callbacks" / "late.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    rule = re.escape(
        "callbacks must not be a key of the config (in callbacks/late): begin the file "
        "with the line `# @package KEY`"
    )
    with pytest.raises(ConfigError, match=f"^{rule}"):
        compose.composed(["--config-dir", "conf", "+callbacks=late"])


def test_a_horizon_in_examples_does_not_fit_batches_of_any_size():
    """It was rejected only when the data were loaded."""
    overrides = ("dataset.batched=true", "training.examples=900")
    assert rejection(*overrides) == (
        "training.examples cannot be the horizon with dataset.batched=true, as the "
        "number of examples is not known: set training.updates. Received: 900."
    )

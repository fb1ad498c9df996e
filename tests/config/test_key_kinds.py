"""Each key has a kind, and the lists that sort keys follow from it."""

from __future__ import annotations

import re
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from pipeline.config import compose, key_kinds, schema
from pipeline.config.plain import leaves, plain
from pipeline.config.schema import Kind
from pipeline.tracking import provenance

CONF = Path(__file__).parents[2] / "conf"
EVERY_KEY = key_kinds.keys_where(lambda facts: True)
# What a missing key meant in an old record, where a new run does something else.
LEGACY = {
    "accumulation.effective_batch_size": None,
    "accumulation.factor": None,
    "accumulation.moving_statistics": "micro",
    "hardware.fused_attention": False,
    "hardware.xla": False,
    "tracking.code": [],
    "training.checkpoint_every": None,
    "training.epochs": None,
}
# Keys that the default choices of the groups do not set.
NOT_IN_YAML = {
    # of other choices of `dataset`
    "dataset.download",
    "dataset.token_cache",
    "schema",
    "tracking.sweep",
    "tracking.job",
    "tracking.confined",
}


@cache
def _composed() -> dict[str, Any]:
    return plain(compose.composed([]))


def config_with(key: str, value: object) -> dict[str, Any]:
    """A recorded config with another value of one key."""
    config = deepcopy(_composed())
    *parents, last = key.split(".")
    node = config
    for parent in parents:
        node = node[parent]
    node[last] = value
    return config


def legacy_defaults() -> dict[str, Any]:
    structured = OmegaConf.structured(schema.Config)
    return leaves(OmegaConf.to_container(structured, enum_to_str=True))


def yaml_defaults() -> dict[str, Any]:
    """What `conf/config.yaml` and the default choices of its groups set."""
    config = yaml.safe_load((CONF / "config.yaml").read_text())
    defaults = config.pop("defaults")
    config.pop("hydra")
    for entry in defaults:
        if not isinstance(entry, dict):
            continue
        for group, choice in entry.items():
            if choice is None or group.startswith("override"):
                continue
            chosen = yaml.safe_load((CONF / group / f"{choice}.yaml").read_text())
            package = "training" if group == "objective" else group
            config.setdefault(package, {}).update(chosen)
    return leaves(config)


# --- kinds ---


def test_every_key_of_the_schema_has_a_kind():
    for key in legacy_defaults():
        assert key in EVERY_KEY


def test_a_key_without_a_kind_is_an_error():
    @dataclass
    class Group:
        known: int = field(default=1, metadata=schema.about(Kind.LOG))
        unknown: int = 1

    with pytest.raises(TypeError, match="unknown has no kind"):
        key_kinds.facts_by_key(Group)


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("model.hidden", Kind.TRAINING),
        ("dataset", Kind.TRAINING),
        ("dataset.name", Kind.TRAINING),
        ("dataset.data_dir", Kind.MACHINE),
        ("dataset.augment.pixels", Kind.TRAINING),
        ("training.keep_best", Kind.TRAINING),
        ("training.metrics.accuracy._target_", Kind.TRAINING),
        ("tracking.tags.team", Kind.LOG),
        ("hardware.profile.start", Kind.LOG),
        ("hardware.workers", Kind.CUT),
        ("removed.long.ago", Kind.TRAINING),
    ],
)
def test_a_name_below_a_key_is_of_its_kind(key, kind):
    assert key_kinds.kind_of(key) == kind


@pytest.mark.parametrize(
    ("key", "decides"),
    [
        ("tracking", False),
        ("trust", False),
        ("hardware", True),
        ("dataset", True),
        ("experiment", True),
        ("hardware.memory", False),
        ("hardware.tf32", True),
    ],
)
def test_a_group_decides_what_runs_if_one_of_its_keys_does(key, decides):
    assert key_kinds.decides_what_runs(key) is decides


def test_only_the_log_and_the_trust_are_groups_apart():
    assert key_kinds.groups_apart() == ["tracking", "trust"]


def test_a_config_is_restricted_to_the_keys_of_some_kinds():
    config = {
        "hardware": {"precision": "float32", "gpu": 1},
        "dataset": {"_target_": "mine", "data_dir": "/data"},
        "tracking": {"experiment": "x"},
        "training": {"callbacks": {}},
    }
    assert key_kinds.restricted(config, key_kinds.WHAT_RUNS) == {
        "hardware": {"precision": "float32"},
        "dataset": {"_target_": "mine"},
        "training": {"callbacks": {}},
    }


# --- the hash of a config ---


@pytest.mark.parametrize("key", EVERY_KEY)
def test_a_hash_changes_with_each_key_that_decides_what_runs_and_no_other(key):
    before = provenance.config_hash(_composed(), None)
    after = provenance.config_hash(config_with(key, "another value"), None)
    decides = key_kinds.kind_of(key) in (Kind.TRAINING, Kind.CUT, Kind.NUMERICS)
    assert (after != before) is decides


@pytest.mark.parametrize(
    "key",
    [
        "hardware.parallel_jobs",
        "hardware.gpus_per_job",
        "hardware.gpu_memory",
        "hardware.memory",
        "dataset.download",
        "dataset.checksum",
    ],
)
def test_a_hash_of_version_1_changed_with_keys_of_the_place(key):
    changed = config_with(key, "another value")
    before = provenance.config_hash_1(_composed(), None)
    assert provenance.config_hash_1(changed, None) != before
    assert provenance.config_hash(changed, None) == provenance.config_hash(
        _composed(), None
    )


def test_a_recorded_hash_is_checked_by_its_version():
    config = config_with("seed", 3)
    for hashed in (provenance.config_hash, provenance.config_hash_1):
        recorded = hashed(config, "/a/run")
        assert provenance.has_hash(config, "/a/run", recorded)
        assert not provenance.has_hash(_composed(), "/a/run", recorded)


def test_version_1_is_what_it_was():
    """The hash of a small config, as commit 5fe7f57 computed it."""
    config = {
        "dataset": {"data_dir": "/data", "download": True},
        "training": {"resume": "auto", "checkpoint_every": 2, "epochs": 1},
        "hardware": {"gpu": 1, "jobs_per_gpu": 2, "gpus_per_job": 1},
        "tracking": {"noise_every": 3},
        "accumulation": {"schedule": None},
        "schema": 2,
    }
    assert provenance.config_hash_1(config, None) == (
        "2a990024508758ad4651450230d004d04b23a8518f4aae2e7ad5dc35bc249cf4"
    )


# --- defaults ---


def test_the_defaults_of_new_runs_stand_in_the_yaml():
    in_yaml = yaml_defaults()
    missing = set()
    for key in EVERY_KEY:
        if not any(f"{name}.".startswith(f"{key}.") for name in in_yaml):
            missing.add(key)
    assert missing == NOT_IN_YAML


def test_a_missing_key_means_another_default_only_where_it_is_listed():
    in_yaml = yaml_defaults()
    differing = {}
    for key, value in legacy_defaults().items():
        if key in in_yaml and value not in ("???", in_yaml[key]):
            differing[key] = value
    assert differing == LEGACY


# --- keys that only a sweep sets ---


@pytest.mark.parametrize("option", [("--cfg", "job"), ("--help",)])
def test_what_only_a_sweep_sets_is_not_shown(option, capsys):
    from pipeline.cli.train import train

    train(["tracking.experiment=mine", *option])
    shown = capsys.readouterr().out
    assert re.search("experiment[:=] ?mine", shown)
    for name in ("sweep:", "job:", "confined:"):
        assert f"\n  {name}" not in shown


@pytest.mark.parametrize("named", ["tracking.job=third", "tracking={job: third}"])
def test_what_only_a_sweep_sets_is_shown_where_it_is_named(named, capsys):
    from pipeline.cli.train import train

    train([named, "--cfg", "job"])
    assert "\n  job: third" in capsys.readouterr().out

"""Names of earlier versions, in configs and in records, mean what they are now."""

from __future__ import annotations

import json
from copy import deepcopy

import pytest
from hydra.utils import get_object, instantiate
from omegaconf import OmegaConf

import pipeline
from pipeline.checkpoints import recorded_config
from pipeline.common.errors import ConfigError
from pipeline.config import compose, former_names
from pipeline.config.plain import leaves, plain
from pipeline.rerun.recorded_run import RecordedRun
from pipeline.sweep.again import trusted_overrides
from pipeline.tracking.journal_file import Past
from pipeline.trust.gate import Gate, check_config
from tests.parameters import mostly_slow
from tests.running import Store
from tests.running import pipeline as command

FORMER = {
    "pipeline.model.mlp": "pipeline.components.model.mlp",
    "pipeline.optimizer.constant": "pipeline.components.optimizer.constant",
    "pipeline.metrics.BitsPerToken": "pipeline.components.metrics.BitsPerToken",
    "pipeline.augmentation.Flip": "pipeline.dataset.augmentation.Flip",
    "pipeline.compose.RunFolders": "pipeline.config.compose.RunFolders",
    "pipeline.datasets.digits.Digits": "pipeline.dataset.builtin.digits.Digits",
}
# Not of the table: what still has its name, what only begins like a former one, and
# text around a name.
CURRENT = (
    "pipeline.dataset.digits",
    "pipeline.components.model.mlp",
    "pipeline.models.mlp",
    "mypipeline.model.mlp",
    "pipeline.model_zoo.mlp",
    "pipeline.model.",
    "a pipeline.model.mlp",
    "pipeline.model.mlp b",
    "pipeline.mödel",
)
# Where a config may hold a name.
NODES = {
    "target": {"_target_": "pipeline.model.mlp", "hidden": [16]},
    "partial": {"_target_": "pipeline.optimizer.constant", "_partial_": True},
    "path": {"_target_": "hydra.utils.get_method", "path": "pipeline.model.mlp"},
    "list": [
        {
            "deep": [
                {"_target_": "pipeline.augmentation.Flip"},
                "pipeline.metrics.BitsPerToken",
            ]
        }
    ],
    "trust": {"allow": ["pipeline.model.mlp", "mypkg", "/mnt/pipeline.model.mlp"]},
}
CONFIG = NODES | {"number": 1, "nothing": None, "seed": True, "current": list(CURRENT)}


def names_in(node: object) -> set[str]:
    names = set()
    for value in leaves(node).values():
        if isinstance(value, list):
            names.update(value)
        else:
            names.add(value)
    return names


@pytest.mark.parametrize("name", FORMER)
def test_a_former_name_is_the_current_one_and_exists(name):
    assert former_names.current(name) == FORMER[name]
    assert get_object(FORMER[name])


@pytest.mark.parametrize("text", CURRENT)
def test_any_other_text_stays_as_it_is(text):
    assert former_names.current(text) == text


def test_names_are_rewritten_wherever_they_are():
    before = deepcopy(CONFIG)
    renamed = former_names.renamed(CONFIG)
    assert before == CONFIG  # a copy
    assert renamed["target"] == {
        "_target_": "pipeline.components.model.mlp",
        "hidden": [16],
    }
    assert renamed["partial"] == {
        "_target_": "pipeline.components.optimizer.constant",
        "_partial_": True,
    }
    assert renamed["path"]["path"] == "pipeline.components.model.mlp"
    assert names_in(renamed["list"]) == {
        "pipeline.dataset.augmentation.Flip",
        "pipeline.components.metrics.BitsPerToken",
    }
    assert renamed["trust"]["allow"] == [
        "pipeline.components.model.mlp",
        "mypkg",
        "/mnt/pipeline.model.mlp",
    ]
    for key in CONFIG.keys() - NODES.keys():
        assert renamed[key] == CONFIG[key]


def test_a_run_is_called_as_it_likes():
    free = {
        "tracking": {"run_name": "pipeline.model.v2", "code": ["pipeline.model"]},
        "start": {"run": None},
    }
    config = OmegaConf.create(deepcopy(free))
    former_names.rename(config)
    assert OmegaConf.to_container(config) == former_names.renamed(free) == free


def test_the_overrides_of_a_recorded_sweep_are_rewritten():
    own = compose.composed([])
    tags = {"sweep.overrides": json.dumps(["model._target_=pipeline.model.mlp"])}
    assert trusted_overrides(tags, [], own) == ["model._target_=pipeline.model.mlp"]
    tags = {"sweep.overrides": json.dumps(["model._target_=pipeline.model.build"])}
    with pytest.raises(ConfigError):
        trusted_overrides(tags, [], own)


def test_a_composed_config_is_rewritten_in_place_and_keeps_its_links():
    links = {"link": "${number}", "linked": "${target}", "unset": "???"}
    config = OmegaConf.create({**deepcopy(CONFIG), **links})
    former_names.rename(config)
    expected = {**former_names.renamed(CONFIG), **links}
    assert OmegaConf.to_container(config) == expected


def test_hydra_finds_former_modules_before_a_config_is_composed():
    """Such as `hydra.callbacks` and `hydra.job_logging` name them."""
    for name, current in FORMER.items():
        # Hydra does not import the modules of this one by a former name.
        if not name.startswith("pipeline.datasets."):
            assert get_object(name) is get_object(current)
    node = OmegaConf.create(
        {"_target_": "hydra.utils.get_class", "path": "pipeline.compose.RunFolders"}
    )
    assert instantiate(node) is compose.RunFolders
    with pytest.raises(
        AttributeError, match="module 'pipeline' has no attribute 'no_such_module'"
    ):
        _ = pipeline.no_such_module


def composed(*overrides: str) -> dict:
    return plain(compose.composed(overrides))


def test_composing_renames_overrides():
    config = composed(
        "model=mlp", "model._target_=pipeline.model.mlp", "trust.allow=[pipeline.model]"
    )
    assert config["model"]["_target_"] == "pipeline.components.model.mlp"
    assert config["trust"]["allow"] == ["pipeline.components.model"]
    assert composed("model=mlp")["model"] == config["model"]


def test_the_gate_takes_a_record_with_former_names(tmp_path):
    gate = Gate(tmp_path)
    config = composed("model=mlp", "dataset=digits")
    config["tracking"].pop("uri")
    config["model"]["_target_"] = "pipeline.model.mlp"
    renamed = RecordedRun(None, config, {}, {}, {}).moved(tmp_path)
    check_config(renamed, gate, imports=False)
    message = (
        r"model\._target_ of a config from a tracking store .*'pipeline\.model\.mlp'"
    )
    with pytest.raises(ConfigError, match=message):
        check_config(config, gate, imports=False)


def test_a_former_name_that_the_user_allows_is_allowed(tmp_path):
    # It is no builder.
    config = {"model": {"_target_": "pipeline.model.build"}}
    renamed = RecordedRun(None, config, {}, {}, {}).moved(tmp_path)
    with pytest.raises(ConfigError, match=r"'pipeline\.components\.model\.build'"):
        check_config(renamed, Gate(tmp_path), imports=False)
    # As `pipeline rerun --allow` takes it.
    allowed = [former_names.current("pipeline.model")]
    check_config(renamed, Gate(tmp_path, allowed=allowed), imports=False)
    with pytest.raises(ConfigError, match=r"'pipeline\.components\.model\.build'"):
        check_config(renamed, Gate(tmp_path, allowed=["pipeline.model"]), imports=False)


REMOVED = {
    "scaling.rule=adascale": {"scaling": {"rule": "adascale"}},
    "accumulation.batch_schedule=seesaw": {"accumulation": {"schedule": "seesaw"}},
    "accumulation.seesaw_max": {"accumulation": {"seesaw_max": 512}},
    "accumulation.scale_rate": {"accumulation": {"scale_rate": False}},
}


@pytest.mark.parametrize("subject", REMOVED)
def test_a_record_with_what_was_removed_is_rejected(subject, tmp_path):
    """As rerun, resume, forks and `critical` read it."""
    record = {group: {} for group in recorded_config.FORM} | REMOVED[subject]
    (tmp_path / "config.yaml").write_text(json.dumps(record))
    message = rf"^{subject} was removed in version 0\.2\.0: \w.*\.$"
    with pytest.raises(ConfigError, match=message):
        recorded_config.read(tmp_path, Past(tmp_path), "RUN")
    with pytest.raises(ConfigError, match=message):
        RecordedRun(None, record, {}, {}, {}).moved(tmp_path)


def test_a_record_with_the_defaults_of_removed_keys_is_read_without_them():
    record = {
        "accumulation": {"factor": 4, "scale_rate": True, "seesaw_max": None},
        "scaling": {"rule": "sqrt"},
        "seed": 1,
    }
    before = deepcopy(record)
    assert former_names.renamed(record) == {
        "accumulation": {"factor": 4},
        "scaling": {"rule": "sqrt"},
        "seed": 1,
    }
    assert record == before


@pytest.mark.parametrize(
    "override",
    mostly_slow(
        [
            "scaling=adascale",
            "scaling=none,sqrt,adascale",
            "scaling.rule=adascale",
            "accumulation.schedule=seesaw",
            "+accumulation.seesaw_max=64,128",
            "accumulation.scale_rate=true,false",
        ],
        ["scaling=none,sqrt,adascale", "+accumulation.seesaw_max=64,128"],
    ),
)
def test_a_recorded_sweep_over_what_was_removed_is_rejected(override):
    tags = {"sweep.overrides": json.dumps([override])}
    with pytest.raises(ConfigError, match=r"^\S+ was removed in version 0\.2\.0: "):
        trusted_overrides(tags, [], compose.composed([]))


def test_a_recorded_sweep_goes_on_without_the_defaults_of_removed_keys():
    recorded = [
        "accumulation.scale_rate=true",
        "accumulation.factor=2",
        "+accumulation.seesaw_max=null",
    ]
    tags = {"sweep.overrides": json.dumps(recorded)}
    own = compose.composed([])
    assert trusted_overrides(tags, [], own) == ["accumulation.factor=2"]


# --- keys ---

OVERRIDES = {
    "tracking.noise_every=3": "accumulation.noise_scale_every=3",
    "++tracking.noise_every=3": "++accumulation.noise_scale_every=3",
    "accumulation.schedule=null": "accumulation.batch_schedule=null",
    "accumulation.schedule.1.effective_batch_size=8": (
        "accumulation.batch_schedule.1.effective_batch_size=8"
    ),
    "hydra.sweeper.params.tracking.noise_every=1,2": (
        "hydra.sweeper.params.accumulation.noise_scale_every=1,2"
    ),
}


@pytest.mark.parametrize("former", OVERRIDES)
def test_an_override_of_a_former_key_is_one_of_the_current_key(former):
    assert former_names.with_current_key(former) == OVERRIDES[former]
    assert compose.as_text([former]) == [OVERRIDES[former]]


@pytest.mark.parametrize(
    "text",
    [
        "accumulation.schedule_of_mine=1",
        "tracking.run_name=tracking.noise_every",
        "model.tracking.noise_every=1",
        "schedule=cosine",
    ],
)
def test_any_other_override_stays_as_it_is(text):
    assert former_names.with_current_key(text) == text


def test_a_config_composes_with_former_keys_on_the_command_line():
    stages = "[{start:{updates:0},effective_batch_size:32}]"
    config = composed("tracking.noise_every=3", f"accumulation.schedule={stages}")
    assert config["accumulation"]["noise_scale_every"] == 3
    assert config["accumulation"]["batch_schedule"] == [
        {"start": {"updates": 0}, "effective_batch_size": 32}
    ]
    assert "noise_every" not in config["tracking"]


def test_a_file_with_a_former_key_is_rejected_with_the_current_one(tmp_path):
    experiment = tmp_path / "experiment"
    experiment.mkdir()
    file = experiment / "mine.yaml"
    file.write_text("# @package _global_\ntracking: {noise_every: 3}\n")
    message = (
        r"^tracking\.noise_every must be written as accumulation\.noise_scale_every"
    )
    with pytest.raises(ConfigError, match=message):
        compose.composed(["--config-dir", str(tmp_path), "experiment=mine"])


def test_a_record_of_schema_2_has_current_keys():
    record = {
        "accumulation": {"factor": 4, "schedule": None},
        "tracking": {"noise_every": 3, "log_every": 1},
        "schema": 2,
    }
    before = deepcopy(record)
    assert former_names.migrated(record) == {
        "accumulation": {"factor": 4, "batch_schedule": None, "noise_scale_every": 3},
        "tracking": {"log_every": 1},
        "schema": 3,
    }
    assert record == before  # a copy
    assert former_names.migrated({**record, "schema": 1})["schema"] == 1


def test_a_current_key_outranks_a_former_one():
    record = {
        "accumulation": {"noise_scale_every": 5},
        "tracking": {"noise_every": 3},
    }
    assert former_names.renamed(record)["accumulation"] == {"noise_scale_every": 5}


def test_links_name_current_keys():
    links = {
        "model.every": "${tracking.noise_every}",
        "accumulation.schedule.1.effective_batch_size": "${times:${seed}, ${model.x}}",
        "model.x": "${times:${accumulation.schedule.0.effective_batch_size}, 2}",
    }
    assert former_names.current_links(links) == {
        "model.every": "${accumulation.noise_scale_every}",
        "accumulation.batch_schedule.1.effective_batch_size": (
            "${times:${seed}, ${model.x}}"
        ),
        "model.x": "${times:${accumulation.batch_schedule.0.effective_batch_size}, 2}",
    }


@pytest.mark.slow
def test_a_run_with_a_former_name_trains_and_records_the_current_one(tmp_path):
    small = (
        "train",
        "model=mlp",
        "training.updates=2",
        "tracking.log_model=false",
        "tracking.system_metrics=false",
    )
    command(
        *small,
        "model.hidden=[8]",
        "model._target_=pipeline.model.mlp",
        "hydra.run.dir=run",
        cwd=tmp_path,
    )
    run = Store(tmp_path).run()
    assert run.info.status == "FINISHED"
    assert run.data.params["model._target_"] == "pipeline.components.model.mlp"
    recorded = OmegaConf.load(tmp_path / "run" / "config.yaml")
    assert recorded.model._target_ == "pipeline.components.model.mlp"
    refused = command(
        *small,
        "model._target_=pipeline.model.no_such",
        "hydra.run.dir=other",
        cwd=tmp_path,
        status=2,
    )
    assert "must name something that exists" in refused.stderr

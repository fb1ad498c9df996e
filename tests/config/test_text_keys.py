"""A key of text holds what was typed, also where it looks like a number."""

from __future__ import annotations

from pathlib import Path

import cloudpickle
import pytest
from omegaconf import OmegaConf

from pipeline.common.errors import ConfigError
from pipeline.config import compose, schema, text_keys
from pipeline.config.resolve import resolve
from pipeline.launch import recorded_job
from tests.parameters import mostly_slow
from tests.running import one_process

LOOKS_LIKE_ANOTHER = (
    "2024_01_02",
    "1e5",
    "1.10",
    "+5",
    "-0",
    "true",
    "nan",
    "inf",
    "lr=0.1",
)
PLAIN = ("digits", "007", "no", "a b", "v1.10", "http://host:5000/a")
SCALARS = (
    "tracking.run_name",
    "tracking.experiment",
    "tracking.description",
    "start.run",
    "hardware.secret_file",
    "tracking.register",
    "training.keep_best.metric",
    "+tracking.tags.version",
    "++tracking.tags.a-b/c",
    "dataset.data_dir",
)


def value_of(override: str) -> object:
    """Return what the config has at the key of an override."""
    key = override.lstrip("+").partition("=")[0]
    return OmegaConf.select(compose.composed([override]), key)


@pytest.mark.parametrize("key", SCALARS)
def test_a_scalar_override_keeps_what_was_typed(key):
    for text in (*LOOKS_LIKE_ANOTHER, "9" * 5_000):
        (override,) = compose.as_text([f"{key}={text}"])
        assert override == f"{key}='{text}'"
        assert compose.as_text([override]) == [override]  # to do it twice is safe
    for text in PLAIN:
        assert compose.as_text([f"{key}={text}"]) == [f"{key}={text}"]


def test_the_config_has_what_was_typed():
    keys = [key for key in SCALARS if "/" not in key]
    for text, value in [("2024_01_02", "2024_01_02"), ("1e5", "1e5"), ("'1e5'", "1e5")]:
        config = compose.composed([f"{key}={text}" for key in keys])
        for key in keys:
            assert OmegaConf.select(config, key.lstrip("+")) == value


def test_a_folder_of_hydra_keeps_what_was_typed():
    for key in ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir"):
        assert compose.as_text([f"{key}=2024_01_02"]) == [f"{key}='2024_01_02'"]


def test_the_values_of_a_sweep_keep_what_was_typed():
    swept = "tracking.description=1e5,wide, 2_0,null"
    (override,) = compose.as_text([swept])
    assert override == "tracking.description='1e5',wide,'2_0',null"


@pytest.mark.parametrize(
    "override",
    [
        "seed=1_0",  # a number
        "model.hidden=1e5",  # the schema does not know its type
        "tracking.run_name=null",
        "tracking.run_name=",
        "tracking.run_name=${seed}",
        "tracking.code=[1e5]",
        "tracking={run_name: 1e5}",
        "~tracking.description",
        "--multirun",
    ],
)
def test_what_is_no_scalar_of_a_text_key_is_left_to_hydra(override):
    assert compose.as_text([override]) == [override]


def test_null_stays_null():
    assert value_of("tracking.run_name=null") is None


NOT_TEXT = {
    "tracking.run_name": (["tracking={run_name: 1e5}"], "100000.0"),
    "tracking.tags.version": (["+tracking.tags={version: 1.10}"], "1.1"),
    "tracking.code": (["tracking.code=[a.py,2024_01_02]"], "20240102"),
    "trust.allow": (["trust.allow=[1e5]"], "100000.0"),
    "start.run": (["start={run: 12e4}"], "120000.0"),
    "training.keep_best.metric": (["training.keep_best={metric: true}"], "true"),
}


@pytest.mark.parametrize(
    "key",
    mostly_slow(
        NOT_TEXT,
        ["tracking.run_name", "tracking.tags.version", "tracking.code"],
    ),
)
def test_what_is_lost_in_braces_and_lists_is_rejected_with_its_quoting(key):
    overrides, received = NOT_TEXT[key]
    with pytest.raises(ConfigError) as caught:
        compose.composed(overrides)
    line = str(caught.value)
    assert line.startswith(f"{key} must be text")
    assert line.endswith(f" Received: {received}.")
    name = key.rpartition(".")[2]
    example = f'{name}: "…" in YAML and in {{…}}'
    if key in ("tracking.code", "trust.allow"):
        example = f'{name}: ["…"] in YAML'
    assert example in line
    # The same in quotes is taken.
    quoted = [text.replace("1e5", "'1e5'") for text in overrides]
    if quoted != overrides:
        compose.composed(quoted)


@pytest.mark.parametrize(
    ("yaml", "received"),
    mostly_slow(
        [("no", "false"), ("1e5", "100000.0"), ("2024_01_02", "2024")],
        [("2024_01_02", "2024")],
    ),
)
def test_what_yaml_reads_as_no_text_is_rejected(tmp_path, yaml, received):
    folder = tmp_path / "tracking"
    folder.mkdir()
    file = folder / "mine.yaml"
    arguments = ["--config-dir", str(tmp_path), "tracking=mine"]
    file.write_text(f"defaults: [local, _self_]\nrun_name: {yaml}\n")
    with pytest.raises(ConfigError) as caught:
        compose.composed(arguments)
    assert str(caught.value).startswith("tracking.run_name must be text, or null, in")
    assert f"Received: {received}" in str(caught.value)

    file.write_text(f'defaults: [local, _self_]\nrun_name: "{yaml}"\n')
    assert compose.composed(arguments).tracking.run_name == yaml


def test_null_is_rejected_where_the_schema_needs_text():
    with pytest.raises(ConfigError, match=r"^tracking\.experiment must be text\. Rec"):
        compose.composed(["tracking.experiment=null"])


def test_a_key_that_is_deleted_must_be_given():
    overrides = ["~tracking.experiment"]
    with pytest.raises(ConfigError, match=r"^tracking\.experiment must be given\."):
        resolve(compose.composed(overrides), overrides)


def test_a_link_to_a_number_is_the_text_of_the_number():
    overrides = ["seed=7", "tracking.run_name=${seed}", "+tracking.tags.seed=${seed}"]
    spec = resolve(compose.composed(overrides), overrides)
    assert spec.config.tracking.run_name == "7"
    assert spec.config.tracking.tags == {"seed": "7"}
    assert spec.links["tracking.run_name"] == "${seed}"  # it stays a link
    assert spec.changed({"seed": 8}).config.tracking.run_name == "8"
    assert type(spec.config) is schema.Config


def test_records_are_read_as_before(tmp_path):
    config = {
        **OmegaConf.to_container(compose.composed([]), resolve=True, enum_to_str=True),
        "start": {"run": 123, "weights_only": False},
    }
    config["tracking"] |= {"run_name": 1e5, "tags": {"v": 1.1, "w": True}, "code": [5]}
    file = recorded_job.recorded_file(config, tmp_path, "record")
    composed = compose.composed(file)
    assert composed.tracking.run_name == "100000.0"
    assert composed.tracking.tags == {"v": "1.1", "w": "True"}
    assert composed.tracking.code == ["5"]
    assert composed.tracking.description is None
    assert composed.start.run == "123"


def test_the_schema_of_the_command_line_has_the_keys_and_defaults_of_the_schema():
    for config in (schema.Config, schema.ShownConfig):
        loose = OmegaConf.structured(schema.as_written(config))
        assert OmegaConf.to_container(loose) == OmegaConf.to_container(
            OmegaConf.structured(config)
        )


def test_a_composed_config_is_sent_to_another_process():
    config = compose.composed(["tracking.run_name=1e5"])
    assert cloudpickle.loads(cloudpickle.dumps(config)) == config


def test_every_key_of_text_is_known():
    assert set(text_keys.TYPES) == {
        "training.keep_best.metric",
        "start.run",
        "hardware.secret_file",
        "tracking.uri",
        "tracking.experiment",
        "tracking.register",
        "tracking.run_name",
        "tracking.tags",
        "tracking.description",
        "tracking.code",
        "tracking.sweep",
        "tracking.job",
        "trust.allow",
    }


SWEEPS = {
    # a list, in which Hydra has read the numbers before a job is composed
    "train -m tracking.description=choice(1e5,2e5)": "tracking.description",
    "sweep numbered": "tracking.run_name",
}


@pytest.mark.slow
def test_what_is_lost_in_the_list_of_a_sweep_is_rejected(tmp_path):
    file = Path(tmp_path / "sweeps" / "numbered.yaml")
    file.parent.mkdir()
    file.write_text(
        "defaults: [config, _self_]\n"
        "hydra: {sweeper: {params: {tracking.run_name: '2024_01_02,2024_01_03'}}}\n"
    )
    results = one_process({line: line for line in SWEEPS}, tmp_path)
    for line, result in results.items():
        assert result["status"] == 2, result
        assert result["err"].startswith(f"pipeline: {SWEEPS[line]} must be text")
        assert len(result["err"].splitlines()) == 1

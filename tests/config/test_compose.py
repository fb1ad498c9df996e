"""How overrides and files become a config."""

from __future__ import annotations

import hydra
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from pipeline.config import compose, schema
from pipeline.config.session import Session, entered
from tests.parameters import mostly_slow

# --- errors ---


def test_a_fault_of_this_program_is_no_error_of_the_config(monkeypatch):
    def faulty(config):
        raise ValueError("a fault")

    monkeypatch.setattr(compose.former_names, "rename", faulty)
    with pytest.raises(ValueError, match="a fault"):
        compose.composed([])


# --- the home directory ---


@pytest.mark.parametrize(
    "home",
    mostly_slow(
        ["/home/me", "/tmp/it's", "/a(b", r"/a\q", "/a b", "/é"],
        ["/tmp/it's", r"/a\q"],
    ),
)
def test_a_tilde_is_the_home_directory_whatever_its_name(home, monkeypatch):
    monkeypatch.setenv("HOME", home)
    overrides = ["dataset.data_dir=~/x", "tracking.uri=sqlite:///~/s.db"]
    config = compose.composed(compose.as_text(overrides))
    assert config.dataset.data_dir == f"{home}/x"
    assert config.tracking.uri == f"sqlite:///{home}/s.db"


def test_a_tilde_is_expanded_in_each_value_of_a_sweep(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    (override,) = compose.as_text(["dataset.data_dir=~/a,b, ~/${oc.env:X,~/c}"])
    assert override == "dataset.data_dir=/home/me/a,b,/home/me/${oc.env:X,~/c}"
    monkeypatch.setenv("HOME", "/tmp/it's")
    (override,) = compose.as_text(["dataset.data_dir=~/a,b"])
    assert override == r"dataset.data_dir='/tmp/it\'s/a',b"


@pytest.mark.parametrize("text", ["--config-dir", "model.x=a~/b", "seed=~", "a=[~/b]"])
def test_another_tilde_is_left_to_hydra(text):
    assert compose.as_text([text]) == [text]


def test_a_tilde_in_a_file_is_the_home_directory_at_every_key_of_a_path(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("HOME", "/home/me")
    (tmp_path / "mine.yaml").write_text(
        "defaults: [config, _self_]\n"
        "hardware: {secret_file: ~/s}\n"
        "start: {run: ~/r@5}\n"
        "dataset: {data_dir: ~/d}\n"
        "trust: {allow: [my.models, ~/t]}\n"
        "tracking: {uri: sqlite:///~/u, code: [a.py, ~/c, '${seed}~'],\n"
        "  description: ~/x}\n"
    )
    config = compose.composed(["--config-dir", str(tmp_path), "--config-name=mine"])
    assert config.hardware.secret_file == "/home/me/s"
    assert config.start.run == "/home/me/r@5"
    assert config.dataset.data_dir == "/home/me/d"
    assert config.trust.allow == ["my.models", "/home/me/t"]
    assert config.tracking.uri == "sqlite:////home/me/u"
    assert config.tracking.code == ["a.py", "/home/me/c", "0~"]
    assert config.tracking.description == "~/x"


def test_jobs_of_a_sweep_get_its_folder_whatever_the_home_is_called(monkeypatch):
    monkeypatch.setenv("HOME", "/tmp/it's")
    schema.register()
    overrides = ["hydra.sweep.dir='~/jobs'", "hydra.mode=MULTIRUN"]
    with hydra.initialize_config_dir(compose.directory(), version_base="1.3"):
        config = hydra.compose("config", overrides, return_hydra_config=True)
    with entered(Session()):
        compose.RunFolders().on_multirun_start(config)
    override = OverridesParser.create().parse_override(config.hydra.overrides.hydra[-1])
    assert override.value() == "/tmp/it's/jobs"

"""The config of a run directory is that with which the run began."""

import json

import pytest
from omegaconf import OmegaConf

from pipeline.checkpoints import recorded_config
from pipeline.checkpoints.resume_rules import find_continuation
from pipeline.common.errors import ConfigError
from pipeline.common.sqlite_uri import absolute
from pipeline.config import compose
from pipeline.config.plain import leaf_texts
from pipeline.config.resolve import resolve
from pipeline.tracking import journal_file, provenance
from pipeline.tracking.journal_file import Past

OVERRIDES = ("model=mlp", "+training.callbacks.log={_target_: mine.Log}")


def spec_of(*overrides):
    return resolve(compose.composed(overrides), overrides)


def recorded_run(folder, *overrides):
    """Write what a run records of its config as it begins; return the directory."""
    run_dir = folder / "run"
    run_dir.mkdir()
    path = f"+training.callbacks.log.path={run_dir}/log"
    overrides = [*OVERRIDES, path, *overrides]
    spec = spec_of(*overrides)
    config = spec.recorded
    (run_dir / "config.yaml").write_text(OmegaConf.to_yaml(config))
    (run_dir / "environment.json").write_text(json.dumps({"run_dir": str(run_dir)}))
    tags = {
        "journal": "1",
        provenance.HASH_TAG: provenance.config_hash(config, str(run_dir)),
    }
    writer = journal_file.create(run_dir / journal_file.JOURNAL_NAME)
    params = leaf_texts(config) | {"derived.factor": 1}
    start = {
        "format": 1,
        "store": absolute(spec.config.tracking.uri),
        "tags": tags,
        "params": params,
        "segment": provenance.segment(0, spec),
    }
    writer.write({"start": start})
    writer.close()
    return run_dir


def read(run_dir):
    return recorded_config.read(run_dir, Past.read(run_dir), "RUN")


def edit(run_dir, before, after):
    file = run_dir / "config.yaml"
    text = file.read_text()
    assert text.count(before) == 1
    file.write_text(text.replace(before, after))


def test_a_config_is_read_also_in_a_directory_that_was_moved(tmp_path):
    run_dir = recorded_run(tmp_path, f"+model.note={run_dir_beside(tmp_path)}")
    before = read(run_dir)
    assert before["optimizer"]["learning_rate"] == 0.01
    log = before["training"]["callbacks"]["log"]
    assert log["path"] == f"{tmp_path}/run/log"
    moved = run_dir.rename(tmp_path / "elsewhere")
    log["path"] = f"{tmp_path}/elsewhere/log"  # it was the old path
    assert read(moved) == before


def run_dir_beside(folder):
    """Return a path that begins like that of the run directory, but is not in it."""
    return folder / "running" / "log"


def test_a_run_that_was_moved_is_resumed_without_a_change(tmp_path):
    moved = recorded_run(tmp_path).rename(tmp_path / "elsewhere")
    path = f"+training.callbacks.log.path={moved}/log"
    spec = spec_of(*OVERRIDES, path, "training.resume=auto")
    continuation = find_continuation(moved, spec, required=False)
    assert (continuation.changes, continuation.settings) == ([], {})
    continuation.past.close()


@pytest.mark.parametrize(
    ("before", "after", "edited"),
    [
        ("seed: 0", "seed: 3", "seed 3 (was 0)"),
        (
            "learning_rate: 0.01",
            "learning_rate: 0.1",
            "optimizer.learning_rate 0.1 (was 0.01)",
        ),
        ("  hidden:", "  wide: true\n  hidden:", "model.wide true (was not set)"),
        ("seed: 0\n", "", "seed is missing (was 0)"),
    ],
)
def test_an_edited_config_is_rejected_by_its_key(tmp_path, before, after, edited):
    run_dir = recorded_run(tmp_path)
    edit(run_dir, before, after)
    message = (
        "RUN must have the config.yaml with which the run began; undo your edits of it, "
        "and give what a resumed run may change as overrides (KEY=VALUE). "
        f"Edited: {edited}. Received: '{run_dir}'."
    )
    with pytest.raises(ConfigError) as error:
        read(run_dir)
    assert str(error.value) == message


def test_how_a_run_is_logged_may_be_edited(tmp_path):
    run_dir = recorded_run(tmp_path)
    edit(run_dir, "  experiment: ", "  experiment: another-")
    assert read(run_dir)["tracking"]["experiment"].startswith("another-")


def test_the_path_of_the_run_directory_may_hold_a_secret(tmp_path):
    run_dir = recorded_run(tmp_path)
    masked = {"run_dir": str(run_dir).replace("run", "***")}
    (run_dir / "environment.json").write_text(json.dumps(masked))
    assert read(run_dir)["seed"] == 0


def test_a_run_that_was_killed_as_it_began_keeps_its_config(tmp_path):
    """Its journal has the params of MLflow, and not the line that ends its description."""
    run_dir = recorded_run(tmp_path)
    (run_dir / "environment.json").unlink()
    overrides = [*OVERRIDES, f"+training.callbacks.log.path={run_dir}/log"]
    overrides.append("training.resume=auto")

    continuation = find_continuation(run_dir, spec_of(*overrides), required=False)
    assert continuation.changes == []
    continuation.past.close()
    other = spec_of(*overrides, "optimizer.learning_rate=0.1")
    rule = (
        r"^optimizer\.learning_rate must be that of the run, 0\.01\. Received: 0\.1\."
    )
    with pytest.raises(ConfigError, match=rule):
        find_continuation(run_dir, other, required=False)

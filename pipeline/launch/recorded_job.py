"""Composes a recorded config again, with overrides, and runs a task on it."""

import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from pipeline.config import compose, text_keys
from pipeline.launch import hydra_job


def run_recorded(
    config: Mapping[str, Any],
    overrides: Sequence[str],
    task: hydra_job.Task,
    folders: Sequence[str] = (),
) -> None:
    """Compose a recorded config with overrides, and run a task on it.

    Args:
        config: the recorded config: plain, resolved and checked.
        overrides: overrides in Hydra's grammar.
        task: the task that `hydra_job.in_run_dir` calls.
        folders: the user's folders with config groups.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = recorded_file(config, Path(folder), "record", folders)
        sweep = config["tracking"].get("sweep")
        job = partial(hydra_job.in_run_dir, task, sweep=sweep)
        hydra_job.run(job, [*file, *overrides])


def recorded_file(
    config: Mapping[str, Any], folder: Path, name: str, folders: Sequence[str] = ()
) -> list[str]:
    """Write a recorded config to `folder`; return the arguments that compose it.

    The file also has the package's settings for Hydra, with the user's `folders` in the
    search path.
    """
    ours = OmegaConf.load(Path(compose.directory()) / "config.yaml")
    # Add the entries for Hydra's own groups, such as `override hydra/launcher`, which
    # are not in a record.
    of_hydra = []
    for entry in ours.defaults:
        if not isinstance(entry, str) and "override" in str(entry):
            of_hydra.append(entry)

    search_path = [f"file://{folder}" for folder in folders]
    record = OmegaConf.create(
        {
            "defaults": ["schema", "_self_", *of_hydra],
            # A record of an earlier version may have a number in place of text.
            **text_keys.converted(config),
            "hydra": {**ours.hydra, "searchpath": search_path},
        }
    )
    (folder / f"{name}.yaml").write_text(OmegaConf.to_yaml(record), encoding="utf-8")
    return ["--config-dir", str(folder), "--config-name", name]

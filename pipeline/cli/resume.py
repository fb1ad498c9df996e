"""`pipeline resume`: continue an interrupted run from its last checkpoint."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from pipeline.checkpoints import recorded_config
from pipeline.checkpoints.run_dirs import find
from pipeline.cli.train import run_one
from pipeline.common.errors import ConfigError, Parser, say
from pipeline.config.overrides import hydra_quoted, keys_set
from pipeline.launch import recorded_job
from pipeline.sweep import sweep_file
from pipeline.tracking import horizons
from pipeline.tracking.journal_file import JOURNAL_NAME, Past


def resume(arguments: Sequence[str]) -> int:
    """Resume RUN from its last checkpoint, in the same MLflow run.

    The run directory is trusted like your own files: what its config names is imported.
    """
    parser = Parser(
        prog="pipeline resume", description=resume.__doc__, allow_abbrev=False
    )
    parser.add_argument(
        "run",
        metavar="RUN",
        help="a run directory, or the start of the ID of a run below this folder",
    )
    options, overrides = parser.parse_known_args(list(arguments))
    for word in overrides:
        if word.startswith("-"):
            rule = "must be left out: a run continues with its own config"
            raise ConfigError(word, rule)
    _check_not_of_sweep(Path(options.run))
    run_dir = find(options.run, "RUN").absolute()
    # Accept a run that is running: this process may be a worker, whose chief has
    # already resumed the run.
    past = Past.read(run_dir, running=True)

    segments = horizons.of_run(past.start, past.resumed)
    config = horizons.with_last(recorded_config.read(run_dir, past, "RUN"), segments)
    keys = keys_set(overrides)
    recorded_config.complete(config, past, keys)
    if any(key.startswith("hydra.") for key in keys):
        rule = "must not set keys of Hydra: a run continues in its own directory"
        raise ConfigError("arguments", rule, sorted(keys))
    # A run without a checkpoint is trained from the start only if the user says so.
    needs_checkpoint = "training.resume" not in keys
    recorded_job.run_recorded(
        config,
        [*overrides, f"hydra.run.dir={hydra_quoted(run_dir)}"],
        partial(run_one, resume=needs_checkpoint, key="RUN"),
    )
    again = sweep_file.command_again(run_dir.parent)
    if again:
        say(f"the run is a job of a sweep; run what is missing of it with: {again}")
    return 0


def _check_not_of_sweep(folder: Path) -> None:
    """Reject the folder of a sweep, and that of a job that has not begun.

    Raises:
        ConfigError: the folder is rejected.
    """
    # A single word may also be an ID.
    is_folder = folder.is_dir() or len(folder.parts) > 1
    if not is_folder or (folder / JOURNAL_NAME).exists():
        return
    for sweep_folder in (folder, folder.absolute().parent):
        again = sweep_file.command_again(sweep_folder)
        if again:
            rule = f"must be a run directory; the sweep is continued by: {again}"
            raise ConfigError("RUN", rule, str(folder))

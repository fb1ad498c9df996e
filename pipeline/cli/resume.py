"""`pipeline resume`: continue an interrupted run from its last checkpoint."""

from collections.abc import Sequence
from functools import partial

from pipeline.checkpoints.run_dirs import find, quoted, recorded_config
from pipeline.cli.train import run_one
from pipeline.common import secrets
from pipeline.common.errors import ConfigError, Parser
from pipeline.config import plain
from pipeline.launch import record
from pipeline.tracking.journal_file import Past


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
    run_dir = find(options.run, "RUN").absolute()
    past = Past.of(
        run_dir, running=True
    )  # this may be a worker whose chief has already resumed
    past.close()
    config, named = (
        recorded_config(run_dir, "RUN"),
        {text.lstrip("+").split("=")[0] for text in overrides},
    )
    complete(config, past, named)
    if any(name.startswith("hydra.") for name in named):
        raise ConfigError(
            "arguments",
            "must set nothing of Hydra: a run goes on in its own directory",
            sorted(named),
        )
    record.run_recorded(
        config,
        [*overrides, f"hydra.run.dir={quoted(run_dir)}"],
        partial(run_one, resume=True),
    )
    return 0


def complete(config: dict, past: Past, named: set[str]) -> None:
    """Set the run's store in its config; raise a `ConfigError` for a secret that is not among the overrides."""
    if (
        secrets.HIDDEN not in past.start["store"]
    ):  # the journal has the absolute path of a local store
        config["tracking"] = {**config["tracking"], "uri": past.start["store"]}
    for key, value in plain.leaves(config).items():
        if secrets.HIDDEN in str(value) and key not in named:
            raise ConfigError(
                key,
                "was a secret and is not in the run directory: give it again as an override",
                value,
            )

"""`pipeline sync`: ship to MLflow what a run could not. Safe to repeat, and to call on several machines at once."""

import os
from collections.abc import Sequence
from pathlib import Path

from pipeline.checkpoints.run_dirs import run_dirs
from pipeline.common.errors import NOT_SHIPPED, Parser, first_line, say
from pipeline.config import allow_list, compose
from pipeline.tracking.foreign_store import OwnStore
from pipeline.tracking.sync_run import sync_run


def sync(arguments: Sequence[str]) -> int:
    """Upload to MLflow what is missing of the runs in RUN_DIR …; by default of all runs below the working folder."""
    parser = Parser(prog="pipeline sync", description=sync.__doc__, allow_abbrev=False)
    parser.add_argument(
        "folders",
        metavar="RUN_DIR",
        nargs="*",
        help="run directories, or folders that contain them",
    )
    parser.add_argument(
        "--config-dir",
        "-cd",
        metavar="DIR",
        help="a folder with config groups of your own",
    )
    overrides = [text for text in arguments if "=" in text and not os.path.exists(text)]
    options = parser.parse_args([text for text in arguments if text not in overrides])
    config_dir = ["--config-dir", options.config_dir] if options.config_dir else []
    config = compose.composed([*config_dir, *overrides])
    allow_list.check_allowed(config.trust.allow)
    given = any(text.startswith(("tracking.uri=", "tracking=")) for text in overrides)
    own = OwnStore(
        config.tracking.uri,
        tuple(allow_list.allowed_places(config.trust.allow)),
        on_command_line=given,
    )
    if not (found := run_dirs(options.folders)):
        say("no run directory with a journal was found")
        return 0
    named = {os.path.normpath(folder) for folder in options.folders}
    statuses = [
        sync_run(folder, own, config.tracking.patience, named=folder in named)
        for folder in found
    ]
    return max(
        statuses
        + [
            _close_sweep(folder, own)
            for folder in {Path(folder).parent for folder in found}
        ]
    )


def _close_sweep(folder: Path, own: OwnStore) -> int:
    """Close the sweep in `folder`, if its store was unreachable when its jobs had ended."""
    from pipeline.sweep import parent_run

    try:
        if (parent := parent_run.left_open(folder, own)) is not None:
            parent.close()
    except Exception as error:
        say(f"{folder}: the sweep is not closed in the store yet: {first_line(error)}")
        return NOT_SHIPPED
    return 0

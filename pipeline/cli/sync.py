"""`pipeline sync`: upload to MLflow the parts of runs that are missing there.

The command may be repeated, and may run on several machines at once.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from pipeline.checkpoints.run_dirs import run_dirs
from pipeline.common.errors import NOT_SHIPPED, Parser, first_line, say
from pipeline.config import compose, trust_entries
from pipeline.tracking.foreign_store import OwnStore
from pipeline.tracking.sync_run import sync_run


def sync(arguments: Sequence[str]) -> int:
    """Upload the missing parts of the runs in RUN_DIR … to MLflow.

    By default, these are all runs below the working folder.
    """
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
    trust_entries.check_allowed(config.trust.allow)
    store_keys = ("tracking.uri=", "tracking=")
    store = OwnStore(
        config.tracking.uri,
        tuple(trust_entries.allowed_places(config.trust.allow)),
        on_command_line=any(text.startswith(store_keys) for text in overrides),
    )

    folders = run_dirs(options.folders)
    if not folders:
        say("no run directory with a journal was found")
        return 0
    named = {Path(os.path.normpath(folder)) for folder in options.folders}
    statuses = []
    for folder in folders:
        is_named = folder in named
        status = sync_run(str(folder), store, config.tracking.patience, named=is_named)
        statuses.append(status)
    for sweep_folder in {folder.parent for folder in folders}:
        statuses.append(_close_sweep(sweep_folder, store))
    return max(statuses)


def _close_sweep(folder: Path, store: OwnStore) -> int:
    """Close the sweep in `folder` if its store was unreachable when its jobs ended.

    Return the exit status: `NOT_SHIPPED` if the sweep cannot be closed, or else 0.
    """
    from pipeline.sweep import closing

    try:
        closing.close_left_open(folder, store)
    except Exception as error:
        say(f"{folder}: the sweep is not closed in the store yet: {first_line(error)}")
        return NOT_SHIPPED
    return 0

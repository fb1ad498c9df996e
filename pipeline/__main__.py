"""`pipeline VERB …`: dispatches to the verb's function."""

import argparse
import atexit
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pkgutil import resolve_name
from typing import NoReturn

from pipeline.common.errors import (
    NOT_SHIPPED,
    QUIET,
    ConfigError,
    NotShippedError,
    RunError,
    say,
)
from pipeline.common.secrets import mask
from pipeline.common.signals import Terminated

VERBS = {  # name → function in this package, and help text
    "train": (
        "cli.train:train",
        "train one run, or with -m a Hydra multirun; print where the run is stored",
    ),
    "sweep": (
        "cli.train:sweep",
        "run the multirun in sweeps/NAME.yaml; with --again SWEEP only its unfinished jobs",
    ),
    "resume": (
        "cli.resume:resume",
        "resume an interrupted run from its last checkpoint",
    ),
    "sync": ("cli.sync:sync", "upload to MLflow what a run could not"),
    "rerun": (
        "rerun.command:rerun",
        "repeat a run from its record in MLflow, then compare the two",
    ),
    "verify": (
        "verify.command:verify",
        "check, for this config, that accumulation equals the large batch",
    ),
    "critical": (
        "cli.critical:critical",
        "measure the critical batch by branches of a checkpoint, RUN@UPDATE",
    ),
    "report": (
        "report.writer:report",
        "write the report of a sweep: findings, a table and plots",
    ),
    "ui": ("cli.ui:ui", "serve MLflow's UI for the configured store on 127.0.0.1"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; return the exit status: 0 done, 1 failed, 2 wrong input, 3 different, 4 trained but not all in the
    store, 130 or 143 interrupted."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    sys.path.append(os.getcwd())  # a user's own modules, also for the installed command
    if "--quiet" in arguments:
        arguments.remove("--quiet")
        os.environ[QUIET] = "1"
    if os.environ.get("MLFLOW_TRACKING_URI") == "":  # as MLflow reads it
        del os.environ["MLFLOW_TRACKING_URI"]
    try:
        if arguments[:1] == ["-sc"]:
            return _complete(arguments)
        return _run(arguments)
    except (ConfigError, RunError, NotShippedError) as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1" and not isinstance(
            error, NotShippedError
        ):
            say(*mask(traceback.format_exc()).splitlines(), always=True)
        say(f"pipeline: {error}", always=True)
        return {ConfigError: 2, NotShippedError: NOT_SHIPPED}.get(type(error), 1)
    except KeyboardInterrupt:
        say("pipeline: interrupted", always=True)
        return 130
    except Exception:
        say(*mask(traceback.format_exc()).splitlines(), always=True)
        return 1
    except Terminated:
        return 143


def _run(arguments: list[str]) -> int:
    from pipeline import __version__

    about = "Exact gradient accumulation: Hydra configs, Keras training, every update in MLflow."
    verbs = "\n".join(
        ["verbs:", *(f"  {verb:9}{does}" for verb, (_, does) in VERBS.items())]
    )
    end = f"{verbs}\n\nEverything after the verb is Hydra's grammar: pipeline train --help lists the config groups."
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="pipeline", description=about, epilog=end, formatter_class=form
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("verb", choices=VERBS, metavar="VERB")
    parser.add_argument(
        "--quiet",
        action="store_true",
        help="with any verb: print errors and the run's ID alone",
    )
    if "--version" in arguments or not arguments or arguments[0].startswith("-"):
        parser.parse_args(
            ["--version"] if "--version" in arguments else arguments or ["--help"]
        )
    verb, *rest = arguments
    if verb not in VERBS:
        raise ConfigError("VERB", "must be a verb of pipeline", verb, VERBS)
    status: int = resolve_name(f"pipeline.{VERBS[verb][0]}")(rest)
    return status


def _complete(arguments: list[str]) -> int:
    """Print shell completions: verbs, names of sweeps, and what Hydra completes after these."""
    words = os.environ.get("COMP_LINE", "").split(" ")
    asked = arguments[1:2] == ["query=bash"]
    if asked and len(words) <= 2:
        print(" ".join(VERBS))
        return 0
    from pipeline.cli.train import train
    from pipeline.sweep.files import sweep_files

    named = words[1:2] and words[1] in ("sweep", "rerun", "report", "critical")
    if asked and named and len(words) <= 3:
        print(" ".join(sweep_files()) if words[1] == "sweep" else "")
        return 0
    rest = words[3 if named else 2 :]
    os.environ["COMP_LINE"] = " ".join([words[0], *rest])
    flags = [
        index for index, word in enumerate(rest[:-2]) if word in ("--config-dir", "-cd")
    ]
    folders = [rest[index + 1] for index in flags if os.path.isdir(rest[index + 1])]
    return train([*arguments, *(["--config-dir", folders[-1]] if folders else [])])


def command() -> None:
    """Run one verb and end the process; the destructors of TensorFlow and MLflow, which take seconds, are left out."""
    for number in range(
        3
    ):  # closed streams: what is opened next would be taken for them
        with suppress(OSError):
            os.fstat(number)
            continue
        os.open(os.devnull, os.O_RDWR)
    sys.stdout, sys.stderr = (
        sys.stdout or os.fdopen(1, "w"),
        sys.stderr or os.fdopen(2, "w"),
    )
    status: list[int] = []
    atexit.register(
        lambda: status and _leave(status[0])
    )  # registered first, so that it runs after all others
    status.append(main())
    sys.exit(status[0])


def _leave(status: int) -> NoReturn:
    with suppress(OSError, ValueError):  # closed pipes
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    command()

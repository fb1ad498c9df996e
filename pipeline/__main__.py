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
    Parser,
    RunError,
    StoreError,
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
        "run the multirun in sweeps/NAME.yaml, or the unfinished jobs of --again SWEEP",
    ),
    "resume": (
        "cli.resume:resume",
        "resume an interrupted run from its last checkpoint",
    ),
    "runs": ("cli.runs:runs", "list the runs of this folder and of the store"),
    "stop": (
        "cli.stop:stop",
        "end a running run, or a sweep's jobs, with a checkpoint",
    ),
    "sync": ("cli.sync:sync", "upload to MLflow what a run could not"),
    "rerun": (
        "rerun.command:rerun",
        "repeat a run from its record in MLflow, then compare the two runs",
    ),
    "verify": (
        "verify.command:verify",
        "check, for this config, that accumulation equals the large batch",
    ),
    "evaluate": (
        "evaluate.evaluate_command:evaluate",
        "evaluate a checkpoint of a run on its splits, or on other data",
    ),
    "predict": (
        "evaluate.predict_command:predict",
        "write the outputs, the label and the loss of each example to a Parquet file",
    ),
    "critical": (
        "cli.critical:critical",
        "measure the critical batch by training branches of a checkpoint, RUN@UPDATE",
    ),
    "report": (
        "report.command:report",
        "write the report of a sweep, of runs, or of what changed between two sweeps",
    ),
    "ui": ("cli.ui:ui", "serve MLflow's UI for the configured store on 127.0.0.1"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb, and return the exit status.

    The status is 0 on success, 1 on failure, 2 for wrong input, 3 for results that
    differ, 4 for a run that has trained but is not completely in the store, and 130 or
    143 if interrupted.
    """
    if arguments is None:
        arguments = sys.argv[1:]
    arguments = list(arguments)
    # Let the installed command import the user's modules from the working directory.
    sys.path.append(os.getcwd())
    if "--quiet" in arguments:
        arguments.remove("--quiet")
        os.environ[QUIET] = "1"
    if os.environ.get("MLFLOW_TRACKING_URI") == "":  # MLflow also ignores it.
        del os.environ["MLFLOW_TRACKING_URI"]
    try:
        if arguments[:1] == ["-sc"]:
            return _complete(arguments)
        return _run(arguments)
    except NotShippedError as error:
        say(f"pipeline: {error}", always=True)
        return NOT_SHIPPED
    except StoreError as error:
        say(f"pipeline: {error}", always=True)
        return NOT_SHIPPED if error.has_trained else 1
    except (ConfigError, RunError) as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            say(*mask(traceback.format_exc()).splitlines(), always=True)
        say(f"pipeline: {error}", always=True)
        # A subclass of `ConfigError` is a failed run, not wrong input.
        return 2 if type(error) is ConfigError else 1
    except KeyboardInterrupt:
        say("pipeline: interrupted", always=True)
        return 130
    except Exception:
        say(*mask(traceback.format_exc()).splitlines(), always=True)
        return 1
    except Terminated as error:
        say(f"pipeline: interrupted ({error})", always=True)
        return 143


def _run(arguments: list[str]) -> int:
    if "--version" in arguments:
        _parser().parse_args(["--version"])
    if not arguments:
        _parser().parse_args(["--help"])
    if arguments[0].startswith("-"):
        _parser().parse_args(arguments)
    verb, *rest = arguments
    if verb not in VERBS:
        raise ConfigError("VERB", "must be a verb of pipeline", verb, VERBS)
    function, _ = VERBS[verb]
    status: int = resolve_name(f"pipeline.{function}")(rest)
    return status


def _parser() -> argparse.ArgumentParser:
    """Return the parser that prints the version, the help or an error, and exits."""
    from pipeline import __version__

    lines = ["verbs:"]
    for verb, (_, description) in VERBS.items():
        lines.append(f"  {verb:9}{description}")
    lines.append("")
    lines.append(
        "Overrides, such as training.epochs=20, are in Hydra's grammar: pipeline "
        "train --help lists the most common keys."
    )
    parser = Parser(
        prog="pipeline",
        usage="pipeline [-h] [--version] [--quiet] VERB [overrides]",
        description="Exact gradient accumulation: Hydra configs, Keras training, "
        "every update in MLflow.",
        epilog="\n".join(lines),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("verb", choices=VERBS, metavar="VERB")
    parser.add_argument(
        "--quiet",
        action="store_true",
        help="with any verb: print only errors and the run's ID; runs and evaluate "
        "still print their results",
    )
    return parser


def _complete(arguments: list[str]) -> int:
    """Print shell completions: verbs, names of sweeps, and Hydra's completions."""
    words = os.environ.get("COMP_LINE", "").split(" ")
    is_query = arguments[1:2] == ["query=bash"]
    if is_query and len(words) <= 2:
        print(" ".join(VERBS))
        return 0
    from pipeline.cli.train import train
    from pipeline.sweep.files import sweep_files

    named = ("sweep", "rerun", "evaluate", "predict", "report", "critical")
    takes_name = words[1:2] and words[1] in named
    if is_query and takes_name and len(words) <= 3:
        names = sweep_files() if words[1] == "sweep" else ()
        print(" ".join(names))
        return 0

    # Let Hydra complete the words after the verb and its NAME or RUN, as for `train`.
    rest = words[3:] if takes_name else words[2:]
    os.environ["COMP_LINE"] = " ".join([words[0], *rest])
    folders = []
    for i, word in enumerate(rest[:-2]):
        if word in ("--config-dir", "-cd") and os.path.isdir(rest[i + 1]):
            folders.append(rest[i + 1])
    if folders:
        arguments = [*arguments, "--config-dir", folders[-1]]
    return train(arguments)


def command() -> None:
    """Run one verb and end the process.

    The destructors of TensorFlow and MLflow, which take seconds, are skipped.
    """
    _open_closed_streams()
    status: list[int] = []

    def leave_with_status() -> None:
        if status:
            _leave(status[0])

    # Register this handler first, so that it runs after all others.
    atexit.register(leave_with_status)
    status.append(main())
    sys.exit(status[0])


def _open_closed_streams() -> None:
    """Open the standard streams that are closed, on the null device.

    Otherwise the next file to be opened would become a standard stream.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")


def _leave(status: int) -> NoReturn:
    with suppress(OSError, ValueError):  # The pipes may be closed.
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    command()

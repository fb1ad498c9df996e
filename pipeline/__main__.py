"""The verbs. `pipeline VERB …`; everything after the verb is Hydra's grammar."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module

from pipeline.common.errors import NOT_SHIPPED, ConfigError, NotShippedError, RunError, say
from pipeline.common.secrets import mask
from pipeline.common.signals import Terminated

VERBS = {  # name → where it is, and what it does
    "train": ("pipeline.cli.train:train", "one run, or with -m a Hydra multirun; prints where the run is kept"),
    "sweep": (
        "pipeline.cli.train:sweep",
        "the multirun in sweeps/NAME.yaml; with --again SWEEP only what is missing of it",
    ),
    "resume": ("pipeline.cli.resume:resume", "an interrupted run, from its last checkpoint on"),
    "sync": ("pipeline.cli.sync:sync", "ship to MLflow whatever a run could not"),
    "rerun": ("pipeline.rerun.command:rerun", "the same run again from what MLflow recorded, then a comparison"),
    "verify": ("pipeline.verify.command:verify", "whether, for this config, accumulating equals the large batch"),
    "report": ("pipeline.report.command:report", "the comparison of a sweep, as plots and a table"),
    "ui": ("pipeline.cli.ui:ui", "MLflow's UI on the configured store, on 127.0.0.1"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; return the exit status: 0 done, 1 failed, 2 wrong input, 3 different, 4 trained but not all in the
    store, 130 or 143 interrupted."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    sys.path.append(os.getcwd())  # a user's own modules, also for the installed command
    try:
        if arguments[:1] == ["-sc"]:
            return _complete(arguments)
        return _run(arguments)
    except (ConfigError, RunError) as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            say(*mask(traceback.format_exc()).splitlines())
        say(f"pipeline: {error}")
        return 2 if isinstance(error, ConfigError) else 1
    except NotShippedError as error:
        say(f"pipeline: {error}")
        return NOT_SHIPPED
    except KeyboardInterrupt:
        say("pipeline: interrupted")
        return 130
    except Exception:
        say(*mask(traceback.format_exc()).splitlines())
        return 1
    except Terminated:
        return 143


def _run(arguments: list[str]) -> int:
    from pipeline import __version__

    parser = argparse.ArgumentParser(
        prog="pipeline",
        description="Gradient accumulation done right: Hydra configs, Keras training, every update in MLflow.",
        epilog="\n".join(["verbs:", *(f"  {verb:8}{does}" for verb, (_, does) in VERBS.items())])
        + "\n\nEverything after the verb is Hydra's grammar: pipeline train --help lists the config groups.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("verb", choices=VERBS, metavar="VERB")
    if not arguments or arguments[0].startswith("-"):
        parser.parse_args(arguments or ["--help"])
    verb, rest = arguments[0], arguments[1:]
    if verb not in VERBS:
        raise ConfigError("VERB", "must be a verb of pipeline", verb, VERBS)
    module, function = VERBS[verb][0].split(":")
    status: int = getattr(import_module(module), function)(rest)
    return status


def _complete(arguments: list[str]) -> int:
    """Print what Hydra's shell completion offers; it knows neither the verb nor the verb's own argument."""
    words = os.environ.get("COMP_LINE", "").split(" ")
    asked = arguments[1:2] == ["query=bash"]
    if asked and len(words) <= 2:
        print(" ".join(VERBS))
        return 0
    from pipeline.cli.train import train
    from pipeline.sweep.files import sweep_files

    named = words[1:2] and words[1] in ("sweep", "rerun", "report")
    if asked and named and len(words) <= 3:
        print(" ".join(sweep_files()) if words[1] == "sweep" else "")
        return 0
    rest = words[3 if named else 2 :]
    os.environ["COMP_LINE"] = " ".join([words[0], *rest])
    flags = [index for index, word in enumerate(rest[:-2]) if word in ("--config-dir", "-cd")]
    folders = [rest[index + 1] for index in flags if os.path.isdir(rest[index + 1])]
    return train([*arguments, *(["--config-dir", folders[-1]] if folders else [])])


if __name__ == "__main__":
    sys.exit(main())

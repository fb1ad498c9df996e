"""The process that ships a journal to MLflow: `python -m pipeline.tracking.shipper`.

It reads commands from standard input, one line of JSON each, in this order, and writes
the answers to standard output:

    {"open": URI, "experiment": …, "places": …, "patience": seconds}
        →  {}
    {"ship": path of the journal, "may_exist": whether the run may exist,
     "run_id": the run's ID, or "" if it is not known}
        →  {"run_id": …, "experiment_id": …}
    {"unwritten": lines that are not in the file, or ""}, any number of times
        →  no answer; all lines so far are shipped now

The shipper follows the journal until its standard input is closed, and then ships the
rest. Meanwhile it reports the result of each request to the store:

    {"left": approximate number of points that the store lacks}
    {"failing": error in one line}, optionally with "left"

The last answer is one of these:

    {"shipped": number of points, "not_logged": why the model was not logged, or ""}
    {"error": error in one line}, with "key" and "rule" for a `ConfigError`
"""

import atexit
import gc
import json
import os
import select
import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from pipeline.common import imports
from pipeline.common.errors import ConfigError, first_line
from pipeline.trust import artifact_locations

if __name__ == "__main__":
    # End without running destructors, for which the trainer would have to wait. The
    # function that is registered first is called last.
    atexit.register(os._exit, 0)
with imports.without_collections():
    from pipeline.tracking.store import Store
    from pipeline.tracking.system_metrics import SystemSampler
    from pipeline.tracking.uploader import StoreGoneError, Uploader

INTERVAL = 5.0  # seconds between two requests, and between two system samples


def main() -> None:
    """Read commands from standard input, and serve them until it is closed."""
    # Ignore Ctrl-C: the trainer handles it and closes the standard input of this
    # process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Exit on SIGTERM. Once there is a run to close, `_serve` ignores SIGTERM, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    sys.unraisablehook = _report_unraisable

    command = _command()
    if command is None:
        return
    places = command["places"]
    confined: Any = nullcontext()
    if places is not None:  # else the user's own store: artifacts may lie anywhere
        confined = artifact_locations.confined(command["open"], places)
    with confined:
        _serve(command["open"], command["experiment"], command["patience"])


def _report_unraisable(unraisable: Any) -> None:
    # Ignore a SystemExit, which SIGTERM raises in a destructor: standard input is
    # closed as well, and ends this process.
    if unraisable.exc_type is not SystemExit:
        sys.__unraisablehook__(unraisable)


def _serve(uri: str, experiment: str, patience: float) -> None:
    """Open the store, and ship the journal that the next command names."""
    try:
        store = Store(uri)
        store.check(experiment)
        _answer({})
        store.prepare()  # while the trainer imports TensorFlow
        # Exclude all objects so far from garbage collection. Scanning them repeatedly
        # doubled the time of a request.
        gc.freeze()

        command = _command()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if command is None:
            return
        uploader = Uploader(
            store,
            Path(command["ship"]),
            may_exist=command["may_exist"],
            run_id=command["run_id"],
            # Wait for the shipper of an earlier trainer, which may still be shipping.
            seconds=2 * patience,
            tell=lambda left: _answer({"left": left}),
        )
        _answer({"run_id": uploader.run_id, "experiment_id": uploader.experiment_id})
        sampler = None
        if uploader.start.system_metrics:
            sampler = SystemSampler(uri, uploader.run_id, uploader.start.gpus)
        _follow(uploader, sampler)
        uploader.finish(patience, lambda error: _answer({"failing": first_line(error)}))
        if uploader.damage:
            _answer({"error": uploader.damage})
        else:
            _answer({"shipped": uploader.sent, "not_logged": uploader.not_logged})
    except ConfigError as error:
        _answer({"error": first_line(error), "key": error.key, "rule": error.rule})
    except Exception as error:
        _answer({"error": first_line(error)})


def _follow(uploader: Uploader, sampler: SystemSampler | None) -> None:
    """Ship the written lines at intervals, until the trainer closes standard input.

    A request that fails is repeated after `INTERVAL` seconds.

    Args:
        uploader: ships the journal.
        sampler: samples the system metrics; None for a run that does not log them.
    """
    has_more = False
    is_failing = False
    if sampler is not None:
        uploader.add_sample(sampler.sample())  # a run may be shorter than the interval
    while True:
        seconds = 0 if has_more and not is_failing else INTERVAL
        ready, _, _ = select.select([sys.stdin], [], [], seconds)
        if ready:
            command = _command()
            if command is None:
                return
            uploader.add_unwritten(command["unwritten"])

        # Read nothing more while requests fail, so that memory holds at most the lines
        # of one request.
        if not is_failing:
            has_more = uploader.read()
            if not has_more and sampler is not None:
                uploader.add_sample(sampler.sample())
        try:
            uploader.ship()
            is_failing = False
        except StoreGoneError:  # the trainer starts another shipper
            raise
        except Exception as error:
            is_failing = True
            _answer({"left": uploader.left(), "failing": first_line(error)})


def _command() -> dict[str, Any] | None:
    """Return the next command, or None at the end of standard input."""
    line = sys.stdin.readline()
    return json.loads(line) if line else None


def _answer(answer: dict[str, Any]) -> None:
    try:
        print(json.dumps(answer), flush=True)
    except BrokenPipeError:
        sys.stdout = None  # the trainer has died: drop this and all later answers


if __name__ == "__main__":
    main()

"""The process that ships a journal to MLflow: `python -m pipeline.tracking.shipper`.

It reads commands from standard input, in this order, each one line of JSON:

    {"open": URI, "experiment": …, "places": …, "patience": s}
        →  {}
    {"ship": path of the journal, "may_exist": whether the run may exist,
     "run_id": its ID if it is known, else empty}
        →  {"run_id": …, "experiment_id": …}
    {"unwritten": lines that are in no file, perhaps none}, any number of times
        →  no answer of its own, but what is written is shipped now

Until standard input ends it follows the journal, and then it ships the rest. Meanwhile
it answers each request to the store:

    {"left": about how many points the store does not have}
    {"failing": why, in one line}, perhaps with "left"

Its last answer is one of these:

    {"shipped": points, "not_logged": why the model was not, or empty}
    {"error": why, in one line}, with "key" and "rule" if it is a `ConfigError`
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
    # End without destructors, for which the trainer would wait. What is registered
    # first runs after all others.
    atexit.register(os._exit, 0)
with imports.without_collections():
    from pipeline.tracking.store import Store
    from pipeline.tracking.uploader import StoreGoneError, Uploader

INTERVAL = 5.0  # seconds between two requests, and between two system samples


def main() -> None:
    """Serve the process that started this one."""
    # Ctrl-C is for the trainer: it closes standard input, which ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # SIGTERM ends it until there is a run to close.
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
    # A SystemExit is SIGTERM in a destructor; the end of standard input follows it.
    if unraisable.exc_type is not SystemExit:
        sys.__unraisablehook__(unraisable)


def _serve(uri: str, experiment: str, patience: float) -> None:
    """Open the store, and ship the journal that the next command names."""
    try:
        store = Store(uri)
        store.check(experiment)
        _answer({})
        store.prepare()  # while the trainer imports TensorFlow
        # Nothing that is loaded by now is garbage. Looking for it again and again
        # doubled the cost of a request.
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
            # A shipper that an earlier trainer left behind ships its lines first.
            seconds=2 * patience,
            tell=lambda left: _answer({"left": left}),
        )
        _answer({"run_id": uploader.run_id, "experiment_id": uploader.experiment_id})
        _follow(uploader)
        uploader.finish(patience, lambda error: _answer({"failing": first_line(error)}))
        if uploader.damage:
            _answer({"error": uploader.damage})
        else:
            _answer({"shipped": uploader.sent, "not_logged": uploader.not_logged})
    except ConfigError as error:
        _answer({"error": first_line(error), "key": error.key, "rule": error.rule})
    except Exception as error:
        _answer({"error": first_line(error)})


def _follow(uploader: Uploader) -> None:
    """Ship what is written, until the trainer closes standard input.

    A request that fails is repeated at the next interval.
    """
    has_more = False
    is_failing = False
    uploader.sample()  # now, as a run may be shorter than the interval
    while True:
        seconds = 0 if has_more and not is_failing else INTERVAL
        ready, _, _ = select.select([sys.stdin], [], [], seconds)
        if ready:
            command = _command()
            if command is None:
                return
            uploader.add_unwritten(command["unwritten"])

        # While the store is away, at most one request is kept in memory.
        if not is_failing:
            has_more = uploader.read()
            if not has_more:
                uploader.sample()
        try:
            uploader.ship()
            is_failing = False
        except StoreGoneError:  # another process opens what is there now
            raise
        except Exception as error:
            is_failing = True
            _answer({"left": uploader.left(), "failing": first_line(error)})


def _command() -> dict[str, Any] | None:
    """Return the next command; None at the end of standard input."""
    line = sys.stdin.readline()
    return json.loads(line) if line else None


def _answer(answer: dict[str, Any]) -> None:
    try:
        print(json.dumps(answer), flush=True)
    except BrokenPipeError:
        sys.stdout = None  # the trainer is gone


if __name__ == "__main__":
    main()

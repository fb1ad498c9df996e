"""`python -m pipeline.tracking.shipper`: the process that ships a journal to MLflow. See `pipeline.tracking.journal`.

It reads commands from standard input and answers each with one line of JSON:
    {"open": URI, "experiment": …, "places": …, "patience": s}  →  {}
    {"ship": path of the journal, "may_exist": whether the run may exist}  →  {"run_id", "experiment_id"}
    {"unwritten": lines that are in no file, perhaps none}  →  nothing, but what is written is shipped now
It follows the journal until standard input ends, and its last answer is {"error": in one line}, or {"shipped": points,
"not_logged": why the model was not, or empty}.
Meanwhile it says {"left": about how many points} after each request, {"failing": in one line} after each that fails.
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

if __name__ == "__main__":  # registered first, so that it runs after all others
    atexit.register(
        os._exit, 0
    )  # without destructors, for which the trainer would wait
with imports.without_collections():
    from pipeline.tracking.store import Store
    from pipeline.tracking.uploader import StoreGoneError, Uploader

INTERVAL = (
    5.0  # seconds between two writes, and between two samples of the system's metrics
)


def main() -> None:
    """Serve the process that started this one."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # this process ends with the trainer, which closes its standard input
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit()
    )  # until there is a run to close
    # Without SystemExit, which is SIGTERM in a destructor: the end of standard input follows it.
    sys.unraisablehook = lambda what: (
        what.exc_type is SystemExit or sys.__unraisablehook__(what)
    )
    if (command := _command()) is not None:
        places = command[
            "places"
        ]  # None: the user's own store, whose artifacts may lie anywhere
        with (
            nullcontext()
            if places is None
            else artifact_locations.confined(command["open"], places)
        ):
            _serve(command["open"], command["experiment"], command["patience"])


def _serve(uri: str, experiment: str, patience: float) -> None:
    try:
        store = Store(uri)
        store.check(experiment)
        _answer({})
        store.prepare()  # while the trainer imports TensorFlow
        gc.freeze()  # nothing that is loaded by now is garbage: collecting it repeatedly doubled the cost of a batch
        command = _command()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if command is None:
            return
        # A shipper that an earlier trainer left behind ships its lines first.
        given = {
            "may_exist": command["may_exist"],
            "tell": lambda left: _answer({"left": left}),
        }
        uploader = Uploader(store, Path(command["ship"]), seconds=2 * patience, **given)
        _answer({"run_id": uploader.run_id, "experiment_id": uploader.experiment_id})
        _follow(uploader)
        uploader.finish(patience, lambda error: _answer({"failing": first_line(error)}))
        shipped = {"shipped": uploader.sent, "not_logged": uploader.not_logged}
        _answer({"error": uploader.damage} if uploader.damage else shipped)
    except Exception as error:
        refusal = (
            {"key": error.key, "rule": error.rule}
            if isinstance(error, ConfigError)
            else {}
        )
        _answer({"error": first_line(error), **refusal})


def _follow(uploader: Uploader) -> None:
    """Ship what is written until the trainer closes standard input; what fails is tried again at the next interval."""
    more = failing = False
    uploader.sample()  # now: a run may be shorter than the interval
    while True:
        if select.select([sys.stdin], [], [], 0 if more and not failing else INTERVAL)[
            0
        ]:
            command = _command()
            if command is None:
                return
            uploader.add_unwritten(command["unwritten"])
        if not failing and not (more := uploader.read()):
            uploader.sample()
        try:
            uploader.ship()
            failing = False
        except StoreGoneError:  # another process opens what is there now
            raise
        except Exception as error:
            failing = True
            _answer({"left": uploader.left(), "failing": first_line(error)})


def _command() -> dict[str, Any] | None:
    line = sys.stdin.readline()
    return json.loads(line) if line else None


def _answer(answer: dict[str, Any]) -> None:
    try:
        print(json.dumps(answer), flush=True)
    except BrokenPipeError:
        sys.stdout = None  # the trainer is gone


if __name__ == "__main__":
    main()

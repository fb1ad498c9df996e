"""`python -m pipeline.tracking.shipper`: the process that carries a journal to MLflow. See `pipeline.tracking.journal`.

Reads commands from standard input and answers each with one line of JSON:
    {"open": URI, "experiment": …, "places": …, "patience": s}  →  {}
    {"ship": path of the journal, "again": whether another process may have begun}  →  {"run_id", "experiment_id"}
    {"unwritten": lines that are in no file}  →  nothing
then follows the journal until standard input ends, ships what is left and answers with {"shipped": points}; meanwhile
with {"failing": in one line} to each try that fails. What fails for good is answered with {"error": in one line}.
"""

from __future__ import annotations

import gc
import json
import select
import signal
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from pipeline.common.errors import ConfigError, first_line
from pipeline.tracking.store import Store
from pipeline.tracking.uploader import Delivery, StoreGoneError
from pipeline.trust import artifact_locations

INTERVAL = 5.0  # seconds between two writes, and between two samples of the system's metrics
RETRY = 1.0  # seconds between two tries once the trainer is gone


def main() -> None:
    """Serve the process that started this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer's end is ours: it closes our standard input
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # until there is a run to close
    sys.unraisablehook = _say_unraisable
    command = _command()
    if command is not None:
        places = command["places"]  # None: the user's own store, whose artifacts may lie anywhere
        with nullcontext() if places is None else artifact_locations.confined(command["open"], places):
            _serve(command)


def _say_unraisable(what: Any) -> None:
    if not issubclass(what.exc_type, SystemExit):  # SIGTERM in a destructor: the end of standard input follows it
        sys.__unraisablehook__(what)


def _serve(opening: dict[str, Any]) -> None:
    patience = opening["patience"]
    try:
        store = Store(opening["open"])
        store.check(opening["experiment"])
        _answer({})
        store.prepare()  # while the trainer imports TensorFlow
        command = _command()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if command is None:
            return
        # A shipper that an earlier trainer left behind first brings there what it has.
        delivery = Delivery(store, Path(command["ship"]), again=command["again"], seconds=2 * patience)
    except Exception as error:
        refusal = {"key": error.key, "rule": error.rule} if isinstance(error, ConfigError) else {}
        _answer({"error": first_line(error), **refusal})
        return
    _answer({"run_id": delivery.run_id, "experiment_id": delivery.experiment_id})
    gc.freeze()  # what is loaded by now stays: collecting it again and again doubled the cost of a batch
    _follow(delivery, patience)


def _follow(delivery: Delivery, patience: float) -> None:
    """Ship what is written until the trainer is gone and the store has everything, or did not answer for too long."""
    alive, failing_since, more = True, None, False
    while True:
        if alive:
            if select.select([sys.stdin], [], [], 0 if more else INTERVAL)[0]:
                command = _command()
                alive = command is not None
                if command is not None:
                    delivery.add_unwritten(command["unwritten"])
        elif failing_since:
            time.sleep(RETRY)
        if not failing_since:
            more = delivery.read(alive)
            if alive and not more:
                delivery.sample()
        try:
            delivery.ship()
        except StoreGoneError as error:  # another process opens what is there now
            _answer({"error": first_line(error)})
            return
        except Exception as error:
            failing_since = failing_since or time.monotonic()
            if not alive:
                late = time.monotonic() - failing_since > patience
                _answer({"error" if late else "failing": first_line(error)})
                if late:
                    return
            continue
        failing_since = None
        if not alive and not more:
            _answer({"shipped": delivery.sent} if not delivery.damage else {"error": delivery.damage})
            return


def _command() -> dict[str, Any] | None:
    line = sys.stdin.readline()
    return json.loads(line) if line else None


def _answer(answer: dict[str, Any]) -> None:
    try:
        print(json.dumps(answer), flush=True)
    except BrokenPipeError:
        sys.stdout = None  # nobody is left to be told


if __name__ == "__main__":
    main()

"""The process that ships a journal to MLflow: `python -m pipeline.tracking.shipper`.

It reads commands from standard input, and writes answers to standard output; see
`pipeline.tracking.shipper_protocol`. It follows the journal until its standard input is
closed, and then ships the rest.
"""

import atexit
import gc
import os
import select
import signal
import sys
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from pipeline.common import imports
from pipeline.common.errors import ConfigError, first_line
from pipeline.tracking import shipper_protocol
from pipeline.tracking.shipper_protocol import (
    AddLines,
    Attached,
    Failed,
    Failing,
    Fault,
    Message,
    Open,
    Opened,
    Progress,
    Ship,
    Shipped,
    StopRequested,
)
from pipeline.trust import artifact_locations

if __name__ == "__main__":
    # End without running destructors, for which the trainer would have to wait. The
    # function that is registered first is called last.
    atexit.register(os._exit, 0)
with imports.without_collections():
    from pipeline.tracking.run_creation import RunDirError
    from pipeline.tracking.store import Store
    from pipeline.tracking.system_metrics import SystemSampler
    from pipeline.tracking.uploader import StoreGoneError, Uploader

# Seconds between two looks at the journal once all written lines are shipped. Each look
# also takes a sample of the system metrics. Two requests for the run's tag `STOP_TAG`
# are also at least this far apart.
INTERVAL = 5.0


def main() -> None:
    """Serve the commands on standard input until it is closed."""
    # Ignore Ctrl-C: the trainer handles it and closes the standard input of this
    # process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Exit on SIGTERM. Once there is a run to close, `_serve` ignores SIGTERM, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    sys.unraisablehook = _report_unraisable

    opening = _command()
    if opening is None:
        return
    confined: Any = nullcontext()
    # If `places` is None, the store is the user's own, and artifacts may lie anywhere.
    if opening.places is not None:
        confined = artifact_locations.confined(opening.uri, opening.places)
    with confined:
        _serve(opening)


def _report_unraisable(unraisable: Any) -> None:
    # Ignore a SystemExit that SIGTERM raises in a destructor: this process ends anyway,
    # since its standard input is also closed.
    if unraisable.exc_type is not SystemExit:
        sys.__unraisablehook__(unraisable)


def _serve(opening: Open) -> None:
    """Open the store, and ship the journal that the next command names."""
    try:
        store = Store(opening.uri)
    except Exception as error:
        # The cause of a `ConfigError` is why the store does not answer.
        _answer(Failed(first_line(error.__cause__ or error)))
        return

    try:
        store.check(opening.experiment)
        _answer(Opened())
        store.prepare()  # while the trainer imports TensorFlow
        # Exclude all objects so far from garbage collection. Scanning them repeatedly
        # doubled the time of a request.
        gc.freeze()

        command = _command()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if command is None:
            return
        _answer(_ship(store, command, opening.patience))
    except RunDirError as error:
        _answer(Failed(first_line(error), Fault.RUN_DIR, error.key, error.rule))
    except ConfigError as error:
        _answer(Failed(first_line(error), Fault.CONFIG, error.key, error.rule))
    except Exception as error:
        _answer(Failed(first_line(error)))


def _ship(store: Store, command: Ship, patience: float) -> Message:
    """Ship a journal until the trainer has ended, and return the last answer.

    Args:
        store: the store.
        command: the command, which names the journal.
        patience: seconds without progress after which the last error is raised.
    """
    uploader = Uploader(
        store,
        Path(command.path),
        may_exist=command.may_exist,
        run_id=command.run_id,
        # Wait for the shipper of an earlier trainer, which may still be shipping.
        seconds=2 * patience,
        tell=lambda left: _answer(Progress(left)),
        report=lambda problem: _answer(Failing(problem)),
    )
    if command.resumes:
        uploader.withdraw_stop_request()
    _answer(Attached(uploader.run_id, uploader.experiment_id))
    sampler = None
    if uploader.start.system_metrics:
        sampler = SystemSampler(store.uri, uploader.run_id, uploader.start.gpus)
    _follow(uploader, sampler)
    uploader.finish(patience, lambda error: _answer(Failing(first_line(error))))
    if uploader.damage:
        return Failed(uploader.damage)
    return Shipped(uploader.sent, uploader.not_logged)


def _follow(uploader: Uploader, sampler: SystemSampler | None) -> None:
    """Ship the written lines at intervals, until the trainer closes standard input.

    A request that fails is repeated after `INTERVAL` seconds, or at the next command.
    Also notify the trainer once if the run is asked to end.

    Args:
        uploader: ships the journal.
        sampler: samples the system metrics, or None if the run does not log them.
    """
    has_more = False
    is_failing = False
    stop_check = _StopCheck(uploader)
    if sampler is not None:
        uploader.add_sample(sampler.sample())  # a run may be shorter than the interval
    while True:
        seconds = 0 if has_more and not is_failing else INTERVAL
        ready, _, _ = select.select([sys.stdin], [], [], seconds)
        if ready:
            command = _command()
            if command is None:
                return
            if isinstance(command, AddLines):
                uploader.add_unwritten(command.text)

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
            _answer(Failing(first_line(error), uploader.left()))
        if not is_failing:
            stop_check.run_if_due()


class _StopCheck:
    """Asks the store at intervals whether a run is to end, until the answer is yes."""

    def __init__(self, uploader: Uploader):
        self._uploader = uploader
        self._due_at = 0.0
        self._is_requested = False

    def run_if_due(self) -> None:
        """Ask the store if `INTERVAL` has passed, and notify the trainer."""
        if self._is_requested or time.monotonic() < self._due_at:
            return
        self._due_at = time.monotonic() + INTERVAL
        # Ignore a failure: it must not keep the lines from being shipped.
        with suppress(Exception):
            self._is_requested = self._uploader.stop_is_requested()
        if self._is_requested:
            _answer(StopRequested())


def _command() -> Any:
    """Return the next command, or None at the end of standard input."""
    line = sys.stdin.readline()
    return shipper_protocol.decoded(line) if line else None


def _answer(answer: Message) -> None:
    try:
        print(answer.encoded(), flush=True)
    except BrokenPipeError:
        sys.stdout = None  # the trainer has died: drop this and all later answers


if __name__ == "__main__":
    main()

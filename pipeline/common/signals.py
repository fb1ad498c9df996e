"""Handles the signals that end a run.

The first signal lets the current update finish; a second one ends the run at once.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

GRACE = 30.0  # seconds for the current update to finish before it is interrupted
# Tag of a run in MLflow that asks the run, or all jobs of the sweep, to end. It may
# have any value. It is removed when the run ends.
STOP_TAG = "stop"


class Terminated(BaseException):
    """SIGTERM, SIGHUP or SIGUSR2 was received, or the run has the tag `STOP_TAG`.

    Like KeyboardInterrupt, it is not caught by `except Exception`.
    """


class Interruption:
    """Records whether a run was asked to end."""

    def __init__(self) -> None:
        self._reason: BaseException | None = None
        self._defers = False

    def asked(self) -> BaseException | None:
        """Return the exception to raise between two updates.

        Return None if no signal was deferred.
        """
        return self._reason

    @contextmanager
    def between_updates(self) -> Iterator[None]:
        """Within this context, defer the first signal until `asked` is checked.

        If the context has not ended `GRACE` seconds after the signal, end the run.
        """
        self._defers = True
        try:
            yield
        finally:
            self._defers = False

    @contextmanager
    def listening(self) -> Iterator["Interruption"]:
        """Handle the signals within this context.

        The signals are SIGINT (Ctrl-C), SIGTERM, SIGHUP (the terminal was closed) and
        SIGUSR2, which Slurm sends before a time limit.
        """
        previous = {}
        # Python allows only the main thread to set signal handlers.
        if threading.current_thread() is threading.main_thread():
            for number in _handled_signals():
                previous[number] = signal.signal(number, self._receive)
        try:
            yield self
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _receive(self, number: int, _frame: object) -> None:
        if number == signal.SIGHUP:
            # Ignore repetitions: a shell whose terminal is closed repeats the signal.
            signal.signal(number, signal.SIG_IGN)
            number = signal.SIGTERM
        reason: BaseException
        if number == signal.SIGINT:
            reason = KeyboardInterrupt()
        else:
            reason = Terminated(signal.Signals(number).name)

        if not self._defers or self._reason is not None:
            raise reason
        self._reason = reason
        # Do not call `print`, as the signal may have interrupted another call to it.
        # Ignore an error, as the terminal may be gone.
        with suppress(OSError):
            os.write(2, b"finishing this update; once more ends it at once\n")
        timer = threading.Timer(GRACE, self._end_update, args=(number,))
        timer.daemon = True
        timer.start()

    def _end_update(self, number: int) -> None:
        if self._defers:
            os.kill(os.getpid(), number)


def _handled_signals() -> list[signal.Signals]:
    numbers = [signal.SIGTERM, signal.SIGUSR2]
    for number in (signal.SIGINT, signal.SIGHUP):
        # Do not handle a signal that `nohup` or a background shell has made the process
        # ignore.
        if signal.getsignal(number) != signal.SIG_IGN:
            numbers.append(number)
    return numbers

"""Signals that end a run: the first one lets the current update finish, the second one ends the run at once."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

GRACE = 30.0  # seconds for the current update to finish before it is interrupted


class Terminated(BaseException):
    """SIGTERM, SIGHUP or SIGUSR2 was received. Like KeyboardInterrupt, it is not caught by `except Exception`."""


class Interruption:
    """Whether a run was asked to end."""

    def __init__(self) -> None:
        self._asked: BaseException | None = None
        self._patient = False

    def asked(self) -> BaseException | None:
        """Return the exception to raise between two updates; None if there is none."""
        return self._asked

    @contextmanager
    def between_updates(self) -> Iterator[None]:
        """Defer the first signal within this context until `asked` is checked."""
        self._patient = True
        try:
            yield
        finally:
            self._patient = False

    @contextmanager
    def listening(self) -> Iterator["Interruption"]:
        """Handle Ctrl-C, SIGTERM, SIGHUP of a closed terminal, and SIGUSR2, which Slurm sends before a time limit."""
        numbers = []
        if (
            threading.current_thread() is threading.main_thread()
        ):  # which alone may handle signals
            # nohup lets some of them be ignored.
            asked = [
                each
                for each in (signal.SIGINT, signal.SIGHUP)
                if signal.getsignal(each) != signal.SIG_IGN
            ]
            numbers = [signal.SIGTERM, signal.SIGUSR2, *asked]
        before = {number: signal.signal(number, self._receive) for number in numbers}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _receive(self, number: int, _frame: object) -> None:
        if number == signal.SIGHUP:  # a shell whose terminal is closed repeats it
            signal.signal(number, signal.SIG_IGN)
            number = signal.SIGTERM
        error = (
            KeyboardInterrupt()
            if number == signal.SIGINT
            else Terminated(signal.Signals(number).name)
        )
        if not self._patient or self._asked is not None:
            raise error
        self._asked = error
        with suppress(OSError):  # the terminal may be gone
            os.write(
                2, b"finishing this update; once more ends it at once\n"
            )  # `print` may be what was interrupted
        timer = threading.Timer(
            GRACE, lambda: os.kill(os.getpid(), number) if self._patient else None
        )
        timer.daemon = True
        timer.start()

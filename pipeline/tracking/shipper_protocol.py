"""The messages between a trainer and its shipper: one line of JSON each.

The trainer sends commands in this order:

- `Open`, answered by `Opened`.
- `Ship`, answered by `Attached`. There may be `Progress` and `Failing` before it: while
  another process ships the journal, the shipper waits for it.
- `ShipNow` and `AddLines`, any number of times and without an answer. Meanwhile, and
  until everything is shipped, the shipper reports the requests to the store with
  `Progress` and `Failing`. It sends `StopRequested` once if somebody asks the run to
  end.

Then the trainer closes the pipe. The shipper ships the rest, and its last answer is
`Shipped`. A shipper that cannot continue answers `Failed` instead, at any time, and
ends.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Message:
    """A command or an answer."""

    def encoded(self) -> str:
        """Return the message as one line of JSON."""
        fields: dict[str, Any] = asdict(self)  # type: ignore[call-overload]
        return json.dumps({"message": type(self).__name__, **fields})


@dataclass(frozen=True)
class Open(Message):
    """Open a store.

    Attributes:
        uri: the URI of the store.
        experiment: the name of the run's experiment.
        patience: seconds without progress after which the shipper gives up, once the
            trainer has ended.
        places: where artifacts may lie, in addition to the store's own location. None
            if they may lie anywhere.
    """

    uri: str
    experiment: str
    patience: float
    places: Sequence[str] | None


@dataclass(frozen=True)
class Ship(Message):
    """Create or find a run, and ship its journal.

    Attributes:
        path: the journal.
        may_exist: whether the run may be in the store already.
        run_id: the run's ID, or "" if it is not known.
        resumes: whether the trainer resumes the run. The tag `STOP_TAG`, with which the
            run may have been stopped, is then deleted.
    """

    path: str
    may_exist: bool
    run_id: str
    resumes: bool = False


@dataclass(frozen=True)
class ShipNow(Message):
    """Ship all written lines now, not at the next interval."""


@dataclass(frozen=True)
class AddLines(Message):
    """Ship these lines, too. The file lacks them because its disk is full."""

    text: str


@dataclass(frozen=True)
class Opened(Message):
    """The store answers and can be used."""


@dataclass(frozen=True)
class Attached(Message):
    """The store has the run."""

    run_id: str
    experiment_id: str


@dataclass(frozen=True)
class Progress(Message):
    """A request has succeeded.

    Attributes:
        left: the approximate number of points that are not shipped yet; None if it is
            unknown, since another process ships them.
    """

    left: int | None


@dataclass(frozen=True)
class Failing(Message):
    """A request has failed and will be repeated, or another process ships the journal.

    Attributes:
        error: the error in one line.
        left: the approximate number of points that are not shipped yet. It is always 0
            once the trainer has ended.
    """

    error: str
    left: int = 0


@dataclass(frozen=True)
class StopRequested(Message):
    """Somebody has set the run's tag `STOP_TAG` in the store."""


@dataclass(frozen=True)
class Shipped(Message):
    """All lines are shipped, except those that the store has rejected.

    Attributes:
        points: the number of points that were sent.
        not_logged: why the model was not logged; empty if it was logged, or if there is
            no model.
    """

    points: int
    not_logged: str = ""


class Fault(StrEnum):
    """The kind of a shipper's failure, which decides how the trainer continues."""

    DIED = "died"  # the shipper ended without an answer; another one may be started
    STORE = (
        "store"  # a request failed, or the store is unreachable: it may answer later
    )
    CONFIG = "config"  # the store cannot be used with this config
    RUN_DIR = "run_dir"  # the run of this run directory cannot be shipped


@dataclass(frozen=True)
class Failed(Message):
    """The shipper ends without having shipped everything.

    Attributes:
        error: the error in one line.
        fault: the kind of the failure.
        key: the key of a `ConfigError` if the fault is `CONFIG` or `RUN_DIR`; else
            empty.
        rule: the rule of a `ConfigError`; empty for any other error.
    """

    error: str
    fault: Fault = Fault.STORE
    key: str = ""
    rule: str = ""


_CLASSES: tuple[type, ...] = (
    Open,
    Ship,
    ShipNow,
    AddLines,
    Opened,
    Attached,
    Progress,
    Failing,
    StopRequested,
    Shipped,
    Failed,
)


def decoded(line: str) -> Any:
    """Return the message in one line.

    Raises:
        ValueError: the line is incomplete, or is not a message.
    """
    content = json.loads(line)
    for kind in _CLASSES:
        if isinstance(content, dict) and content.get("message") == kind.__name__:
            del content["message"]
            return kind(**content)
    raise ValueError(f"not a message: {line}")

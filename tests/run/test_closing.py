"""How a run is closed when its end is interrupted."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.common.signals import Terminated
from pipeline.run import run

INTERRUPTIONS = [KeyboardInterrupt(), Terminated("SIGTERM")]


def parts_of(error):
    """A tracker whose end waits for its store, and is interrupted; and a recorder."""

    def end(status, failure):
        raise error

    journal = SimpleNamespace(uri="sqlite:///x")
    tracker = SimpleNamespace(begun=True, end=end, run_dir=Path("run"), journal=journal)
    progress = SimpleNamespace(close=lambda: None)
    return tracker, SimpleNamespace(progress=progress, fetch=lambda: None)


@pytest.mark.parametrize("error", INTERRUPTIONS, ids=repr)
def test_a_run_that_has_trained_is_not_killed_by_an_interruption_of_its_upload(error):
    """It is FINISHED in the store once `sync` has shipped the rest: exit status 4."""
    with run._closing(*parts_of(error), True) as closing:
        pass
    line = "not all of the run is in the store (interrupted): pipeline sync run"
    assert closing.unshipped.startswith(line)


@pytest.mark.parametrize("error", INTERRUPTIONS, ids=repr)
def test_a_run_that_was_killed_stays_so(error):
    with pytest.raises(type(error)), run._closing(*parts_of(error), True):
        raise KeyboardInterrupt


def test_another_error_stays_an_error(capsys):
    with (
        pytest.raises(OSError, match="no"),
        run._closing(*parts_of(OSError("no")), True),
    ):
        pass
    assert "not all of the run is in the store: " in capsys.readouterr().err

"""The state of one call of Hydra, which Hydra's plugins read and write.

Hydra creates its callbacks and launchers itself and does not return them, so they get
the session from a context variable.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.common.errors import ConfigError


@dataclass
class Session:
    """The state of one call of Hydra.

    Attributes:
        config_dir: the user's config folder, if a plugin has to add it to Hydra's
            search path, or else None.
        key: the config key of the run directory.
        run_dir: the run directory, which is the value of this key.
        new_folders: the folders that Hydra creates for `run_dir`, innermost first.
        sweep: the running sweep of a multirun; None until its parent run exists.
        dry: whether a multirun only lists its jobs.
    """

    config_dir: str | None = None
    key: str = ""
    run_dir: Path = Path()
    new_folders: Sequence[Path] = ()
    sweep: Any = None
    dry: bool = False

    @contextmanager
    def checking_folder(self) -> Iterator[None]:
        """Raise a `ConfigError` if the run directory cannot be created in the block."""
        try:
            yield
        except OSError as error:
            folder = Path(str(error.filename)).absolute()
            if folder not in (self.run_dir, *self.run_dir.parents):
                raise
            rule = f"must be a folder that can be created ({error.strerror})"
            raise ConfigError(self.key, rule, str(error.filename)) from error

    def remove_empty_folders(self) -> None:
        """Remove the new folders that are empty, from the run directory upwards."""
        # Stop at a folder that is missing, or in use by another process.
        with suppress(OSError):
            for folder in self.new_folders:
                names = {file.name for file in folder.iterdir()}
                if names - {"multirun.yaml"}:
                    return
                # Also remove this file: Hydra writes it even for a rejected sweep.
                (folder / "multirun.yaml").unlink(missing_ok=True)
                folder.rmdir()


_session: ContextVar[Session] = ContextVar("session")


def session() -> Session:
    """Return the session of the current call of Hydra.

    Outside of `entered`, return a new and empty session, for callers that only read.
    """
    return _session.get(Session())


@contextmanager
def entered(current: Session) -> Iterator[None]:
    """Make `current` the current session within the block."""
    token = _session.set(current)
    try:
        yield
    finally:
        _session.reset(token)

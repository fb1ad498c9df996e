"""One call of Hydra: what its plugins need to know, and what they leave behind.

Hydra makes its callbacks and launchers itself and does not return them, so a context
variable gives them the session.
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
    """One call of Hydra.

    Attributes:
        config_dir: the user's folder of configs, where Hydra's plugins have to find it;
            None if Hydra knows it.
        key: the config key of the run directory.
        run_dir: the folder that this key names.
        new_folders: the folders that Hydra makes for it, the innermost first.
        sweep: the parent run of a multirun, once there is one.
    """

    config_dir: str | None = None
    key: str = ""
    run_dir: Path = Path()
    new_folders: Sequence[Path] = ()
    sweep: Any = None

    @contextmanager
    def checking_folder(self) -> Iterator[None]:
        """Raise a `ConfigError` for a run directory that cannot be made."""
        try:
            yield
        except OSError as error:
            folder = Path(str(error.filename)).absolute()
            if folder not in (self.run_dir, *self.run_dir.parents):
                raise
            rule = f"must be a folder that can be made ({error.strerror})"
            raise ConfigError(self.key, rule, str(error.filename)) from error

    def remove_empty_folders(self) -> None:
        """Remove what Hydra made and left empty, from the run directory upwards."""
        # A folder may be missing, or in use by another process.
        with suppress(OSError):
            for folder in self.new_folders:
                names = {file.name for file in folder.iterdir()}
                if names - {"multirun.yaml"}:
                    return
                # Hydra writes this file even for a sweep that is rejected.
                (folder / "multirun.yaml").unlink(missing_ok=True)
                folder.rmdir()


_session: ContextVar[Session] = ContextVar("session")


def session() -> Session:
    """Return the session of the current call of Hydra, or else an empty one."""
    return _session.get(Session())


@contextmanager
def entered(current: Session) -> Iterator[None]:
    """Make a session the current one."""
    token = _session.set(current)
    try:
        yield
    finally:
        _session.reset(token)

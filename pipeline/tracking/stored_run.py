"""Ships a journal's tags, files and all other lines, except rows of metrics."""

import errno
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag
from mlflow.exceptions import MlflowException

from pipeline.common.errors import first_line
from pipeline.common.secrets import mask
from pipeline.config.model_uris import MODEL_NAME
from pipeline.tracking import failures, model_upload
from pipeline.tracking.expected import Expected, InputId
from pipeline.tracking.foreign_store import LONGEST_TAG
from pipeline.tracking.journal_file import MODEL, PICTURES, SHOWN
from pipeline.tracking.journal_lines import (
    NOT_LOGGED,
    Artifact,
    End,
    Fork,
    Input,
    Line,
    Model,
    Resume,
    Shown,
    Tags,
)
from pipeline.tracking.store import Store, remove_stop_tag

MOST_FORKS = 140  # maximum number of run IDs in a tag

# Tags of a run.
FORKS = "forks"  # the IDs of runs that began with a checkpoint of this run
NOT_SHIPPED_TAG = "not_shipped"  # names rejected lines and unreadable files

# The part of a picture's name that differs if the picture is made again.
_TIMESTAMP = re.compile(r"\+timestamp\+\d+")


class IncompleteError(OSError):
    """The store lacks an item that it has confirmed."""


class StoredRun:
    """A run in a store, to which the lines of a journal are shipped.

    Args:
        store: the store that holds the run.
        client: an MLflow client for the store.
        run_id: the ID of the run.
        experiment_id: the ID of the run's experiment.
        folder: the run directory.
        tell: called about every second while a model is uploaded.

    Attributes:
        expected: the items that the store must have when the run ends.
        not_logged: why the model could not be logged; empty if it was logged, or if
            there is no model.
    """

    def __init__(
        self,
        store: Store,
        client: MlflowClient,
        run_id: str,
        experiment_id: str,
        folder: Path,
        tell: Callable[[], object],
    ):
        self.store = store
        self.client = client
        self.run_id = run_id
        self.experiment_id = experiment_id
        self.folder = folder
        self.expected = Expected()
        self.not_logged = ""
        self._tell = tell
        # The problems that the tag `NOT_SHIPPED_TAG` names, as an ordered set. Each
        # process ships all lines, so it finds the problems of earlier ones again.
        self._problems: dict[str, None] = {}
        # The pictures in the store, without their timestamps; None until they are read.
        self._pictures: dict[str, str] | None = None

    def ship(self, line: Line, *, is_last: bool) -> None:
        """Ship one line.

        Args:
            line: a line other than a row of metrics.
            is_last: whether it is the last line so far. An `end` line ends the run only
                if it is the last: otherwise a `resume` line follows.

        Raises:
            IncompleteError: at the end of the run, the store lacks a confirmed item.
            Exception: the store did not answer, or rejected a request.
        """
        match line:
            case Input():
                self._ship_input(line)
            case Tags(tags):
                self._ship_tags(tags)
            case Fork(source):
                self._tag_source(source)
            case Artifact(name):
                self._ship_artifact(str(name))
            case Shown(_, paths):
                for path in paths:
                    self._ship_shown(str(path))
                    self._tell()
            case Model():
                self._ship_model(line)
            case Resume():
                self._reopen_run()
            case End() if is_last:
                self._end_run(line)

    def note(self, problem: str) -> None:
        """Add the description of a missing item to the tag `NOT_SHIPPED_TAG`."""
        self._problems[problem] = None
        text = _listed([*self._problems], LONGEST_TAG)
        self.client.set_tag(self.run_id, NOT_SHIPPED_TAG, text)

    def _ship_input(self, line: Input) -> None:
        """Log one input.

        MLflow may reject an input that another run inserts at the same time. The caller
        then repeats the request.
        """
        dataset = Dataset(**line.dataset)
        tags = [InputTag("mlflow.data.context", line.context)]
        self.client.log_inputs(self.run_id, [DatasetInput(dataset, tags)])
        self.expected.inputs.add(InputId(dataset.name, dataset.digest))

    def _ship_tags(self, tags: Mapping[str, str]) -> None:
        for key, value in tags.items():
            self.client.set_tag(self.run_id, key, value)
            self.expected.tags.add(key)
            self.expected.removed_tags.discard(key)

    def _tag_source(self, source: str) -> None:
        """Add this run to the tag `FORKS` of the run from which it was forked."""
        try:
            tags = self.client.get_run(source).data.tags
            forks = [name for name in tags.get(FORKS, "").split(", ") if name]
            if self.run_id not in forks:
                newest = [*forks, self.run_id][-MOST_FORKS:]
                self.client.set_tag(source, FORKS, ", ".join(newest))
        except MlflowException as error:
            # Ignore any other failure: the source may have been deleted.
            if failures.is_temporary(error):
                raise

    def _ship_artifact(self, name: str) -> None:
        """Log a file of the run directory, or record in a tag that it cannot be read.

        Since the journal may come from somebody else, only regular files directly in
        the run directory are sent.
        """
        file = self.folder / name
        if not self._is_readable(file, self.folder, name):
            return
        place = None
        if name.endswith(".xplane.pb"):
            # TensorBoard requires this folder for a profile.
            place = f"plugins/profile/{name.partition('.')[0]}"
        self.client.log_artifact(self.run_id, str(file), place)
        if place is None:
            self.expected.artifacts.add(name)

    def _ship_shown(self, path: str) -> None:
        """Log a picture or a table to the artifact folder named like its own folder.

        A picture that the store has under another timestamp is not logged again. It was
        made twice if the machine died before the journal was on the disk.
        """
        folder_name, _, name = path.partition("/")
        folder = self.folder / folder_name
        is_ours = folder_name in (PICTURES, SHOWN) and not folder.is_symlink()
        if not is_ours:
            self.note(f"{path}: it is not in a folder of pictures or tables")
            return
        if not self._is_readable(folder / name, folder, name):
            return

        if folder_name == PICTURES:
            pictures = self._pictures_in_store()
            without_time = _TIMESTAMP.sub("", path)
            if pictures.setdefault(without_time, path) != path:
                return
        self.client.log_artifact(self.run_id, str(folder / name), folder_name)
        self.expected.artifacts.add(path)

    def _pictures_in_store(self) -> dict[str, str]:
        """Return the paths of the pictures in the store, by path without timestamp."""
        if self._pictures is None:
            paths = self.expected.listed(self.client, self.run_id, PICTURES)
            self._pictures = {}
            for path in paths or ():
                self._pictures[_TIMESTAMP.sub("", path)] = path
        return self._pictures

    def _is_readable(self, file: Path, folder: Path, name: str) -> bool:
        """Return whether `name` is a regular file in `folder`; else note why not."""
        try:
            is_file = stat.S_ISREG(file.lstat().st_mode)
            if not is_file or file.name != name:
                problem = f"it is not a file in {folder.name} itself"
                if folder == self.folder:
                    problem = "it is not a file in the run directory itself"
                raise OSError(errno.EINVAL, problem)
            file.open("rb").close()
        except (OSError, ValueError) as error:
            self.note(f"{name}: {getattr(error, 'strerror', error)}")
            return False
        return True

    def _ship_model(self, line: Model) -> None:
        """Log the model in its folder, and register it if the line says so.

        A temporary failure is raised, so that the request is repeated. After any other
        failure, the reason is set as a tag, so that the run can still be ended.
        """
        try:
            # Check the names, since the journal may come from somebody else.
            if not re.fullmatch("[0-9a-f]{32}", line.model):
                raise ValueError("its name is not one that this package gives")
            if line.register and not MODEL_NAME.fullmatch(line.register):
                raise ValueError("it is to be registered under an invalid name")
            model_upload.ship(
                self.client,
                self.experiment_id,
                self.run_id,
                self.folder / MODEL.format(line.model),
                self._tell,
                update=line.update,
                register=line.register,
            )
        except Exception as error:
            if failures.is_temporary(error):
                raise
            self.not_logged = mask(first_line(error))
            self.client.set_tag(self.run_id, NOT_LOGGED, self.not_logged[:LONGEST_TAG])

    def _reopen_run(self) -> None:
        """Set the run's status to RUNNING, and remove its tag `failure`."""
        try:
            self.client.delete_tag(self.run_id, "failure")
        except MlflowException as error:
            # Ignore any other failure: the run may have no such tag.
            if failures.is_temporary(error):
                raise
        self.expected.tags.discard("failure")
        self.expected.removed_tags.add("failure")
        self.client.update_run(self.run_id, "RUNNING")

    def _end_run(self, line: End) -> None:
        """Close the run, and check that other processes see the new status.

        The tag `stop` is removed, so that the run can be resumed. If the store is an
        HTTP server, first check that it has the `expected` items. A database needs no
        such check.
        """
        if self.store.is_served:
            lacking = self.expected.lacking(self.client, self.run_id)
            if lacking:
                raise IncompleteError(
                    f"when read again, the store lacks {lacking}, which it had "
                    "confirmed"
                )
        remove_stop_tag(self.client, self.run_id)
        self.client.set_terminated(self.run_id, line.end, line.time)
        status = self.store.status(self.run_id)
        if status != line.end:
            raise OSError(
                f"when read again, the store has the run as {status}, not as {line.end}"
            )


def _listed(problems: Sequence[str], longest: int) -> str:
    """Return the problems in one text of at most `longest` characters.

    The first problem is cut if necessary. Later problems that do not fit are counted.
    """
    text = problems[0][:longest]
    for i, problem in enumerate(problems[1:], start=1):
        longer = f"{text}; {problem}"
        remaining = len(problems) - i - 1
        end = f"; and {remaining} more" if remaining else ""
        if len(longer) + len(end) > longest:
            end = f"; and {remaining + 1} more"
            return text[: longest - len(end)] + end
        text = longer
    return text

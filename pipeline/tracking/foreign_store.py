"""Stores that need not be the user's own: every verb that reads a store does so here.

In: the address of a store and what the user allows. Out: runs with IDs in MLflow's
format, whose artifacts lie where they may.
"""

import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from pipeline.common.errors import ConfigError, first_line
from pipeline.common.secrets import HIDDEN, mask, remember
from pipeline.common.sqlite_uri import absolute
from pipeline.config.trust_entries import allowed_places, check_allowed
from pipeline.trust import artifact_locations

DEFAULT_STORE = "sqlite:///mlruns/mlflow.db"
MULTIRUN = "multirun"  # the name of a sweep without a file
CRITICAL = "critical"  # the name of a sweep of `pipeline critical`
LONGEST_TAG = 5000  # characters that every MLflow store accepts
RUN_ID = re.compile("[0-9a-f]{32}")
_MOST_RUNS = 50_000  # the most that one search returns
_MOST_CHOICES = 10  # the most that an error lists


@dataclass(frozen=True)
class ForeignStore:
    """A store that exists and answers; `open` returns one.

    Attributes:
        uri: its address.
        places: where artifacts may lie, in addition to the store.
    """

    uri: str
    places: tuple[str, ...] = ()

    @classmethod
    def open(cls, uri: str, allow: Sequence[str] = ()) -> Self:
        """Return the store at `uri`.

        Args:
            uri: its address.
            allow: the entries of `trust.allow` and `--allow`.

        Raises:
            ConfigError: it does not exist, or does not answer.
        """
        from pipeline.tracking.store import Store

        check_allowed(allow)
        if Store(uri).is_new():
            raise ConfigError("tracking.uri", "must be a store that exists", uri)
        return cls(uri, tuple(allowed_places(allow)))

    def client(self) -> Any:
        """Return MLflow's client of the store."""
        from mlflow.tracking import MlflowClient

        return MlflowClient(self.uri)

    def run(self, start: str) -> Any:
        """Return the only run whose ID begins with `start`."""
        from mlflow.exceptions import MlflowException

        if RUN_ID.fullmatch(start):
            try:
                runs = [self.client().get_run(start)]
            except MlflowException as error:
                rule = "must be a run of the store"
                raise ConfigError("RUN_ID", rule, start) from error
        elif re.fullmatch("[0-9a-f]{4,32}", start):
            runs = self._search(f"attributes.run_id LIKE '{start}%'")
        else:
            rule = "must be the ID of a run, or at least 4 digits of its start"
            raise ConfigError("RUN_ID", rule, start)
        return self._only("RUN_ID", "run", start, runs)

    def sweep(self, start: str) -> Any:
        """Return the parent run of a sweep.

        Args:
            start: the beginning of its ID, its name, or the name of its sweep file, of
                which the newest sweep is meant.
        """
        sweeps = self._search("tags.`sweep.name` != ''")
        named = []
        of_file = []
        for run in sweeps:
            if run.info.run_id.startswith(start) or run.info.run_name == start:
                named.append(run)
            if run.data.tags["sweep.name"] == start:
                of_file.append(run)
        newest = sorted(of_file, key=lambda run: run.info.start_time)[-1:]
        return self._only("SWEEP", "sweep", start, named or newest, sweeps)

    def check_experiment(self, name: str) -> None:
        """Reject an experiment whose artifacts lie elsewhere.

        Those of a new experiment will lie with the store.
        """
        experiment = self.client().get_experiment_by_name(name)
        if experiment is not None:
            location = experiment.artifact_location
            artifact_locations.check(location, self.uri, self.places)

    def _search(self, condition: str) -> list[Any]:
        # It imports MLflow, which takes seconds.
        from pipeline.tracking.store import all_experiments

        client = self.client()
        ids = [experiment.experiment_id for experiment in all_experiments(client)]
        return list(client.search_runs(ids, condition, max_results=_MOST_RUNS))

    def _only(
        self,
        key: str,
        kind: str,
        start: str,
        matches: Sequence[Any],
        known: Sequence[Any] = (),
    ) -> Any:
        """Return the only run of `matches`, once its ID and its place are checked.

        Args:
            key: the argument that named the run.
            kind: the word for the run in an error.
            start: the value of the argument.
            matches: the runs that it may mean.
            known: the choices if there are none.
        """
        if len(matches) != 1:
            rule = f"must name one {kind} of the store"
            if matches:
                rule = f"must name one {kind}, not {len(matches)}"
            choices = []
            for run in (matches or known)[:_MOST_CHOICES]:
                choices.append(f"{run.info.run_id} ({run.info.run_name})")
            raise ConfigError(key, rule, start, choices)

        run = matches[0]
        if not RUN_ID.fullmatch(run.info.run_id):  # it is used as an argument
            rule = f"must be a {kind} with an ID of MLflow's own"
            raise ConfigError(key, rule, run.info.run_id)
        artifact_locations.check(run.info.artifact_uri, self.uri, self.places)
        return run


def listed(tags: Mapping[str, str], key: str) -> list[str]:
    """Return the list of strings in a run's tag.

    Args:
        tags: the tags of a run.
        key: the tag, which continues in KEY.1, KEY.2 and so on.

    Returns:
        The strings; an empty list without the tag.

    Raises:
        ConfigError: the tag holds anything else.
    """
    parts = [tags.get(key, "[]")]
    while (part := tags.get(f"{key}.{len(parts)}")) is not None:
        parts.append(part)
    try:
        # Text that follows is left over from a longer list.
        values, _ = json.JSONDecoder().raw_decode("".join(parts))
        is_list = isinstance(values, list)
        if not is_list or not all(isinstance(value, str) for value in values):
            raise ValueError("it is no list of texts")
    except (ValueError, RecursionError) as error:
        rule = f"must have a tag {key} that can be read ({first_line(error)})"
        raise ConfigError("SWEEP", rule) from error
    return values


@dataclass
class SweepRecord:
    """A sweep as recorded in a store: its parent run, and the latest run of each job.

    Attributes:
        uri: the store.
        run_id: the parent run.
        experiment_id: the experiment of all runs.
    """

    uri: str
    run_id: str
    experiment_id: str

    def client(self) -> Any:
        """Return MLflow's client of the store."""
        return ForeignStore(self.uri).client()

    def children(self) -> dict[str, Any]:
        """Return the latest run of each job, by the job's name.

        Raises:
            ConfigError: a run does not name its job.
        """
        runs = self.client().search_runs(
            [self.experiment_id],
            f"tags.sweep = '{self.run_id}'",
            max_results=_MOST_RUNS,
            order_by=["start_time ASC"],
        )
        latest = {}
        for run in runs:
            is_named = "sweep.job" in run.data.tags
            if not is_named or not RUN_ID.fullmatch(run.info.run_id):
                rule = "must have runs with MLflow's IDs and a tag sweep.job"
                raise ConfigError("SWEEP", rule, run.info.run_id)
            latest[run.data.tags["sweep.job"]] = run
        return latest


@dataclass(frozen=True)
class OwnStore:
    """The store that the user's config names.

    Attributes:
        uri: its address.
        places: the places of `trust.allow`: a store in one of them may be followed too.
        on_command_line: whether the user named the store on the command line.
    """

    uri: str
    places: tuple[str, ...] = ()
    on_command_line: bool = True

    def followed(self, recorded: str, where: str, *, moves: bool = False) -> str:
        """Return the URI of the store that is recorded in a file.

        Args:
            recorded: the URI in the file, without a password.
            where: the word for the file in an error.
            moves: whether the run was in no store yet, and may go to another one that
                is named on the command line.

        Raises:
            ConfigError: the recorded store is not the user's.
        """
        # Only the user's URI shows which parts of the recorded one are secrets.
        remember(self.uri)
        is_same = mask(absolute(self.uri)) == mask(absolute(recorded))
        if is_same or (self.on_command_line and moves):
            return self.uri
        is_readable = HIDDEN not in recorded
        is_allowed = is_readable and artifact_locations.lies_in(recorded, self.places)
        if is_allowed and not self.on_command_line:
            return recorded
        rule = (
            f"must be that of {where}, {mask(recorded)}; "
            f"if that is yours, add tracking.uri={mask(recorded)}"
        )
        raise ConfigError("tracking.uri", rule, self.uri)


def again_command(name: str, run_id: str, uri: str) -> str:
    """Return the command that runs the rest of a sweep, as far as its record shows.

    Args:
        name: the sweep's name.
        run_id: its parent run.
        uri: its store.
    """
    if name == MULTIRUN:
        overrides = [f"tracking.sweep={run_id}", *store_argument(uri)]
        return f"pipeline train -m … {shlex.join(overrides)}"
    command = ["pipeline", "sweep", name, "--again", run_id, *store_argument(uri)]
    return shlex.join(command)


def sync_command(folder: str, uri: str) -> str:
    """Return the command that ships what is in `folder` to the store at `uri`.

    The URI has no password in it: the user adds it.
    """
    return shlex.join(["pipeline", "sync", folder, *store_argument(uri)])


def store_argument(uri: str) -> list[str]:
    """Return the override with which a command finds the store at `uri`.

    None is needed for the default store, unless the environment names another one.
    """
    if uri == DEFAULT_STORE and "MLFLOW_TRACKING_URI" not in os.environ:
        return []
    return [f"tracking.uri={mask(uri)}"]

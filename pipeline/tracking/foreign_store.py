"""Reads stores that may not be the user's own, for every command that reads a store.

Input: the URI of a store and the user's trust entries. Output: runs whose IDs are in
MLflow's format. A run that the user names must also have its artifacts in an allowed
location.
"""

import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from pipeline.common import sqlite_uri
from pipeline.common.errors import ConfigError, first_line
from pipeline.common.secrets import HIDDEN, mask, remember
from pipeline.common.sqlite_uri import absolute
from pipeline.config.trust_entries import allowed_places, check_allowed
from pipeline.tracking import run_paths
from pipeline.trust import artifact_locations

DEFAULT_STORE = "sqlite:///mlruns/mlflow.db"
MULTIRUN = "multirun"  # the name of a sweep without a sweep file
CRITICAL = "critical"  # the name of a sweep that `pipeline critical` runs
NOTE = "mlflow.note.content"  # the tag with a run's description, in Markdown
# Tag of a run: when it was interrupted and resumed, as pairs of milliseconds since 1970.
INTERRUPTIONS = "interruptions"
MOST_INTERRUPTIONS = 100  # the number of pairs in this tag, which has a maximum length
LONGEST_TAG = 5000  # maximum number of characters of a tag in all MLflow stores
RUN_ID = re.compile("[0-9a-f]{32}")
_RUN_ID_START = re.compile("[0-9a-f]{4,32}")
_IS_SWEEP = "tags.`sweep.name` != ''"  # MLflow's filter string for parents of sweeps
MOST_RUNS = 50_000  # MLflow's maximum number of results per search
_MOST_CHOICES = 10  # maximum number of runs that an error lists


@dataclass(frozen=True)
class ForeignStore:
    """A store that exists and answers; create it with `open`.

    Attributes:
        uri: the URI of the store.
        places: locations where artifacts may lie, in addition to the store's own.
    """

    uri: str
    places: tuple[str, ...] = ()

    @classmethod
    def open(cls, uri: str, allow: Sequence[str] = ()) -> Self:
        """Return the store at `uri`.

        Args:
            uri: the URI of the store.
            allow: the entries of `trust.allow` and `--allow`.

        Raises:
            ConfigError: the store does not exist or does not answer, or an entry of
                `allow` is invalid.
        """
        check_allowed(allow)
        remember(uri)
        if sqlite_uri.is_missing(uri):
            rule = f"must be a store that exists: {mask(absolute(uri))} does not"
            raise ConfigError("tracking.uri", rule, uri)

        # Import the module only here, since it imports MLflow, which takes seconds.
        from pipeline.tracking.store import Store

        Store(uri)  # rejects a store that does not answer
        return cls(uri, tuple(allowed_places(allow)))

    def client(self) -> Any:
        """Return an MLflow client for the store."""
        from mlflow.tracking import MlflowClient

        # MLflow keeps each store open under its URI. So a relative path would mean the
        # working directory of its first use.
        return MlflowClient(absolute(self.uri))

    def run(self, start: str, key: str = "RUN_ID") -> Any:
        """Return the only run whose ID begins with `start`.

        Args:
            start: a run's ID, or at least its first 4 hexadecimal digits.
            key: the argument that names the run in an error.

        Raises:
            ConfigError: no run or several runs match, or the run's artifacts lie
                outside the allowed locations.
        """
        from mlflow.exceptions import MlflowException

        if RUN_ID.fullmatch(start):
            try:
                runs = [self.client().get_run(start)]
            except MlflowException as error:
                raise ConfigError(key, self._unknown("run"), start) from error
        elif _RUN_ID_START.fullmatch(start):
            runs = self._search(f"attributes.run_id LIKE '{start}%'")
        else:
            rule = "must be the ID of a run, or at least its first 4 digits"
            raise ConfigError(key, rule, start, meant=run_paths.meant_id(start))
        return self._only(key, "run", start, runs)

    def sweep(self, start: str) -> Any:
        """Return the parent run of a sweep.

        Args:
            start: the beginning of the sweep's ID, the name of its parent run, or the
                name of its sweep file, which selects the newest sweep of the file.

        Raises:
            ConfigError: no sweep or several sweeps match, or the artifacts of the
                parent run lie outside the allowed locations.
        """
        sweeps = self._search(_IS_SWEEP)
        return self._only("SWEEP", "sweep", start, _named(start, sweeps), sweeps)

    def run_or_sweep(self, start: str) -> Any:
        """Return the run, or the parent run of the sweep, that `start` names.

        Args:
            start: as in `sweep`, or else as in `run`.

        Raises:
            ConfigError: as in `sweep` and in `run`.
        """
        sweeps = self._search(_IS_SWEEP)
        named = _named(start, sweeps)
        if not named and _RUN_ID_START.fullmatch(start):
            named = self._search(f"attributes.run_id LIKE '{start}%'")
        return self._only("SWEEP or RUN", "sweep or run", start, named, sweeps)

    def matching(self, condition: str, experiment: str | None = None) -> list[Any]:
        """Return the runs that `listed_by` returns, after a check of each.

        Raises:
            ConfigError: as in `listed_by`, or a run is rejected as in `run`.
        """
        matches = self.listed_by(condition, experiment)
        for run in matches:
            self._check(run, "--filter", "run")
        return matches

    def listed_by(self, condition: str, experiment: str | None = None) -> list[Any]:
        """Return the active runs that match a filter string, except parents of sweeps.

        The runs are not checked. Use only their entries in the store.

        Args:
            condition: a filter string of MLflow.
            experiment: the name of the experiment that is searched, or None for all.

        Raises:
            ConfigError: the filter string is not valid, or the store has no such
                experiment.
        """
        from mlflow.exceptions import MlflowException

        try:
            runs = self._search(condition, experiment)
        except MlflowException as error:
            rule = f"must be a filter string of MLflow ({first_line(error)})"
            raise ConfigError("--filter", rule, condition) from error
        return [run for run in runs if "sweep.name" not in run.data.tags]

    def check_experiment(self, name: str) -> None:
        """Reject an experiment whose artifacts lie outside the allowed locations.

        A new experiment is accepted, since its artifacts will lie in the store's own
        location.

        Raises:
            ConfigError: the experiment is rejected.
        """
        experiment = self.client().get_experiment_by_name(name)
        if experiment is not None:
            location = experiment.artifact_location
            artifact_locations.check(location, self.uri, self.places)

    def _search(self, condition: str, name: str | None = None) -> list[Any]:
        """Return the active runs that match an MLflow filter string.

        At most `MOST_RUNS` runs are returned.

        Args:
            condition: the filter string.
            name: the name of the experiment that is searched, or None for all.

        Raises:
            ConfigError: there is no active experiment with this name.
        """
        from pipeline.tracking.store import all_experiments

        client = self.client()
        experiments = all_experiments(client)
        if name is not None:
            names = [experiment.name for experiment in experiments]
            if name not in names:
                rule = "must be an experiment of the store"
                raise ConfigError("tracking.experiment", rule, name, names)
            experiments = [experiments[names.index(name)]]
        ids = [experiment.experiment_id for experiment in experiments]
        return list(client.search_runs(ids, condition, max_results=MOST_RUNS))

    def _unknown(self, kind: str) -> str:
        """Return the rule of the error about a run or sweep that the store lacks."""
        return (
            f"must name one {kind} of the store {mask(absolute(self.uri))}; "
            "to use another store, set tracking.uri"
        )

    def _only(
        self,
        key: str,
        kind: str,
        start: str,
        matches: Sequence[Any],
        known: Sequence[Any] = (),
    ) -> Any:
        """Return the only run in `matches`, after a check of its ID and artifact URI.

        Args:
            key: the name of the argument that selects the run, for errors.
            kind: "run" or "sweep", for errors.
            start: the value of the argument.
            matches: the runs that match the value.
            known: the runs that an error lists if `matches` is empty.

        Raises:
            ConfigError: there is not exactly one match, its ID is not in MLflow's
                format, or its artifacts lie outside the allowed locations.
        """
        if len(matches) != 1:
            rule = self._unknown(kind)
            if matches:
                rule = f"must name one {kind}, not {len(matches)}"
            choices = []
            for run in (matches or known)[:_MOST_CHOICES]:
                choices.append(f"{run.info.run_id} ({run.info.run_name})")
            raise ConfigError(key, rule, start, choices or None)

        run = matches[0]
        self._check(run, key, kind)
        return run

    def _check(self, run: Any, key: str, kind: str) -> None:
        """Reject a run with a wrong ID, or with artifacts outside the allowed places.

        For `key` and `kind`, see `_only`.
        """
        if not RUN_ID.fullmatch(run.info.run_id):  # the ID is used in commands
            rule = f"must be a {kind} whose ID has MLflow's format"
            raise ConfigError(key, rule, run.info.run_id)
        artifact_locations.check(run.info.artifact_uri, self.uri, self.places)


def _named(start: str, sweeps: Sequence[Any]) -> list[Any]:
    """Return the parent runs that `start` names; see `ForeignStore.sweep`."""
    named = []
    of_file = []
    for run in sweeps:
        if run.info.run_id.startswith(start) or run.info.run_name == start:
            named.append(run)
        if run.data.tags["sweep.name"] == start:
            of_file.append(run)
    newest = sorted(of_file, key=lambda run: run.info.start_time)[-1:]
    return named or newest


def listed(tags: Mapping[str, str], key: str) -> list[str]:
    """Return the list of strings that a run's tag holds as JSON.

    Args:
        tags: the tags of a run.
        key: the tag. A long list continues in the tags KEY.1, KEY.2 and so on.

    Returns:
        The strings, or an empty list if the run lacks the tag.

    Raises:
        ConfigError: the tag holds anything other than a list of strings.
    """
    parts = [tags.get(key, "[]")]
    while (part := tags.get(f"{key}.{len(parts)}")) is not None:
        parts.append(part)
    try:
        # Ignore text after the list: tags with higher numbers may be left over from an
        # earlier, longer list.
        values, _ = json.JSONDecoder().raw_decode("".join(parts))
        is_list = isinstance(values, list)
        if not is_list or not all(isinstance(value, str) for value in values):
            raise ValueError("it is not a list of strings")
    except (ValueError, RecursionError) as error:
        rule = f"must have a tag {key} that can be read ({first_line(error)})"
        raise ConfigError("SWEEP", rule) from error
    return values


@dataclass
class SweepRecord:
    """A sweep as recorded in a store: the parent run, and the latest run of each job.

    Attributes:
        uri: the URI of the store.
        run_id: the ID of the parent run.
        experiment_id: the ID of the experiment that holds all runs of the sweep.
    """

    uri: str
    run_id: str
    experiment_id: str

    def client(self) -> Any:
        """Return an MLflow client for the store."""
        return ForeignStore(self.uri).client()

    def children(self) -> dict[str, Any]:
        """Return the latest run of each job, by the job's name.

        Raises:
            ConfigError: a run lacks the tag `sweep.job`, or its ID is not in MLflow's
                format.
        """
        runs = self.client().search_runs(
            [self.experiment_id],
            f"tags.sweep = '{self.run_id}'",
            max_results=MOST_RUNS,
            order_by=["start_time ASC"],
        )
        latest = {}
        for run in runs:
            is_named = "sweep.job" in run.data.tags
            if not is_named or not RUN_ID.fullmatch(run.info.run_id):
                rule = "must have runs with a tag sweep.job and IDs in MLflow's format"
                raise ConfigError("SWEEP", rule, run.info.run_id)
            latest[run.data.tags["sweep.job"]] = run
        return latest


@dataclass(frozen=True)
class OwnStore:
    """The store that the user's config names.

    Attributes:
        uri: the URI of the store.
        places: the places in `trust.allow`. A recorded store in one of these places may
            be used, too.
        on_command_line: whether the user named the store on the command line.
    """

    uri: str
    places: tuple[str, ...] = ()
    on_command_line: bool = True

    def followed(self, recorded: str, where: str, *, moves: bool = False) -> str:
        """Return the URI of the store to use for a run or sweep recorded in a file.

        It is the user's store if the file records the same store, or if the run `moves`
        and the command line names a store. It is the recorded store if the command line
        names no store, and the recorded URI has no masked secret and lies in one of
        `places`.

        Args:
            recorded: the URI in the file, in which secrets are masked.
            where: a description of the file, for errors.
            moves: whether the run is not yet in any store, and may therefore be shipped
                to a different store that the command line names.

        Raises:
            ConfigError: the recorded store is neither the user's nor allowed.
        """
        # Register the secrets in the user's URI, so that both URIs are masked alike.
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
            f"if that store is yours, add tracking.uri={mask(recorded)}"
        )
        raise ConfigError("tracking.uri", rule, self.uri)


def again_command(name: str, run_id: str, uri: str) -> str:
    """Return the command that runs the unfinished jobs of a sweep.

    Args:
        name: the sweep's name.
        run_id: the ID of the parent run.
        uri: the URI of the store.
    """
    command = ["pipeline", "sweep", name, "--again", run_id, *store_argument(uri)]
    return shlex.join(command)


def sync_command(folder: str, uri: str) -> str:
    """Return the command that ships the journal in `folder` to the store at `uri`.

    Secrets in the URI are masked; the user has to insert them.
    """
    return shlex.join(["pipeline", "sync", folder, *store_argument(uri)])


def store_argument(uri: str) -> list[str]:
    """Return a list with the override that selects the store at `uri`.

    The list is empty for the default store of this folder, unless the environment
    variable MLFLOW_TRACKING_URI is set.
    """
    is_default = absolute(uri) == absolute(DEFAULT_STORE)
    if is_default and "MLFLOW_TRACKING_URI" not in os.environ:
        return []
    # The command may be run in another folder.
    return [f"tracking.uri={mask(absolute(uri))}"]

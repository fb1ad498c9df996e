"""A store that need not be the user's own: every verb that reads a store does so through here.

In: its address and what the user allows. Out: runs with IDs in MLflow's format, whose artifacts lie where they may.
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
from pipeline.config.allow_list import allowed_places, check_allowed
from pipeline.tracking.journal_file import absolute
from pipeline.trust import artifact_locations

DEFAULT_STORE = "sqlite:///mlruns/mlflow.db"
MULTIRUN = "multirun"  # the name of a sweep without a file
LONGEST_TAG = 5000  # characters that every MLflow store accepts
CRITICAL = "critical"  # the name of a sweep of `pipeline critical`
_MOST = 50_000  # runs that one search returns, at most
RUN_ID = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True)
class ForeignStore:
    """A store that exists and answers, see `open`. Artifacts may lie with it and in `places`."""

    uri: str
    places: tuple[str, ...] = ()

    @classmethod
    def open(cls, uri: str, allow: Sequence[str] = ()) -> Self:
        """Return the store at `uri`, which must exist and answer; `allow` is of `trust.allow` and `--allow`."""
        from pipeline.tracking.store import Store

        check_allowed(allow)
        if Store(uri).is_new():
            raise ConfigError("tracking.uri", "must be a store that exists", uri)
        return cls(uri, tuple(allowed_places(allow)))

    def client(self) -> Any:
        from mlflow.tracking import MlflowClient

        return MlflowClient(self.uri)

    def run(self, start: str) -> Any:
        """Return the only run whose ID begins with `start`."""
        from mlflow.exceptions import MlflowException

        if RUN_ID.fullmatch(start):
            try:
                found = [self.client().get_run(start)]
            except MlflowException as error:
                raise ConfigError(
                    "RUN_ID", "must be a run of the store", start
                ) from error
        elif re.fullmatch("[0-9a-f]{4,32}", start):
            found = self._search(f"attributes.run_id LIKE '{start}%'")
        else:
            raise ConfigError(
                "RUN_ID",
                "must be the ID of a run, or at least 4 digits of its start",
                start,
            )
        return self._only("RUN_ID", "run", start, found)

    def sweep(self, start: str) -> Any:
        """Return the parent run whose ID begins with `start`, or of that name; the newest of a sweep file's name."""
        runs = self._search("tags.`sweep.name` != ''")
        found = [
            run
            for run in runs
            if run.info.run_id.startswith(start) or run.info.run_name == start
        ]
        of_file = [run for run in runs if run.data.tags["sweep.name"] == start]
        newest = sorted(of_file, key=lambda run: run.info.start_time)[-1:]
        return self._only("SWEEP", "sweep", start, found or newest, runs)

    def check_experiment(self, name: str) -> None:
        """Refuse an experiment whose artifacts lie elsewhere; those of a new one will lie with the store."""
        if (found := self.client().get_experiment_by_name(name)) is not None:
            artifact_locations.check(found.artifact_location, self.uri, self.places)

    def _search(self, condition: str) -> list[Any]:
        experiments = [
            experiment.experiment_id
            for experiment in self.client().search_experiments()
        ]
        return list(
            self.client().search_runs(experiments, condition, max_results=_MOST)
        )

    def _only(
        self,
        key: str,
        kind: str,
        start: str,
        found: Sequence[Any],
        known: Sequence[Any] = (),
    ) -> Any:
        """Return the only run of `found`, checked; `known` are the choices if there is none."""
        if len(found) != 1:
            rule = (
                f"must name one {kind}, not {len(found)}"
                if found
                else f"must name one {kind} of the store"
            )
            choices = [
                f"{run.info.run_id} ({run.info.run_name})"
                for run in (found or known)[:10]
            ]
            raise ConfigError(key, rule, start, choices)
        (run,) = found
        if not RUN_ID.fullmatch(
            run.info.run_id
        ):  # it becomes an argument and an override
            raise ConfigError(
                key, f"must be a {kind} with an ID of MLflow's own", run.info.run_id
            )
        artifact_locations.check(run.info.artifact_uri, self.uri, self.places)
        return run


def listed(tags: Mapping[str, str], key: str) -> list[str]:
    """Return the list of strings in a run's tag `key`, which continues in KEY.1, KEY.2, …; empty without the tag."""
    parts = [tags.get(key, "[]")]
    while (part := tags.get(f"{key}.{len(parts)}")) is not None:
        parts.append(part)
    try:
        found = json.JSONDecoder().raw_decode("".join(parts))[
            0
        ]  # what follows is left over from a longer list
        if not isinstance(found, list) or not all(
            isinstance(entry, str) for entry in found
        ):
            raise ValueError("it is no list of texts")
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            "SWEEP", f"must have a tag {key} that can be read ({first_line(error)})"
        ) from error
    return found


@dataclass
class SweepRecord:
    """A sweep as recorded in a store: its parent run, and the latest run of each job."""

    uri: str  # of the store
    run_id: str
    experiment_id: str

    def client(self) -> Any:
        return ForeignStore(self.uri).client()

    def children(self) -> dict[str, Any]:
        """Return the latest run of each job, by the job's name; a run that does not name its job is refused."""
        jobs = f"tags.sweep = '{self.run_id}'"
        runs = self.client().search_runs(
            [self.experiment_id], jobs, max_results=_MOST, order_by=["start_time ASC"]
        )
        for run in runs:
            if "sweep.job" not in run.data.tags or not RUN_ID.fullmatch(
                run.info.run_id
            ):
                raise ConfigError(
                    "SWEEP",
                    "must have runs with MLflow's IDs and a tag sweep.job",
                    run.info.run_id,
                )
        return {run.data.tags["sweep.job"]: run for run in runs}


@dataclass(frozen=True)
class OwnStore:
    """The store at `uri`, which the user's config names; a store in `places` may be followed too."""

    uri: str
    places: tuple[str, ...] = ()  # of `trust.allow`
    on_command_line: bool = True

    def followed(self, recorded: str, where: str, *, moves: bool = False) -> str:
        """Return the URI of the store that is `recorded` in a file in `where`; refuse one that is not the user's.

        What `moves`, as it was in no store yet, goes to one on the command line.
        """
        remember(self.uri)  # the record may hide what only its URI shows to be a secret
        if mask(absolute(self.uri)) == mask(recorded) or (
            self.on_command_line and moves
        ):
            return self.uri
        if (
            not self.on_command_line
            and HIDDEN not in recorded
            and artifact_locations.lies_in(recorded, self.places)
        ):
            return recorded
        rule = f"must be that of {where}, {mask(recorded)}; if that is yours, add tracking.uri={mask(recorded)}"
        raise ConfigError("tracking.uri", rule, self.uri)


def again_command(name: str, run_id: str, uri: str) -> str:
    """Return the command that runs the rest of the sweep `run_id`, as far as the store `uri` can tell."""
    if name == MULTIRUN:
        return f"pipeline train -m … {shlex.join([f'tracking.sweep={run_id}', *store_argument(uri)])}"
    return shlex.join(
        ["pipeline", "sweep", name, "--again", run_id, *store_argument(uri)]
    )


def sync_command(folder: str, uri: str) -> str:
    """Return the command that ships what is in `folder` to the store `uri`, whose password the user adds."""
    return shlex.join(["pipeline", "sync", folder, *store_argument(uri)])


def store_argument(uri: str) -> list[str]:
    """Return the override with which a command finds the store `uri`; none is needed for the default one."""
    return (
        []
        if uri == DEFAULT_STORE and "MLFLOW_TRACKING_URI" not in os.environ
        else [f"tracking.uri={mask(uri)}"]
    )

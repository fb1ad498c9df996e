"""A store that need not be the user's own: every verb that reads a store does so through here.

In: its address and what the user allows. Out: runs with IDs in MLflow's format, whose artifacts lie where they may.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from pipeline.common.errors import ConfigError, first_line
from pipeline.config.allow_list import allowed_places, check_allowed
from pipeline.trust import artifact_locations

_MOST = 50_000  # runs that one search returns, at most
RUN_ID = re.compile("[0-9a-f]{32}")
_START = re.compile("[0-9a-f]{4,32}")


@dataclass(frozen=True)
class ForeignStore:
    """A store that exists and answers, see `open`. Artifacts may lie with it and in `places`."""

    uri: str
    places: tuple[str, ...] = ()

    @classmethod
    def open(cls, uri: str, allow: Sequence[str] = ()) -> ForeignStore:
        """Return the store at `uri`.

        Args:
            uri: from the user's own config.
            allow: `trust.allow` and the values of `--allow`.

        Raises:
            ConfigError: the store does not exist, or does not answer.
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

    def confined(self) -> AbstractContextManager[None]:
        """Let this process read and write artifacts of this store only where the user allows it."""
        return artifact_locations.confined(self.uri, self.places)

    def run(self, start: str) -> Any:
        """Return the run whose ID begins with `start`.

        Raises:
            ConfigError: there is no such run, or more than one.
        """
        from mlflow.exceptions import MlflowException

        if RUN_ID.fullmatch(start):
            try:
                found = [self.client().get_run(start)]
            except MlflowException as error:
                raise ConfigError("RUN_ID", "must be a run of the store", start) from error
        elif _START.fullmatch(start):
            found = self._search(f"attributes.run_id LIKE '{start}%'")
        else:
            raise ConfigError("RUN_ID", "must be the ID of a run, or at least 4 digits of its start", start)
        return self._only("RUN_ID", "run", start, found)

    def sweep(self, start: str) -> Any:
        """Return the parent run of a sweep, by the beginning of its ID or by its name.

        Raises:
            ConfigError: there is no such sweep, or more than one.
        """
        runs = self._search("tags.`sweep.name` != ''")
        found = [run for run in runs if run.info.run_id.startswith(start) or run.info.run_name == start]
        return self._only("SWEEP", "sweep", start, found, runs)

    def check_experiment(self, name: str) -> None:
        """Refuse an experiment whose artifacts lie elsewhere; those of a new one will lie with the store."""
        found = self.client().get_experiment_by_name(name)
        if found is not None:
            artifact_locations.check(found.artifact_location, self.uri, self.places)

    def _search(self, condition: str) -> list[Any]:
        experiments = [experiment.experiment_id for experiment in self.client().search_experiments()]
        return list(self.client().search_runs(experiments, condition, max_results=_MOST))

    def _only(self, key: str, kind: str, start: str, found: Sequence[Any], known: Sequence[Any] = ()) -> Any:
        """Return the only run of `found`, checked; `known` are the choices if there is none."""
        if len(found) != 1:
            rule = f"must name one {kind}, not {len(found)}" if found else f"must name one {kind} of the store"
            choices = [f"{run.info.run_id} ({run.info.run_name})" for run in (found or known)[:10]]
            raise ConfigError(key, rule, start, choices)
        (run,) = found
        if not RUN_ID.fullmatch(run.info.run_id):  # it becomes an argument and an override
            raise ConfigError(key, f"must be a {kind} with an ID of MLflow's own", run.info.run_id)
        artifact_locations.check(run.info.artifact_uri, self.uri, self.places)
        return run


def listed(tags: Mapping[str, str], key: str) -> list[str]:
    """Return the list of strings in a run's tag `key`, which continues in KEY.1, KEY.2, …; empty without the tag.

    Raises:
        ConfigError: the tag does not hold a list of strings.
    """
    parts = [tags.get(key, "[]")]
    while (part := tags.get(f"{key}.{len(parts)}")) is not None:
        parts.append(part)
    try:
        found = json.JSONDecoder().raw_decode("".join(parts))[0]  # what follows is left over from a longer list
        if not isinstance(found, list) or not all(isinstance(entry, str) for entry in found):
            raise ValueError("it is no list of texts")
    except (ValueError, RecursionError) as error:
        raise ConfigError("SWEEP", f"must have a tag {key} that can be read ({first_line(error)})") from error
    return found

"""The record of a run, fetched from a store: untrusted input, of which nothing is used before it is checked."""

import re
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.common import recorded
from pipeline.common.errors import ConfigError, first_line, say
from pipeline.config import former_names, key_kinds, plain, schema
from pipeline.tracking import provenance
from pipeline.tracking.foreign_store import ForeignStore
from pipeline.trust import gate

_FORMS = {  # of the files of a record
    "config.yaml": {
        "dataset?": dict,
        "optimizer?": dict,
        "start?": dict,
        "tracking?": dict,
    },
    "environment.json": {
        "git?": dict,
        "code?": dict,
        "package?": dict,
        "packages?": dict,
    },
    "dataset.json": provenance.DATASET,
    "links.json": {str: str},
}
# No link may refer to these: the store's URI may hold a password.
_NOT_LINKED = {"hydra", *key_kinds.groups_apart()}
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
LARGEST = 16 * 2**20  # bytes of one file of a record


@dataclass(frozen=True)
class RecordedRun:
    """The record of a run; `environment` and `dataset` are empty if an older run recorded none."""

    run: Any  # of MLflow
    config: dict[str, Any]  # resolved, as it was written, of any schema
    environment: dict[str, Any]
    dataset: dict[str, Any]
    links: dict[
        str, str
    ]  # interpolations of the config before it was resolved, by dotted name

    @property
    def run_dir(self) -> str:  # as the record names it
        return str(self.environment.get("run_dir") or "")

    def is_in_tf32(self) -> bool:
        """Return whether float32 was computed in TF32; records that do not say it are taken for it if on a GPU."""
        params = self.run.data.params
        on_gpu = (
            bool(self.environment.get("gpus"))
            and params.get("hardware.device") != "cpu"
        )
        return params.get("hardware.precision") == "float32" and bool(
            self.environment.get("tf32", on_gpu)
        )

    def is_unchanged(self) -> bool:
        """Return whether the config matches its recorded hash; True for schema 0, which hashed differently."""
        if not self.config.get("schema"):
            return True
        try:
            tag = str(self.run.data.tags.get("config.hash"))
            return provenance.has_hash(self.config, self.run_dir, tag)
        except TypeError:  # keys that JSON does not allow; the gate refuses them
            return False

    def moved(self, run_dir: Path) -> dict[str, Any]:
        """Return the config with current names, and with `run_dir` in place of the recorded run directory."""
        before = self.run_dir.rstrip("/")

        def move(text: str) -> str:
            is_inside = before.startswith("/") and f"{text}/".startswith(f"{before}/")
            return f"{run_dir.absolute()}{text[len(before) :]}" if is_inside else text

        return former_names.migrated(plain.mapped(self.config, move))

    def check_schema(self) -> None:
        """Check that the record's schema is known, and say if it is an older one, which would be migrated here.

        From 0 to 2 nothing has to change, since the defaults of new keys do what older code did. Before 2, only the
        last validation of a run with `use_ema` used the averaged weights. From 2 to 3 two keys were renamed.
        """
        version, run_id = self.config.get("schema", 0), self.run.info.run_id
        if type(version) is not int or not 0 <= version <= schema.SCHEMA:
            made_by = str((self.environment.get("package") or {}).get("version"))[:40]
            rule = f"must have a record of schema 0 to {schema.SCHEMA}; the version that made it, {made_by}, runs it: "
            # Anything but a small number may be long.
            received = (
                version
                if type(version) is int and abs(version) < 10**9
                else type(version).__name__
            )
            raise ConfigError("RUN_ID", f"{rule}pipeline rerun {run_id}", received)
        if version < schema.SCHEMA:
            say(
                f"the record of {run_id} is of schema {version}: brought to schema {schema.SCHEMA}"
            )
            averages = (self.config.get("optimizer") or {}).get("use_ema")
            if version < 2 and averages:
                say(
                    "  differs: val/…: all are of the averaged weights now, then only the last one was"
                )


def fetch(store: ForeignStore, start: str) -> RecordedRun:
    """Return the record of the run whose ID begins with `start`; raise a `ConfigError` if it cannot be read."""
    from mlflow.exceptions import MlflowException

    run = store.run(start)
    run_id = run.info.run_id
    if run.info.lifecycle_stage != "active":
        raise ConfigError(
            "RUN_ID",
            "must be a run that is not deleted: restore it first (mlflow runs restore)",
            run_id,
        )
    if "sweep.name" in run.data.tags:
        raise ConfigError(
            "RUN_ID", "is a sweep: rerun it with --sweep, or one of its runs", run_id
        )
    try:
        found = _read(store.client(), run_id)
    except (MlflowException, OSError, ValueError) as error:
        raise ConfigError(
            "RUN_ID",
            f"must have a record that can be read ({first_line(error)})",
            run_id,
        ) from error
    if "config.yaml" not in found:
        raise ConfigError(
            "RUN_ID", "must be a run that recorded its config (config.yaml)", run_id
        )
    gate.check_size(found["config.yaml"])
    found["links.json"] = former_names.current_links(found.get("links.json", {}))
    return RecordedRun(run, *(found.get(name, {}) for name in _FORMS))


def relinked(
    config: dict[str, Any], links: Mapping[str, str], changed: Collection[str]
) -> dict[str, Any]:
    """Return a checked config in which values that were linked to `changed` keys are links again.

    Without this, an override of the learning rate would not reach the schedule. Links to other than keys are ignored.
    """
    known = {
        key: link
        for key, link in links.items()
        if plain.LINK.fullmatch(link) and not _touches(key, changed)
    }
    names = {key: _REFERENCE.findall(link) for key, link in known.items()}
    names = {
        key: of
        for key, of in names.items()
        if not _NOT_LINKED & {name.split(".")[0] for name in (key, *of)}
    }
    followed = set(changed)
    while more := {
        key
        for key in names.keys() - followed
        if any(_touches(name, followed) for name in names[key])
    }:
        followed |= more
    again = {tuple(key.split(".")): links[key] for key in names.keys() & followed}
    return {name: _linked(entry, again, (str(name),)) for name, entry in config.items()}


def _linked(
    node: Any, links: Mapping[tuple[str, ...], str], path: tuple[str, ...]
) -> Any:
    """Return a copy of the plain `node` at `path`, with `links` in place of what is at their paths."""
    if path in links:
        return links[path]
    if isinstance(node, dict):
        return {
            name: _linked(entry, links, (*path, str(name)))
            for name, entry in node.items()
        }
    return (
        [_linked(entry, links, (*path, str(i))) for i, entry in enumerate(node)]
        if isinstance(node, list)
        else node
    )


def _read(client: Any, run_id: str) -> dict[str, dict[str, Any]]:
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for artifact in client.list_artifacts(run_id):
            # A folder has no size that could be checked before it is downloaded.
            if artifact.path in _FORMS and not artifact.is_dir:
                if (artifact.file_size or 0) > LARGEST:
                    raise ValueError(
                        f"{artifact.path} is of {artifact.file_size} bytes"
                    )
                fetched = Path(client.download_artifacts(run_id, artifact.path, folder))
                found[artifact.path] = recorded.read(fetched, _FORMS[artifact.path])
    if not all(
        abs(count) < 2**63
        for count in found.get("dataset.json", {}).get("examples", {}).values()
    ):
        raise ValueError("examples of dataset.json are no numbers")
    return found


def _touches(key: str, names: Collection[str]) -> bool:
    return any(
        f"{key}.".startswith(f"{name}.") or f"{name}.".startswith(f"{key}.")
        for name in names
    )

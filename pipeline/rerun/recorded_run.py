"""The record of a run, fetched from a store.

The record is untrusted input: its content is checked before it is used.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.checkpoints import recorded_config
from pipeline.common.errors import ConfigError, first_line, say
from pipeline.config import former_names, key_kinds, plain, schema
from pipeline.tracking import provenance, record_files
from pipeline.tracking.foreign_store import ForeignStore
from pipeline.trust import gate

# Links in these groups, and links to their keys, are ignored: for example, the store's
# URI may contain a password.
_NOT_LINKED = {"hydra", *key_kinds.groups_apart()}
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
_LONGEST_VERSION = 40  # maximum characters of a version in an error


@dataclass(frozen=True)
class RecordedRun:
    """The record of a run.

    Attributes:
        run: the run in MLflow.
        config: the resolved config as it was recorded, in any schema version.
        environment: the result of `provenance.environment`; empty if not recorded.
        dataset: the result of `provenance.dataset`; empty if not recorded.
        links: the interpolations in the config before it was resolved, by the dotted
            name of the key.
        segments: the result of `provenance.segment` for each segment of the run; empty
            if it was never resumed.
    """

    run: Any
    config: dict[str, Any]
    environment: dict[str, Any]
    dataset: dict[str, Any]
    links: dict[str, str]
    segments: Sequence[Mapping[str, Any]] = ()

    @property
    def run_id(self) -> str:
        return str(self.run.info.run_id)

    @property
    def run_dir(self) -> str:
        """The run directory of the recorded run, or "" if it is not known."""
        return str(self.environment.get("run_dir") or "")

    @property
    def data_dir(self) -> str | None:
        """The data directory of the recorded run, or None if it is not known."""
        return _text_or_none(self._group("dataset").get("data_dir"))

    @property
    def experiment(self) -> str | None:
        """The experiment of the recorded run, or None if it is not known."""
        return _text_or_none(self._group("tracking").get("experiment"))

    @property
    def last_code(self) -> Mapping[str, Any]:
        """The hashes of the user's code in the last segment; empty if not recorded."""
        described = self.segments[-1] if self.segments else self.environment
        return described.get("code") or {}

    def is_in_tf32(self) -> bool:
        """Return whether float32 was computed in TF32.

        If the record does not say, TF32 is assumed for a run on a GPU.
        """
        params = self.run.data.params
        if params.get("hardware.precision") != "float32":
            return False
        had_gpus = bool(self.environment.get("gpus"))
        on_gpu = had_gpus and params.get("hardware.device") != "cpu"
        return bool(self.environment.get("tf32", on_gpu))

    def is_unchanged(self) -> bool:
        """Return whether the config still has its recorded hash.

        The result is True for schema 0, whose hash was computed differently.
        """
        if not self.config.get("schema"):
            return True
        tag = str(self.run.data.tags.get(provenance.HASH_TAG))
        return provenance.has_hash(self.config, self.run_dir, tag)

    def moved(self, run_dir: Path) -> dict[str, Any]:
        """Return the config with current names, for another run directory.

        Paths in the old run directory are replaced by those in `run_dir`.
        """
        config = former_names.migrated(self.config)
        return recorded_config.with_moved_paths(config, self.run_dir, run_dir)

    def check_schema(self) -> None:
        """Reject a record of an unknown schema; print a message for an older schema.

        Schemas 0 to 2 need no conversion, since the defaults of new keys keep the
        earlier behavior. In schema 3, two keys were renamed; see `former_names`.
        """
        version = self.config.get("schema", 0)
        if type(version) is not int or not 0 <= version <= schema.SCHEMA:
            raise self._unknown_schema(version)
        if version == schema.SCHEMA:
            return

        say(
            f"the record of {self.run_id} has schema {version} and is converted to "
            f"schema {schema.SCHEMA}"
        )
        # Before schema 2, only the last validation used the averaged weights.
        if version < 2 and self._group("optimizer").get("use_ema"):
            say(
                "  differs: val/…: all values are now computed with the averaged "
                "weights; in the record, only the last one was"
            )

    def _unknown_schema(self, version: object) -> ConfigError:
        package = self.environment.get("package") or {}
        made_by = str(package.get("version"))[:_LONGEST_VERSION]
        rule = (
            f"must have a record of schema 0 to {schema.SCHEMA}; use the version that "
            f"made it, {made_by}: pipeline rerun {self.run_id}"
        )
        # Show only a small integer, since any other value may be long.
        received: object = type(version).__name__
        if type(version) is int and abs(version) < 10**9:
            received = version
        return ConfigError("RUN_ID", rule, received)

    def _group(self, name: str) -> dict[str, Any]:
        """Return a group of the config, or an empty dict if the record lacks it."""
        return self.config.get(name) or {}


def fetch(store: ForeignStore, start: str) -> RecordedRun:
    """Return the record of the run whose ID begins with `start`.

    Raises:
        ConfigError: no run or several runs match, or the run is deleted, is a sweep, or
            has no record that can be read.
    """
    from mlflow.exceptions import MlflowException

    run = store.run(start)
    run_id = run.info.run_id
    if run.info.lifecycle_stage != "active":
        rule = (
            "must be a run that is not deleted: restore it first (mlflow runs restore)"
        )
        raise ConfigError("RUN_ID", rule, run_id)
    if "sweep.name" in run.data.tags:
        rule = "is a sweep: rerun it with --sweep, or rerun one of its runs"
        raise ConfigError("RUN_ID", rule, run_id)
    try:
        contents = record_files.download(store.client(), run_id)
    except (MlflowException, OSError, ValueError) as error:
        rule = f"must have a record that can be read ({first_line(error)})"
        raise ConfigError("RUN_ID", rule, run_id) from error
    if "config.yaml" not in contents:
        rule = (
            "must be a run that recorded its config (config.yaml), as runs of pipeline "
            "train do: a run that your own fit logged has no config"
        )
        raise ConfigError("RUN_ID", rule, run_id)
    gate.check_size(contents["config.yaml"])

    return RecordedRun(
        run=run,
        config=contents["config.yaml"],
        environment=contents.get("environment.json", {}),
        dataset=contents.get("dataset.json", {}),
        links=former_names.current_links(contents.get("links.json", {})),
        segments=contents.get("segments.json", ()),
    )


def relinked(
    config: dict[str, Any], links: Mapping[str, str], changed: Collection[str]
) -> dict[str, Any]:
    """Return a config in which values that depend on changed keys are links again.

    For example, an override of the learning rate then also changes the schedule. Links
    of any other form than `plain.LINK` are ignored.

    Args:
        config: the plain, resolved and checked config.
        links: the recorded links, by the dotted name of the key that had the link.
        changed: the keys that overrides set.
    """
    references = _references(links, changed)
    followed = set(changed)
    restored: dict[tuple[str, ...], str] = {}
    while True:
        reached = []
        for key, names in references.items():
            follows = any(_touches(name, followed) for name in names)
            if follows and key not in followed:
                reached.append(key)
        if not reached:
            break
        followed.update(reached)
        for key in reached:
            restored[tuple(key.split("."))] = links[key]

    return {
        name: _with_links(entry, restored, (str(name),))
        for name, entry in config.items()
    }


def _text_or_none(value: Any) -> str | None:
    if isinstance(value, str):
        return value
    return None


def _references(
    links: Mapping[str, str], changed: Collection[str]
) -> dict[str, list[str]]:
    """Return the keys that each link refers to, by the key that has the link.

    Links of any other form than `plain.LINK`, links from or to a group in `_NOT_LINKED`
    and links that an override replaces are left out.
    """
    references = {}
    for key, link in links.items():
        if not plain.LINK.fullmatch(link) or _touches(key, changed):
            continue
        names = _REFERENCE.findall(link)
        groups = {name.split(".")[0] for name in (key, *names)}
        if not groups & _NOT_LINKED:
            references[key] = names
    return references


def _touches(key: str, names: Iterable[str]) -> bool:
    """Return whether a key is one of `names`, lies below one, or has one below it."""
    for name in names:
        if f"{key}.".startswith(f"{name}.") or f"{name}.".startswith(f"{key}."):
            return True
    return False


def _with_links(
    node: Any, links: Mapping[tuple[str, ...], str], path: tuple[str, ...]
) -> Any:
    """Return a copy of the plain node at `path`, with links in place of some values."""
    if path in links:
        return links[path]
    if isinstance(node, dict):
        return {
            name: _with_links(entry, links, (*path, str(name)))
            for name, entry in node.items()
        }
    if isinstance(node, list):
        return [
            _with_links(entry, links, (*path, str(number)))
            for number, entry in enumerate(node)
        ]
    return node

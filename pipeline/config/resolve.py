"""Composed config → `RunSpec`: what the config asks for, and what follows from it.

    composed config ─ resolve ─► RunSpec ─ `changed` ─► RunSpec ─► the run

`resolve` decides what the command line and the environment decide: the horizon, the
sizes, the workers. What depends on the machine or on the data is decided later, by
functions from one spec to another: the micro-batch size that fits, where the examples
are kept, the values that a resumed run keeps. A spec keeps the config as Hydra composed
it, so that links such as `${another.key}` follow a changed value.
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf, open_dict

from pipeline.common.errors import ConfigError
from pipeline.common.secrets import HIDDEN, mask
from pipeline.config import (
    cluster,
    key_kinds,
    plain,
    sizes,
    stages,
    text_keys,
    validate,
)
from pipeline.config.cluster import Cluster
from pipeline.config.hydra_errors import as_config_error
from pipeline.config.schema import Config, Device, LossOver, Rule
from pipeline.config.sizes import Batching, Horizon


@dataclass(frozen=True)
class RunSpec:
    """What a run does. `resolve` makes it, and it never changes.

    Attributes:
        config: the typed config, in which the nodes of objects are plain mappings.
        original: the plain config that `resolve` returned; `changed` leaves it as it
            is.
        resolved: the plain config as it is recorded.
        overrides: the overrides of the command line.
        batching: how an effective batch is cut.
        horizon: length of the run, in the unit of the config.
        workers: the workers of the run, and which one this process is; None for a
            single one.
    """

    config: Config
    original: Mapping[str, Any]
    resolved: Mapping[str, Any]
    overrides: tuple[str, ...]
    batching: Batching
    horizon: Horizon
    workers: Cluster | None
    _composed: DictConfig

    def node(self, key: str) -> DictConfig:
        """Return the node of a group, in the form that `instantiate.build` takes."""
        # It lies below a root, so that errors name its keys in full.
        return OmegaConf.create({key: plain.escaped(self.resolved[key])})[key]

    @property
    def dataset(self) -> DictConfig:
        return self.node("dataset")

    @property
    def recorded(self) -> dict[str, Any]:
        """Return the resolved config without secrets, and without the path of one."""
        hardware = {**self.resolved["hardware"], "secret_file": None}
        return dict(plain.mapped({**self.resolved, "hardware": hardware}, mask))

    @property
    def links(self) -> dict[str, str]:
        """Return the links from keys of the config to other keys."""
        return plain.links(self._composed)

    @property
    def searches(self) -> bool:
        """Return whether the micro-batch size is yet to be searched for."""
        return self.config.accumulation.micro_batch_size in sizes.SEARCHED

    @property
    def largest(self) -> Batching:
        """Return how the largest effective batch of the run is cut."""
        first = self.batching.effective_batch_size
        size = stages.largest(self.resolved["accumulation"], first)
        if size == first:
            return self.batching
        return self.batching.with_effective_batch_size(size)

    @property
    def same_noise(self) -> bool:
        """Return whether layers draw the same noise for every cut, if they can."""
        return self.config.accumulation.same_noise is not False

    @property
    def workers_on_machine(self) -> int:
        """Return how many processes of the run share this machine."""
        return 1 if self.workers is None else self.workers.on_machine

    def at_largest(self) -> RunSpec:
        """Return the spec of a run without a schedule, at the largest effective batch.

        Its micro-batch is the share of a replica.
        """
        if self.resolved["accumulation"]["batch_schedule"] is None:
            return self
        largest = self.largest
        spec = self.changed(
            {
                stages.SCHEDULE: None,
                sizes.EFFECTIVE: largest.effective_batch_size,
                "scaling.rule": "none",
                "scaling.rate": None,
                "scaling.peak_batch_size": None,
            }
        )
        return replace(spec, batching=largest.with_micro_batch_size(largest.share))

    def changed(
        self, values: Mapping[str, Any], without: Iterable[str] = ()
    ) -> RunSpec:
        """Return the spec of another config; `batching` stays as it is.

        Args:
            values: other values, by dotted keys.
            without: dotted keys that are removed.
        """
        composed = deepcopy(self._composed)
        _update(composed, values)
        with open_dict(composed):
            for key in without:
                parent, _, name = key.rpartition(".")
                OmegaConf.select(composed, parent).pop(name, None)
        config: Any = OmegaConf.to_object(composed)
        resolved = plain.plain(composed)
        return replace(self, config=config, resolved=resolved, _composed=composed)

    def with_micro_batch(self, size: int) -> RunSpec:
        """Return the spec with the micro-batch size that was found instead of `auto`.

        The overrides have this size, too.
        """
        prefix = f"{sizes.MICRO}="
        overrides = []
        for override in self.overrides:
            if override.lstrip("+").startswith(prefix):
                override = f"{prefix}{size}"
            overrides.append(override)
        return replace(
            self.changed({sizes.MICRO: size}),
            overrides=tuple(overrides),
            batching=self.batching.with_micro_batch_size(size),
        )

    def to_text(self) -> str:
        """Return the spec as text for a process that this one starts; see `from_text`.

        It is YAML, as JSON has no integers for keys.
        """
        configs = {"original": self.original, "resolved": self.resolved}
        return str(yaml.safe_dump(configs, sort_keys=False))

    def shared_text(self) -> str:
        """Return the spec as text for the other workers; see `adopting`.

        It has no secrets, and no keys of which each worker has its own value.
        """
        shared = self.recorded
        for key in key_kinds.keys_where(lambda facts: facts.each_workers_own):
            group, _, name = key.partition(".")
            shared[group] = {**shared[group]}
            shared[group].pop(name, None)
        return str(yaml.safe_dump(shared, sort_keys=False))

    def adopting(self, text: str) -> RunSpec:
        """Return the spec of another worker's `shared_text`.

        This worker adds its own values and secrets.
        """
        shared = _with_secrets(yaml.safe_load(text), self.resolved)
        own_values = {}
        for key, value in plain.leaves(self.resolved).items():
            if _is_own(key):
                own_values[key] = value
        composed = OmegaConf.create(plain.escaped(shared))
        _update(composed, own_values)
        spec = _spec(_typed(composed), self.workers, self.overrides)
        return replace(spec, original=self.original)


@as_config_error()
def resolve(
    composed: DictConfig,
    overrides: Sequence[str] = (),
    environment: Mapping[str, str] = os.environ,
) -> RunSpec:
    """Check a composed config, and return the spec that follows from it.

    A horizon or a size that the overrides name outranks the default ones, which become
    null.

    Args:
        composed: the config as Hydra composed it; it stays as it is.
        overrides: the overrides of the command line.
        environment: the environment variables, which may name the workers.

    Raises:
        ConfigError: a value is wrong, or does not fit another one.
    """
    text_keys.check(composed)
    validate.check_form(composed)
    # Hydra composes by a schema in which text may be anything.
    composed = _typed(OmegaConf.to_container(composed))
    micro_batch_size = composed.accumulation.micro_batch_size
    if isinstance(micro_batch_size, str) and micro_batch_size.isdecimal():
        # Values from the environment are text.
        composed.accumulation.micro_batch_size = int(micro_batch_size)
    validate.check_values(composed)

    named = {override.lstrip("+~").split("=", 1)[0] for override in overrides}
    workers = cluster.workers_of_run(composed.hardware.workers, environment)
    composed.hardware.workers = 1 if workers is None else len(workers.addresses)
    horizon = sizes.horizon_of(composed.training, named)
    for unit in sizes.HORIZONS:
        if unit != horizon.unit:
            composed.training[unit] = None
    validate.check_settings(composed)

    named = _set_sizes(composed, named)
    spec = _spec(composed, workers, overrides, named)
    _check_gpus(spec)
    if workers is not None:
        cluster.check_open_ports(composed.hardware.open_ports)
        # A secret that cannot be used is rejected at once.
        cluster.secret(composed.hardware.secret_file, environment)
    return spec


def from_text(text: str, workers: Cluster | None = None) -> RunSpec:
    """Return the spec of a `RunSpec.to_text`."""
    configs = yaml.safe_load(text)
    composed = _typed(plain.escaped(configs["resolved"]))
    return replace(_spec(composed, workers), original=configs["original"])


def comparable(spec: RunSpec) -> dict[str, Any]:
    """Return the values that all workers must have in common, by their dotted keys."""
    values = {}
    for key, value in plain.leaves(plain.mapped(spec.original, mask)).items():
        if not _is_own(key):
            values[key] = value
    return values


def _typed(config: Any) -> Any:
    """Return a config, plain or of nodes, as nodes of the types of the schema."""
    return OmegaConf.merge(OmegaConf.structured(Config), config)


def _set_sizes(composed: DictConfig, named: set[str]) -> set[str]:
    """Set the sizes that are in force, and None for defaults that they outrank.

    Args:
        composed: the config.
        named: keys that the command line sets.

    Returns:
        `named` with the keys that a batch-size schedule sets.
    """
    accumulation = composed.accumulation
    replicas = composed.hardware.replicas * composed.hardware.workers
    implied = stages.implied_values(plain.plain(composed), replicas, named)
    _update(composed, implied)
    named = named | implied.keys()

    if composed.dataset.get("batched"):
        scaled = composed.scaling.rule != Rule.none
        accumulation.update(sizes.of_batches(accumulation, scaled, replicas, named))
        _check_any_batch_size(composed)
    accumulation.update(sizes.sizes_in_force(accumulation, named))
    return named


def _check_any_batch_size(composed: DictConfig) -> None:
    """Reject values that need the size of a batch before it is read."""
    reason = f"with {sizes.BATCHED}=true: batches have any size"
    xla = composed.hardware.xla
    if xla not in ("auto", False):
        raise ConfigError("hardware.xla", f"must be auto or false {reason}", xla)
    loss_over = composed.training.loss_over
    if loss_over != LossOver.example:
        rule = f"must be example {reason}"
        raise ConfigError("training.loss_over", rule, loss_over)


def _check_gpus(spec: RunSpec) -> None:
    """Reject a choice of GPUs that is not one for each replica on this machine."""
    hardware = spec.config.hardware
    gpu = hardware.gpu
    if gpu is None:
        return
    if hardware.device == Device.cpu:
        raise ConfigError("hardware.gpu", "must be null with hardware.device=cpu", gpu)

    replicas = hardware.replicas * spec.workers_on_machine
    gpus = gpu if isinstance(gpu, list) else [gpu]
    if len(gpus) != replicas:
        rule = f"must name one GPU for each of the {replicas} replicas here"
        raise ConfigError("hardware.gpu", rule, gpu)


def _spec(
    composed: Any,
    workers: Cluster | None,
    overrides: Sequence[str] = (),
    named: Container[str] = (),
) -> RunSpec:
    """Return the spec of a config whose horizon and sizes are those in force.

    Args:
        composed: the config.
        workers: the workers of the run, and which one this process is.
        overrides: the overrides of the command line.
        named: the keys that the overrides set.
    """
    config: Any = OmegaConf.to_object(composed)
    resolved = plain.plain(composed)
    horizon = sizes.horizon_of(composed.training)
    accumulation = resolved["accumulation"]
    replicas = composed.hardware.replicas
    # A wrong number of replicas is rejected as it stands in the config.
    if replicas > 0:
        replicas *= composed.hardware.workers
    batching = sizes.batching(
        accumulation,
        replicas,
        named,
        batched=bool(composed.dataset.get("batched")),
        most=stages.largest(accumulation, 0),
    )
    return RunSpec(
        config=config,
        original=resolved,
        resolved=resolved,
        overrides=tuple(overrides),
        batching=batching,
        horizon=horizon,
        workers=workers,
        _composed=composed,
    )


def _update(composed: DictConfig, values: Mapping[str, Any]) -> None:
    """Set `values`, by dotted keys, in place."""
    with open_dict(composed):
        for key, value in values.items():
            OmegaConf.update(composed, key, plain.escaped(value), merge=False)


def _is_own(key: str) -> bool:
    """Return whether each worker has its own value of a key."""
    return key_kinds.facts_of(key).each_workers_own


def _with_secrets(shared: Any, own: Any) -> Any:
    """Return a value of another worker with this worker's secrets in it.

    Args:
        shared: a plain value, in which secrets are masked.
        own: the value of this worker at the same place; None if it has none.
    """
    if isinstance(shared, dict):
        own_values = own if isinstance(own, Mapping) else {}
        completed = {}
        for key, value in shared.items():
            completed[key] = _with_secrets(value, own_values.get(key))
        return completed
    if isinstance(shared, list):
        if not isinstance(own, list) or len(own) != len(shared):
            own = [None] * len(shared)
        pairs = zip(shared, own, strict=True)
        return [_with_secrets(value, own_value) for value, own_value in pairs]

    is_masked = isinstance(shared, str) and HIDDEN in shared
    if is_masked and own is not None:
        return own
    return shared

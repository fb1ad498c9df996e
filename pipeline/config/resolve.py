"""Composed config → `RunSpec`: what was asked, and what follows from it, decided once.

    composed config ─ resolve ─► RunSpec ─ resume, search, cache, verify: `changed` ─► RunSpec ─► the run

`resolve` decides what the command line and the environment decide: the horizon, the sizes, the workers. What depends on
the machine or on the data is decided later, by functions from one spec to another: the micro-batch size that fits,
where the examples are kept, the values that a resumed run keeps. A spec keeps the config as Hydra composed it, so that
links such as `${another.key}` follow a changed value.
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
from pipeline.config import cluster, key_kinds, plain, sizes, stages, validate
from pipeline.config.cluster import Cluster
from pipeline.config.hydra_errors import as_config_error
from pipeline.config.schema import Config, Device, LossOver, Rule
from pipeline.config.sizes import Batching, Horizon


@dataclass(frozen=True)
class RunSpec:
    """What a run does; made by `resolve`, and never changed."""

    config: Config  # typed; the nodes of objects are plain mappings in it
    asked: Mapping[
        str, Any
    ]  # the config as `resolve` returned it, plain; changes leave it as it is
    resolved: Mapping[str, Any]  # the config, plain, as it is recorded
    overrides: tuple[str, ...]  # of the command line
    batching: Batching  # how an effective batch is cut
    horizon: Horizon  # how long the run is, in the unit that was asked for
    workers: (
        Cluster | None
    )  # of the run, as this process sees them; None for a single one
    _composed: DictConfig

    def node(self, key: str) -> DictConfig:
        """Return the node of a group, as `instantiate.build` takes it, below a root, so that errors name it in full."""
        return OmegaConf.create({key: plain.escaped(self.resolved[key])})[key]

    @property
    def dataset(self) -> DictConfig:
        return self.node("dataset")

    @property
    def recorded(self) -> dict[str, Any]:
        """Return the resolved config without its secrets, and without the place of one."""
        hardware = {**self.resolved["hardware"], "secret_file": None}
        return dict(plain.mapped({**self.resolved, "hardware": hardware}, mask))

    @property
    def links(self) -> dict[str, str]:
        """Return which keys of the config refer to which others."""
        return plain.links(self._composed)

    @property
    def searches(self) -> bool:
        """Return whether the micro-batch size is yet to be searched for."""
        return self.config.accumulation.micro_batch_size in sizes.SEARCHED

    @property
    def largest(self) -> Batching:
        """Return how the largest effective batch of the run is cut."""
        size = stages.largest(
            self.resolved["accumulation"], self.batching.effective_batch_size
        )
        return (
            self.batching
            if size == self.batching.effective_batch_size
            else self.batching.with_effective_batch_size(size)
        )

    def at_largest(self) -> RunSpec:
        """Return the spec of a run whose every effective batch is as large as the largest of this one."""
        if self.resolved["accumulation"]["batch_schedule"] is None:
            return self
        unscaled = {
            "scaling.rule": "none",
            "scaling.rate": None,
            "scaling.peak_batch_size": None,
        }
        values = {
            stages.SCHEDULE: None,
            sizes.EFFECTIVE: self.largest.effective_batch_size,
        }
        return replace(
            self.changed(values | unscaled),
            batching=self.largest.with_micro_batch_size(self.largest.share),
        )

    @property
    def same_noise(self) -> bool:
        """Return whether layers draw noise that is the same for every cut, where they can."""
        return self.config.accumulation.same_noise is not False

    @property
    def workers_on_machine(self) -> int:
        """Return how many processes of the run share this machine."""
        return 1 if self.workers is None else self.workers.on_machine

    def changed(
        self, values: Mapping[str, Any], without: Iterable[str] = ()
    ) -> RunSpec:
        """Return the spec with other `values`, by dotted keys, and `without` some keys; `batching` stays as it is."""
        composed = deepcopy(self._composed)
        _update(composed, values)
        with open_dict(composed):
            for key in without:
                parent, _, name = key.rpartition(".")
                OmegaConf.select(composed, parent).pop(name, None)
        return replace(self, **_read(composed))

    def with_micro_batch(self, size: int) -> RunSpec:
        """Return the spec with the micro-batch size that was found in place of `auto`, in the overrides too."""
        given = f"{sizes.MICRO}="
        overrides = (
            f"{given}{size}" if text.lstrip("+").startswith(given) else text
            for text in self.overrides
        )
        return replace(
            self.changed({sizes.MICRO: size}),
            overrides=tuple(overrides),
            batching=self.batching.with_micro_batch_size(size),
        )

    def to_text(self) -> str:
        """Return the whole spec as text for a process that this one starts: YAML, as JSON has no integers for keys."""
        return str(
            yaml.safe_dump(
                {"asked": self.asked, "resolved": self.resolved}, sort_keys=False
            )
        )

    def shared_text(self) -> str:
        """Return the spec as text for the other workers, without secrets and without what is a machine's own."""
        shared = self.recorded
        for key in key_kinds.keys_where(lambda facts: facts.each_workers_own):
            group, _, name = key.partition(".")
            shared[group] = {**shared[group]}
            shared[group].pop(name, None)
        return str(yaml.safe_dump(shared, sort_keys=False))

    def adopting(self, text: str) -> RunSpec:
        """Return the spec of another worker's `shared_text`, completed by what is this machine's own or secret here."""
        composed = OmegaConf.create(
            plain.escaped(_with_secrets(yaml.safe_load(text), self.resolved))
        )
        _update(
            composed,
            {
                key: value
                for key, value in plain.leaves(self.resolved).items()
                if _is_own(key)
            },
        )
        composed = OmegaConf.merge(OmegaConf.structured(Config), composed)
        return replace(_spec(composed, self.workers, self.overrides), asked=self.asked)


@as_config_error()
def resolve(
    composed: DictConfig,
    overrides: Sequence[str] = (),
    environment: Mapping[str, str] = os.environ,
) -> RunSpec:
    """Check a composed config, and return the spec that follows from it, from `overrides` and from the environment.

    A horizon or a size that the overrides name outranks the default ones, which become null.
    """
    composed = deepcopy(composed)  # the caller's stays as it is
    validate.check_form(composed)
    if (
        isinstance(micro := composed.accumulation.micro_batch_size, str)
        and micro.isdecimal()
    ):
        composed.accumulation.micro_batch_size = int(
            micro
        )  # as it comes out of the environment
    validate.check_values(composed)
    named = {override.lstrip("+~").split("=", 1)[0] for override in overrides}
    workers = cluster.workers_of_run(composed.hardware.workers, environment)
    composed.hardware.workers = 1 if workers is None else len(workers.addresses)
    horizon = sizes.horizon_of(composed.training, named)
    composed.training.update(
        {unit: None for unit in sizes.HORIZONS if unit != horizon.unit}
    )
    validate.check_settings(composed)
    replicas = composed.hardware.replicas * composed.hardware.workers
    of_stages = stages.implied_values(plain.plain(composed), replicas, named)
    _update(composed, of_stages)
    named |= of_stages.keys()
    if composed.dataset.get("batched"):
        scaled = composed.scaling.rule != Rule.none
        composed.accumulation.update(
            sizes.of_batches(composed.accumulation, scaled, replicas, named)
        )
        for key, choices in (
            ("hardware.xla", ("auto", False)),
            ("training.loss_over", (LossOver.example,)),
        ):
            if (given := OmegaConf.select(composed, key)) not in choices:
                names = " or ".join(
                    str(getattr(choice, "name", choice)).lower() for choice in choices
                )
                raise ConfigError(
                    key,
                    f"must be {names} with {sizes.BATCHED}=true: batches have any size",
                    given,
                )
    composed.accumulation.update(sizes.sizes_in_force(composed.accumulation, named))
    spec = _spec(composed, workers, overrides, named=named)
    gpu, here = (
        spec.config.hardware.gpu,
        spec.config.hardware.replicas * spec.workers_on_machine,
    )
    if gpu is not None and spec.config.hardware.device == Device.cpu:
        raise ConfigError("hardware.gpu", "must be null with hardware.device=cpu", gpu)
    if gpu is not None and here != (len(gpu) if isinstance(gpu, list) else 1):
        raise ConfigError(
            "hardware.gpu",
            f"must name one GPU for each of the {here} replicas here",
            gpu,
        )
    if workers is not None:
        cluster.check_open_ports(composed.hardware.open_ports)
        cluster.secret(
            composed.hardware.secret_file, environment
        )  # one that cannot be used is refused at once
    return spec


def from_text(text: str, workers: Cluster | None = None) -> RunSpec:
    """Return the spec of a `RunSpec.to_text`."""
    given = yaml.safe_load(text)
    composed = OmegaConf.merge(
        OmegaConf.structured(Config), OmegaConf.create(plain.escaped(given["resolved"]))
    )
    return replace(_spec(composed, workers), asked=given["asked"])


def comparable(spec: RunSpec) -> dict[str, Any]:
    """Return the values that all workers must have in common, by their dotted keys: without each worker's own."""
    return {
        key: value
        for key, value in plain.leaves(plain.mapped(spec.asked, mask)).items()
        if not _is_own(key)
    }


def _spec(
    composed: Any,
    workers: Cluster | None,
    given: Sequence[str] = (),
    named: Container[str] = (),
) -> RunSpec:
    """Return the spec of a config whose horizon and sizes are those in force; `given` are the overrides."""
    read, horizon = _read(composed), sizes.horizon_of(composed.training)
    accumulation, replicas = (
        read["resolved"]["accumulation"],
        composed.hardware.replicas,
    )
    if replicas > 0:  # else it is refused as it was given
        replicas *= composed.hardware.workers
    most = stages.largest(accumulation, 0)
    cut = sizes.batching(
        accumulation, replicas, named, bool(composed.dataset.get("batched")), most
    )
    asked, overrides = read["resolved"], tuple(given)
    return RunSpec(
        **read,
        asked=asked,
        overrides=overrides,
        batching=cut,
        horizon=horizon,
        workers=workers,
    )


def _read(composed: DictConfig) -> dict[str, Any]:
    return {
        "_composed": composed,
        "config": OmegaConf.to_object(composed),
        "resolved": plain.plain(composed),
    }


def _update(composed: DictConfig, values: Mapping[str, Any]) -> None:
    with open_dict(composed):
        for key, value in values.items():
            OmegaConf.update(composed, key, plain.escaped(value), merge=False)


def _is_own(key: str) -> bool:
    return key_kinds.facts_of(key).each_workers_own


def _with_secrets(given: Any, own: Any) -> Any:
    """Return `given` with the `own` value in place of each text in which a secret is masked."""
    if isinstance(given, dict):
        own = own if isinstance(own, Mapping) else {}
        return {key: _with_secrets(value, own.get(key)) for key, value in given.items()}
    if isinstance(given, list):
        own = (
            own
            if isinstance(own, list) and len(own) == len(given)
            else [None] * len(given)
        )
        return [
            _with_secrets(value, each) for value, each in zip(given, own, strict=True)
        ]
    return (
        own if isinstance(given, str) and HIDDEN in given and own is not None else given
    )

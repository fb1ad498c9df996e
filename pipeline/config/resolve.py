"""Resolves a composed config to a `RunSpec`, the specification of a run.

    composed config ─ resolve ─► RunSpec ─ `changed` ─► RunSpec ─► the run

`resolve` sets the values that follow from the command line and the environment: the
horizon, the sizes and the workers. Values that depend on the machine or the data are
set later, by functions that take a spec and return another: the micro-batch size that
fits, the place where the examples are stored, the values that a resumed run keeps. A
spec includes the config with its links, such as `${another.key}`, so that they follow a
changed value.
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf, open_dict

from pipeline.common.errors import ConfigError, count
from pipeline.common.secrets import HIDDEN, mask
from pipeline.config import (
    cluster,
    hydra_errors,
    key_kinds,
    named_nodes,
    plain,
    sequence_length,
    sizes,
    stages,
    text_keys,
    validate,
)
from pipeline.config.cluster import Cluster
from pipeline.config.overrides import keys_set
from pipeline.config.schema import Config, Device, LossOver, Rule
from pipeline.config.sizes import Batching, Horizon

FUSED_ATTENTION = "hardware.fused_attention"
XLA_LENGTHS = "hardware.xla_lengths"
XLA = "hardware.xla"


@dataclass(frozen=True)
class RunSpec:
    """The immutable specification of a run, made by `resolve`.

    Attributes:
        config: the typed config, in which the nodes of objects are plain mappings.
        original: the plain config as `resolve` set it; `changed` does not change it.
        resolved: the plain config with later changes, and with links resolved.
        overrides: the overrides on the command line.
        batching: how the first effective batch is cut.
        horizon: length of the run, in the unit of the config.
        workers: the workers of the run, or None if the run has a single worker.
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
        """Return a config group as an OmegaConf node, for `instantiate.build`."""
        # Create the node under a root, so that errors show the full key.
        return OmegaConf.create({key: plain.escaped(self.resolved[key])})[key]

    @property
    def dataset(self) -> DictConfig:
        return self.node("dataset")

    @property
    def recorded(self) -> dict[str, Any]:
        """The resolved config for the record, without secrets.

        Secrets are masked, and the path of the secret file is null.
        """
        hardware = {**self.resolved["hardware"], "secret_file": None}
        return dict(plain.mapped({**self.resolved, "hardware": hardware}, mask))

    @property
    def links(self) -> dict[str, str]:
        """The links between config keys; see `plain.links`."""
        return plain.links(self._composed)

    @property
    def searches(self) -> bool:
        """Whether the micro-batch size must still be searched for."""
        return self.config.accumulation.micro_batch_size in sizes.SEARCHED

    @property
    def times_xla(self) -> bool:
        """Whether timed updates must still decide if XLA compiles the micro-steps."""
        return bool(self.config.hardware.xla == "fastest")

    @property
    def largest(self) -> Batching:
        """The cut of the largest effective batch of the run."""
        first = self.batching.effective_batch_size
        size = stages.largest(self.resolved["accumulation"], first)
        if size == first:
            return self.batching
        return self.batching.with_effective_batch_size(size)

    @property
    def same_noise(self) -> bool:
        """Whether layers that support it draw the same noise for every cut."""
        return self.config.accumulation.same_noise is not False

    @property
    def cuts_by_tokens(self) -> bool:
        """Whether effective batches are cut by tokens, not by examples."""
        return self.batching.micro_batch_tokens is not None

    @property
    def workers_on_machine(self) -> int:
        """The number of the run's workers on this machine."""
        return 1 if self.workers is None else self.workers.on_machine

    def at_largest(self) -> RunSpec:
        """Return a spec with the largest effective batch and no batch-size schedule.

        Each replica's share of the batch is a single micro-batch. If the config has no
        schedule, the spec itself is returned.
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
        """Return a spec with some config values replaced; `batching` is not recomputed.

        Args:
            values: the new values, by dotted key.
            without: dotted keys to remove.
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
        """Return a spec with the micro-batch size that was found by a search.

        The size also replaces the value, such as `auto`, in the overrides.
        """
        spec = self._answered(sizes.MICRO, size, str(size))
        return replace(spec, batching=self.batching.with_micro_batch_size(size))

    def with_xla(self, value: bool | str) -> RunSpec:
        """Return a spec with a value of `hardware.xla` that was measured or recorded.

        The value also replaces `fastest` in the overrides.
        """
        return self._answered(XLA, value, str(value).lower())

    def _answered(self, key: str, value: Any, text: str) -> RunSpec:
        """Return a spec in which a decision replaces a config value such as `auto`.

        Args:
            key: the dotted key.
            value: the new value.
            text: the value as it is written in an override.
        """
        prefix = f"{key}="
        overrides = []
        for override in self.overrides:
            if override.lstrip("+").startswith(prefix):
                override = f"{prefix}{text}"
            overrides.append(override)
        return replace(self.changed({key: value}), overrides=tuple(overrides))

    def to_text(self) -> str:
        """Return the spec as text for a process that this one starts; see `from_text`.

        The text is YAML, since the keys of JSON cannot be integers.
        """
        configs = {"original": self.original, "resolved": self.resolved}
        return str(yaml.safe_dump(configs, sort_keys=False))

    def shared_text(self) -> str:
        """Return the spec as text for the other workers; see `adopting`.

        Secrets are masked. Keys for which each worker has its own value are left out.
        """
        shared = self.recorded
        for group, name in _own_names():
            shared[group] = {**shared[group]}
            shared[group].pop(name, None)
        return str(yaml.safe_dump(shared, sort_keys=False))

    def adopting(self, text: str) -> RunSpec:
        """Return the spec that another worker's `shared_text` describes.

        Missing values and masked secrets are taken from this worker's spec.
        """
        shared = _with_secrets(yaml.safe_load(text), self.resolved)
        # Take values whole, not by their leaves: the name of a tag may have dots.
        for group, name in _own_names():
            if name in self.resolved[group]:
                shared[group][name] = self.resolved[group][name]
        composed = OmegaConf.create(plain.escaped(shared))
        spec = _spec(_typed(composed), self.workers, self.overrides)
        return replace(spec, original=self.original)


@hydra_errors.translated()
def resolve(
    composed: DictConfig,
    overrides: Sequence[str] = (),
    environment: Mapping[str, str] = os.environ,
) -> RunSpec:
    """Check a composed config, and resolve it to a spec.

    A horizon or a size that is set by an override outranks the defaults. The outranked
    defaults become null.

    Args:
        composed: the config as Hydra composed it; it is not modified.
        overrides: the overrides on the command line.
        environment: the environment variables, which may name the workers.

    Raises:
        ConfigError: a value is wrong, or does not fit another one.
    """
    text_keys.check(composed)
    with hydra_errors.translated(overrides):
        validate.check_form(composed)
    # The jobs of a sweep that is run again have overrides that were once accepted.
    if composed.tracking.sweep is None:
        named_nodes.check_emptied(composed, overrides)
    # Merge with the strict schema: Hydra composed the config with a schema in which a
    # key for text accepts any value.
    composed = _typed(OmegaConf.to_container(composed))
    _update(composed, validate.values_in_text(composed))
    validate.check_values(composed)

    named = keys_set(overrides)
    workers = cluster.workers_of_run(composed.hardware.workers, environment)
    composed.hardware.workers = 1 if workers is None else len(workers.addresses)
    horizon = sizes.horizon_of(composed.training, named)
    for unit in sizes.HORIZONS:
        if unit != horizon.unit:
            composed.training[unit] = None
    validate.check_settings(composed)
    if composed.dataset.get("batched") and horizon.unit == "examples":
        rule = (
            f"cannot be the horizon with {sizes.BATCHED}=true, as the number of "
            "examples is not known: set training.updates"
        )
        raise ConfigError("training.examples", rule, horizon.length)

    named = _set_sizes(composed, named)
    spec = _spec(composed, workers, overrides, named)
    _check_gpus(spec)
    check_fused_attention(spec)
    _check_fastest_xla(spec)
    _check_cut_by_tokens(spec)
    sequence_length.check(spec.resolved["dataset"], spec.resolved["model"])
    if workers is not None:
        cluster.check_open_ports(composed.hardware.open_ports)
        # Reject an unusable secret now, not when the workers connect.
        cluster.secret(composed.hardware.secret_file, environment)
    return spec


def from_text(text: str, workers: Cluster | None = None) -> RunSpec:
    """Return the spec that a text from `RunSpec.to_text` describes.

    The text contains neither the workers nor the overrides: the result has `workers`,
    and no overrides.
    """
    configs = yaml.safe_load(text)
    composed = _typed(plain.escaped(configs["resolved"]))
    return replace(_spec(composed, workers), original=configs["original"])


def check_fused_attention(spec: RunSpec) -> None:
    """Reject `hardware.fused_attention=true` if another value rules it out."""
    hardware = spec.config.hardware
    if hardware.fused_attention is not True:
        return
    rule = "must be false or auto"
    if hardware.device == Device.cpu:
        raise ConfigError(FUSED_ATTENTION, f"{rule} with hardware.device=cpu", True)
    if hardware.xla is False:
        raise ConfigError(FUSED_ATTENTION, f"{rule} with hardware.xla=false", True)
    if spec.times_xla:
        raise ConfigError(FUSED_ATTENTION, f"{rule} with hardware.xla=fastest", True)
    if hardware.deterministic:
        because = (
            "with hardware.deterministic=true: one of its gradients is not "
            "deterministic"
        )
        raise ConfigError(FUSED_ATTENTION, f"{rule} {because}", True)
    if spec.dataset.get("batched"):
        because = f"with {sizes.BATCHED}=true: batches may have any size"
        raise ConfigError(FUSED_ATTENTION, f"{rule} {because}", True)
    if spec.cuts_by_tokens:
        because = f"with {sizes.TOKENS}: micro-batches have several sizes"
        raise ConfigError(FUSED_ATTENTION, f"{rule} {because}", True)


def comparable(spec: RunSpec) -> dict[str, Any]:
    """Return the config values that must be equal on all workers, by dotted key."""
    values = {}
    for key, value in plain.leaves(plain.mapped(spec.original, mask)).items():
        if not _is_own(key):
            values[key] = value
    return values


def _typed(config: Any) -> Any:
    """Convert a config, plain or a node, to a node that is typed by the schema."""
    return OmegaConf.merge(OmegaConf.structured(Config), config)


def _set_sizes(composed: DictConfig, named: set[str]) -> set[str]:
    """Set the sizes that apply, in place. Defaults that are outranked become None.

    Args:
        composed: the config.
        named: keys that the command line sets.

    Returns:
        The union of `named` and the keys that a batch-size schedule sets.

    Raises:
        ConfigError: another value does not fit the batch-size schedule or
            `dataset.batched`.
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
    """Reject values that require the batch size before the first batch is read."""
    reason = f"with {sizes.BATCHED}=true: batches may have any size"
    xla = composed.hardware.xla
    if xla not in ("auto", False):
        raise ConfigError(XLA, f"must be auto or false {reason}", xla)
    loss_over = composed.training.loss_over
    if loss_over != LossOver.example:
        rule = f"must be example {reason}"
        raise ConfigError("training.loss_over", rule, loss_over)


def _check_fastest_xla(spec: RunSpec) -> None:
    """Reject `hardware.xla=fastest` with several replicas, which cannot be timed."""
    replicas = spec.batching.replicas
    if spec.times_xla and replicas > 1:
        rule = (
            f"must be true, false or auto with {replicas} replicas: updates are timed "
            "only with one"
        )
        raise ConfigError(XLA, rule, spec.config.hardware.xla)


def _check_cut_by_tokens(spec: RunSpec) -> None:
    """Reject values that do not fit `accumulation.micro_batch_tokens`."""
    config = spec.config
    lengths = config.hardware.xla_lengths
    if not spec.cuts_by_tokens:
        if isinstance(lengths, list):
            rule = f"must be auto or null without {sizes.TOKENS}"
            raise ConfigError(XLA_LENGTHS, rule, lengths)
        return
    beside = f"with {sizes.TOKENS}"
    if config.hardware.xla not in ("auto", False) and lengths is None:
        rule = (
            f"must be auto or false {beside}, unless {XLA_LENGTHS} is auto or a list: "
            "XLA would compile once for each length"
        )
        raise ConfigError(XLA, rule, config.hardware.xla)
    if config.tracking.show is not None:
        rule = (
            f"must be null {beside}, which evaluates examples in the order of their "
            "lengths; use training.shown to log pictures and tables of your own"
        )
        raise ConfigError("tracking.show", rule, config.tracking.show)
    pad = spec.dataset.get("pad")
    if pad is not None and isinstance(lengths, list):
        multiple = pad["multiple"]
        if any(length % multiple for length in lengths):
            rule = f"must be multiples of dataset.pad.multiple, {multiple}"
            raise ConfigError(XLA_LENGTHS, rule, lengths)
    if pad is not None and pad["value"] != 0:
        rule = f"must be 0 {beside}"
        raise ConfigError("dataset.pad.value", rule, pad["value"])


def _check_gpus(spec: RunSpec) -> None:
    """Reject a `hardware.gpu` that does not name one GPU per replica on this machine.

    It is also rejected with `hardware.device=cpu`.
    """
    hardware = spec.config.hardware
    gpu = hardware.gpu
    if gpu is None:
        return
    if hardware.device == Device.cpu:
        rule = "selects GPUs, but hardware.device=cpu uses none"
        raise ConfigError("hardware.gpu", rule, gpu)

    replicas = hardware.replicas * spec.workers_on_machine
    gpus = gpu if isinstance(gpu, list) else [gpu]
    if len(gpus) != replicas:
        named = count(replicas, "GPU")
        rule = f"must name {named}, one for each replica on this machine"
        raise ConfigError("hardware.gpu", rule, gpu)


def _spec(
    composed: Any,
    workers: Cluster | None,
    overrides: Sequence[str] = (),
    named: Container[str] = (),
) -> RunSpec:
    """Return the spec of a config in which the horizon and the sizes are already set.

    Args:
        composed: the config.
        workers: the workers of the run, or None if the run has a single worker.
        overrides: the overrides on the command line.
        named: the keys that the overrides or a batch-size schedule set.
    """
    config: Any = OmegaConf.to_object(composed)
    resolved = plain.plain(composed)
    horizon = sizes.horizon_of(composed.training)
    accumulation = resolved["accumulation"]
    replicas = composed.hardware.replicas
    # Leave a wrong number of replicas as it is, so that the error shows it.
    if replicas > 0:
        replicas *= composed.hardware.workers
    batching = sizes.batching(
        accumulation,
        replicas,
        named,
        batched=bool(composed.dataset.get("batched")),
        largest=stages.largest(accumulation, 0),
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
    """Set config values, given by dotted key, in place."""
    with open_dict(composed):
        for key, value in values.items():
            OmegaConf.update(composed, key, plain.escaped(value), merge=False)


def _own_names() -> list[tuple[str, str]]:
    """Return the group and the name of each key whose value each worker keeps."""
    names = []
    for key in key_kinds.keys_where(lambda facts: facts.each_workers_own):
        group, _, name = key.partition(".")
        names.append((group, name))
    return names


def _is_own(key: str) -> bool:
    """Return whether each worker has its own value for a key."""
    return key_kinds.facts_of(key).each_workers_own


def _with_secrets(shared: Any, own: Any) -> Any:
    """Return another worker's value, with masked secrets replaced by this worker's.

    Args:
        shared: a plain value, in which secrets are masked.
        own: this worker's value at the same place; None if it has none.
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

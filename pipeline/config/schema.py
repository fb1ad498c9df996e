"""The typed schema of a run: every key with its type, and as its default what runs did before there was the key.

Hydra composes a config by these classes, and `RunSpec.config` is made of instances of them.
"""

from __future__ import annotations

from dataclasses import FrozenInstanceError, dataclass, field
from enum import Enum
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf

from pipeline.common.errors import ConfigError
from pipeline.config.lr_scaling import Rule

Device = Enum("Device", ["auto", "cpu", "gpu"])
Resume = Enum("Resume", ["auto"])
Mode = Enum("Mode", ["min", "max"])
Unreachable = Enum("Unreachable", ["refuse", "wait", "offline"])
Precision = Enum("Precision", ["float32", "float64", "mixed_bfloat16", "mixed_float16"])
Statistics = Enum("Statistics", ["effective", "micro"])
SCHEMA = 2  # of the config; pipeline.rerun.recorded_run says what older records need


class _SetOnce:
    """Frozen once it is made. With `dataclass(frozen=True)` OmegaConf would compose read-only nodes."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self):
            raise FrozenInstanceError(f"cannot assign to field {name!r}")
        super().__setattr__(name, value)


@dataclass
class ScalingConfig(_SetOnce):
    rule: Rule = Rule.none
    reference_batch_size: int = 128
    warmup: Any = 0


@dataclass
class AccumulationConfig(_SetOnce):
    effective_batch_size: int | None = None
    factor: int | None = None
    micro_batch_size: Any = None  # a number, or how it is found
    same_noise: Any = False  # a boolean or auto
    moving_statistics: Statistics = Statistics.micro


@dataclass
class KeepBestConfig(_SetOnce):
    metric: str | None = None
    mode: Mode | None = None


@dataclass
class TrainingConfig(_SetOnce):
    epochs: int | None = None
    updates: int | None = None
    examples: int | None = None
    evaluate_every: Any = "epoch"
    checkpoint_every: Any = None
    loss: Any = MISSING  # a node, null, or a mapping or list of these for the outputs
    loss_weights: Any = None
    class_weight: Any = None
    metrics: dict[str, Any] = field(default_factory=dict)  # name: node, or output: {name: node}
    weighted_metrics: dict[str, Any] = field(default_factory=dict)
    callbacks: dict[str, Any] = field(default_factory=dict)
    resume: Resume | None = None
    keep_best: KeepBestConfig | None = field(default_factory=KeepBestConfig)


@dataclass
class StartConfig(_SetOnce):
    run: str | None = None
    weights_only: bool = False


@dataclass
class HardwareConfig(_SetOnce):
    device: Device = Device.auto
    replicas: int = 1
    workers: int | None = 1
    precision: Precision = Precision.float32
    parallel_jobs: int | None = None
    gpus_per_job: int = 1
    memory: Any = None  # a number of bytes, or a text such as 8GiB
    xla: bool = False
    deterministic: bool = False


@dataclass
class TrackingConfig(_SetOnce):
    uri: str = MISSING
    experiment: str = MISSING
    run_name: str | None = None
    log_every: int = 1
    noise_every: int = 10
    log_model: bool = True
    code: list[str] | None = field(default_factory=list)
    system_metrics: bool = True
    sweep: str | None = None
    job: str | None = None
    confined: bool = False
    patience: float = 60.0
    when_unreachable: Unreachable = Unreachable.refuse


@dataclass
class TrustConfig(_SetOnce):
    allow: list[str] = field(default_factory=list)


@dataclass
class Config(_SetOnce):
    dataset: Any = MISSING
    model: Any = MISSING
    optimizer: Any = MISSING
    schedule: Any = MISSING
    scaling: ScalingConfig = field(default_factory=ScalingConfig)
    accumulation: AccumulationConfig = field(default_factory=AccumulationConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    start: StartConfig = field(default_factory=StartConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    trust: TrustConfig = field(default_factory=TrustConfig)
    seed: int = 0
    schema: int = SCHEMA


def register() -> None:
    """Make the schema and the resolvers known to Hydra. Safe to call again."""
    ConfigStore.instance().store(name="schema", node=Config)
    OmegaConf.register_new_resolver("times", _times, replace=True)


def _times(a: Any, b: Any) -> int | float:
    """Return the product of two numbers; text times a number, or digits without end, would fill the memory."""
    for factor in (a, b):
        integer = isinstance(factor, int) and not isinstance(factor, bool)
        if not (isinstance(factor, float) or (integer and abs(factor) < 2**63)):
            raise ConfigError("${times:…}", "must be given numbers", factor)
    product: int | float = a * b
    return product

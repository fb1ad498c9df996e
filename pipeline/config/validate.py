"""The checks of a composed config that no type can make; they change nothing."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf

from pipeline.common import memory_budget
from pipeline.common.errors import ConfigError
from pipeline.common.secrets import remember
from pipeline.config import objective_nodes, sizes
from pipeline.config.allow_list import check_allowed
from pipeline.config.metric_names import NAME_RULE, is_name
from pipeline.config.plain import leaves, plain
from pipeline.config.schema import SCHEMA, Config, Mode

LARGEST = 2**31 - 1  # of all counts: TensorFlow counts the examples of a batch in 32 bits
SCHEMES = ("sqlite", "http", "https", "postgresql", "mysql", "mssql")


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, float) or _is_integer(value)


Check = tuple[str, Callable[[Any], bool]]  # what a value must be, in words, and whether it is


def _or_null(check: Check) -> Check:
    words, holds = check
    return f"{words}, or null", lambda value: value is None or holds(value)


def _is_padding(value: Any) -> bool:
    return value is None or (
        isinstance(value, DictConfig)
        and set(value) == {"multiple", "value"}
        and _is_integer(value.multiple)
        and value.multiple >= 1
        and _is_number(value.value)
    )


_COUNT: Check = ("at least 1", lambda value: _is_integer(value) and value >= 1)
_POSITIVE: Check = ("a positive number", lambda value: _is_number(value) and 0 < value < math.inf)
_NOT_NEGATIVE: Check = ("a number of at least 0", lambda value: _is_number(value) and 0 <= value < math.inf)
_SHARE: Check = ("from 0 to below 1", lambda value: _is_number(value) and 0 <= value < 1)
# Keras computes with most numbers outside of these without a word: it clips nothing, or diverges.
_OF_KERAS_OPTIMIZERS = {
    **dict.fromkeys(("clipnorm", "global_clipnorm", "clipvalue"), _or_null(_POSITIVE)),
    **dict.fromkeys(("beta_1", "beta_2", "rho", "momentum", "ema_momentum"), _SHARE),
    "epsilon": _NOT_NEGATIVE,
    "weight_decay": _or_null(_NOT_NEGATIVE),
}
_REPLICAS = max(16, os.cpu_count() or 1)  # a logical device is a thread: more than these only wait for each other
_CHECKS: dict[str, Check] = {
    **dict.fromkeys(("optimizer.learning_rate", "tracking.patience"), _POSITIVE),
    **dict.fromkeys(("tracking.log_every", "tracking.noise_every"), _COUNT),
    **dict.fromkeys(("hardware.gpus_per_job", "scaling.reference_batch_size"), _COUNT),
    **dict.fromkeys(("hardware.parallel_jobs", "dataset.shuffle_buffer"), _or_null(_COUNT)),
    "training.class_weight": (
        "null, or a number of at least 0 for each class, a whole number",
        objective_nodes.are_class_weights,
    ),
    "training.loss_weights": ("null, or a number for each output", objective_nodes.are_loss_weights),
    "dataset.in_memory": ("true, false or auto", lambda value: isinstance(value, bool) or value == "auto"),
    "dataset.shuffle_files": ("true or false", lambda value: isinstance(value, bool)),
    "dataset.checksum": ("full or none", lambda value: value in ("full", "none")),
    "dataset.pad": ("null, or a multiple of at least 1 and a value: {multiple: 8, value: 0}", _is_padding),
    "training.evaluate_every": ("a positive number of updates, or 'epoch'", lambda v: v == "epoch" or _COUNT[1](v)),
    "training.checkpoint_every": (
        "a positive number of updates, 'epoch', 'auto' or null",
        lambda v: v in (None, "auto", "epoch") or _COUNT[1](v),
    ),
    "tracking.experiment": ("a name of 1 to 250 characters", lambda value: value.strip() and len(value) <= 250),
    "schema": (f"{SCHEMA}, the one of this program", lambda value: value == SCHEMA),
    "seed": ("from 0 to 4294967295", lambda value: 0 <= value < 2**32),
    "accumulation.micro_batch_size": (
        f"an integer, {' or '.join(sizes.SEARCHED)}, or null",
        lambda value: value is None or _is_integer(value) or value in sizes.SEARCHED,
    ),
    "accumulation.same_noise": ("true, false or auto", lambda value: isinstance(value, bool) or value == "auto"),
    "hardware.memory": (
        "a size such as 8GiB, or null",
        lambda value: value is None or memory_budget.parsed(value) is not None,
    ),
    "hardware.replicas": (f"at most {_REPLICAS} GPUs, or logical devices on a CPU", lambda value: value <= _REPLICAS),
}
_COUNTING = re.compile(r"(accumulation|training|hardware|scaling|tracking)\.(?!memory$)\w+|dataset\.shuffle_buffer")


def check_form(config: DictConfig) -> None:
    """Check that every key is there, and that every node that builds something names its target.

    Raises:
        ConfigError: with the key, the rule, the value received and, where they can be counted, the choices.
    """
    _check_keys(config)
    remember(config.tracking.uri)  # before anything fails to read it
    _check_targets(config)


def check_values(config: DictConfig) -> None:
    """Check each value by itself.

    Raises:
        ConfigError: as `check_form`.
    """
    _check_values(config)
    for key, value in leaves(plain(config)).items():
        if _COUNTING.fullmatch(key) and _is_integer(value) and value > LARGEST:
            raise ConfigError(key, f"must be at most {LARGEST}", value)
        if not is_name(key):
            raise ConfigError(key, f"must be a name that MLflow takes for a param: {NAME_RULE}", key)


def check_settings(config: DictConfig) -> None:
    """Check the store, the files to log, `keep_best`, `start` and `trust`.

    Raises:
        ConfigError: as `check_form`.
    """
    uri = config.tracking.uri
    if uri.partition(":")[0].lower().split("+")[0] not in SCHEMES:
        raise ConfigError("tracking.uri", "must be an MLflow tracking URI of a known scheme", uri, SCHEMES)
    for path in config.tracking.code or ():
        if not Path(path).exists():
            raise ConfigError("tracking.code", "must list files and folders that exist, or be null", path)
    _check_keep_best(config.training.keep_best)
    if config.start.weights_only and config.start.run is None:
        raise ConfigError("start.weights_only", "must come with start.run, whose weights are meant", True)
    check_allowed(config.trust.allow)


def _check_keys(config: DictConfig) -> None:
    """Refuse keys that `+` added to the schema, keys that `~` deleted from it, and keys without a value."""
    given: Any = OmegaConf.to_container(config)
    there = leaves(given)
    # The merge raises for a key that the schema lacks, and brings back one that was deleted.
    for key, value in leaves(OmegaConf.to_container(OmegaConf.merge(Config, given))).items():
        if value == MISSING or key not in there:
            raise ConfigError(key, "must be given")


def _check_targets(config: DictConfig) -> None:
    nodes = {key: config[key] for key in ("dataset", "model", "optimizer", "schedule")}
    nodes |= {key: node for key, node in objective_nodes.by_output(config.training.loss) if node is not None}
    metrics = [
        metric
        for group in objective_nodes.METRIC_GROUPS
        for metric in objective_nodes.metrics_of(config.training, group)
    ]
    nodes |= {metric.key: metric.node for metric in metrics}
    nodes |= {f"training.callbacks.{name}": node for name, node in config.training.callbacks.items()}
    if OmegaConf.select(config, "dataset.augment") is not None:
        nodes["dataset.augment"] = config.dataset.augment
    for key, node in nodes.items():
        target = node.get("_target_") if isinstance(node, DictConfig) else node
        if not (isinstance(node, DictConfig) and isinstance(target, str)):
            raise ConfigError(f"{key}._target_", "must be the dotted name of what builds it", target)
    objective_nodes.check_names(metrics)


def _check_keep_best(best: DictConfig | None) -> None:
    """Refuse a metric that no evaluation could return, and one without its mode."""
    if best is None or (best.metric is None and best.mode is None):
        return
    if best.metric is None or not best.metric.startswith("val/"):
        rule = "must be a metric of the validation split, such as val/loss or val/accuracy"
        raise ConfigError("training.keep_best.metric", rule, best.metric)
    if best.mode is None:
        raise ConfigError("training.keep_best.mode", f"must say which {best.metric} is best", None, Mode.__members__)


def _check_values(config: DictConfig) -> None:
    """Check the values that are given; of an optimizer that is not of Keras only the learning rate is known."""
    of_keras = config.optimizer._target_.startswith("keras.")
    of_optimizer = {f"optimizer.{name}": check for name, check in _OF_KERAS_OPTIMIZERS.items() if of_keras}
    for key, (words, holds) in {**of_optimizer, **_CHECKS}.items():
        value = OmegaConf.select(config, key, default=MISSING)
        if value != MISSING and not holds(value):
            shown = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
            raise ConfigError(key, f"must be {words}", shown)

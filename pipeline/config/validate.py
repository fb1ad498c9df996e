"""The checks of a composed config that no type can make; they change nothing."""

import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf

from pipeline.common import memory_budget, secrets
from pipeline.common.errors import ConfigError
from pipeline.config import allow_list, metric_names, schema, sizes
from pipeline.config.objective_nodes import (
    METRIC_GROUPS,
    by_output,
    check_names,
    metrics_of,
)
from pipeline.config.plain import leaves, plain

LARGEST = (
    2**31 - 1
)  # of all counts: TensorFlow counts the examples of a batch in 32 bits
SCHEMES = ("sqlite", "http", "https", "postgresql", "mysql", "mssql")


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, float) or _is_integer(value)


Check = tuple[
    str, Callable[[Any], bool]
]  # what a value must be, in words, and whether it is


def _or_null(check: Check) -> Check:
    words, holds = check
    return f"{words}, or null", lambda value: value is None or holds(value)


def _is_part_of_epoch(value: object) -> bool:
    return re.fullmatch(r"epoch/[1-9]\d{0,3}", str(value)) is not None


def _is_null_or(node: Any, /, **holds: Callable[[Any], bool]) -> bool:
    """Return whether a node is null, or has these keys alone, each with a value that holds."""
    has_keys = isinstance(node, DictConfig) and set(node) == {*holds}
    return node is None or (
        has_keys and all(check(node[key]) for key, check in holds.items())
    )


def _are_class_weights(node: Any) -> bool:
    labelled = (
        isinstance(node, Mapping)
        and len(node) > 0
        and all(_is_integer(key) and key >= 0 for key in node)
    )
    return node is None or (labelled and all(map(_NOT_NEGATIVE[1], node.values())))


def _are_indices(node: Any) -> bool:
    indices = [*node] if isinstance(node, ListConfig) else [node]
    return len(indices) == len(set(indices)) > 0 and all(
        _is_integer(index) and index >= 0 for index in indices
    )


_COUNT: Check = ("at least 1", lambda value: _is_integer(value) and value >= 1)
_POSITIVE: Check = (
    "a positive number",
    lambda value: _is_number(value) and 0 < value < math.inf,
)
_NOT_NEGATIVE: Check = (
    "a number of at least 0",
    lambda value: _is_number(value) and 0 <= value < math.inf,
)
_SHARE: Check = (
    "from 0 to below 1",
    lambda value: _is_number(value) and 0 <= value < 1,
)
_SIZE: Check = (
    "a size such as 8GiB",
    lambda value: memory_budget.parsed(value) is not None,
)
_SWITCH: Check = (
    "true, false or auto",
    lambda value: isinstance(value, bool) or value == "auto",
)
_FLAG: Check = (
    "true or false",
    lambda value: isinstance(value, bool),
)  # OmegaConf takes any number for one
# Keras computes with most numbers outside of these without a word: it clips nothing, or diverges.
_OF_KERAS_OPTIMIZERS = {
    **dict.fromkeys(("clipnorm", "global_clipnorm", "clipvalue"), _or_null(_POSITIVE)),
    **dict.fromkeys(("beta_1", "beta_2", "rho", "momentum", "ema_momentum"), _SHARE),
    "epsilon": _NOT_NEGATIVE,
    "weight_decay": _or_null(_NOT_NEGATIVE),
}
_REPLICAS = max(
    16, os.cpu_count() or 1
)  # a logical device is a thread: more than these only wait for each other
_CHECKS: dict[str, Check] = {
    **dict.fromkeys(
        ("optimizer.learning_rate", "schedule.decay_rate", "tracking.patience"),
        _POSITIVE,
    ),
    **dict.fromkeys(("tracking.log_every", "accumulation.noise_scale_every"), _COUNT),
    **dict.fromkeys(
        (
            "hardware.gpus_per_job",
            "hardware.jobs_per_gpu",
            "scaling.reference_batch_size",
        ),
        _COUNT,
    ),
    **dict.fromkeys(
        ("hardware.parallel_jobs", "dataset.shuffle_buffer", "scaling.peak_batch_size"),
        _or_null(_COUNT),
    ),
    "scaling.rate": ("sqrt or null", lambda value: value in ("sqrt", None)),
    "training.class_weight": (
        "null, or a number of at least 0 for each class, a whole number",
        _are_class_weights,
    ),
    "training.loss_weights": (
        "null, or a number for each output",
        lambda node: all(
            v is None or (_is_number(v) and math.isfinite(v))
            for _, v in by_output(node)
        ),
    ),
    **dict.fromkeys(
        ("dataset.in_memory", "accumulation.same_noise", "hardware.xla"), _SWITCH
    ),
    **dict.fromkeys(
        (
            "dataset.shuffle_files",
            "dataset.batched",
            "hardware.deterministic",
            "hardware.tf32",
        ),
        _FLAG,
    ),
    **dict.fromkeys(
        (
            "tracking.log_model",
            "tracking.system_metrics",
            "start.weights_only",
            "scaling.ema",
        ),
        _FLAG,
    ),
    "schedule.clock": (
        "updates or examples",
        lambda value: value in ("updates", "examples"),
    ),
    "dataset.checksum": ("full or none", lambda value: value in ("full", "none")),
    "dataset.pad": (
        "null, or a multiple of at least 1 and a value: {multiple: 8, value: 0}",
        lambda pad: _is_null_or(pad, multiple=_COUNT[1], value=_is_number),
    ),
    "training.evaluate_every": (
        "a positive number of updates, 'epoch', or a part of it such as 'epoch/4'",
        lambda v: v == "epoch" or _is_part_of_epoch(v) or _COUNT[1](v),
    ),
    "training.checkpoint_every": (
        "a positive number of updates, 'epoch', 'auto' or null",
        lambda v: v in (None, "auto", "epoch") or _COUNT[1](v),
    ),
    "tracking.experiment": (
        "a name of 1 to 250 characters",
        lambda value: value.strip() and len(value) <= 250,
    ),
    "schema": (
        f"{schema.SCHEMA}, the one of this program",
        lambda value: value == schema.SCHEMA,
    ),
    "seed": ("from 0 to 4294967295", lambda value: 0 <= value < 2**32),
    "accumulation.micro_batch_size": _or_null(
        (
            f"an integer, {' or '.join(sizes.SEARCHED)}",
            lambda value: _is_integer(value) or value in sizes.SEARCHED,
        )
    ),
    **dict.fromkeys(("hardware.memory", "hardware.gpu_memory"), _or_null(_SIZE)),
    "hardware.gpu": _or_null(
        ("the index of a GPU from 0 on, or a list of different ones", _are_indices)
    ),
    "hardware.profile": (
        "null, or the first update and how many: {start: 10, updates: 5}",
        lambda profile: _is_null_or(profile, start=_COUNT[1], updates=_COUNT[1]),
    ),
    "hardware.replicas": (
        f"at most {_REPLICAS} GPUs, or logical devices on a CPU",
        lambda value: value <= _REPLICAS,
    ),
}
_COUNTING = re.compile(
    r"(accumulation|training|hardware|scaling|tracking)\.(?!\w*memory$)\w+|dataset\.shuffle_buffer"
)


def check_form(config: DictConfig) -> None:
    """Refuse keys that `+` added to the schema, that `~` deleted or that have no value, and nodes without a target."""
    given: Any = OmegaConf.to_container(config)
    there = leaves(given)
    # The merge raises for a key that the schema lacks, and brings back one that was deleted.
    for key, value in leaves(
        OmegaConf.to_container(OmegaConf.merge(schema.Config, given))
    ).items():
        if value == MISSING or key not in there:
            raise ConfigError(key, "must be given")
    secrets.remember(config.tracking.uri)  # before anything fails to read it
    _check_targets(config)


def check_values(config: DictConfig) -> None:
    """Check each value by itself; of an optimizer that is not of Keras only the learning rate is known."""
    of_keras = config.optimizer._target_.startswith("keras.")
    of_optimizer = {
        f"optimizer.{name}": check
        for name, check in _OF_KERAS_OPTIMIZERS.items()
        if of_keras
    }
    for key, (words, holds) in {**of_optimizer, **_CHECKS}.items():
        value = OmegaConf.select(config, key, default=MISSING)
        if value != MISSING and not holds(value):
            shown = (
                OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
            )
            raise ConfigError(key, f"must be {words}", shown)
    for key, value in leaves(plain(config)).items():
        if _COUNTING.fullmatch(key) and _is_integer(value) and value > LARGEST:
            raise ConfigError(key, f"must be at most {LARGEST}", value)
        if not metric_names.is_name(key):
            raise ConfigError(
                key,
                f"must be a name that MLflow takes for a param: {metric_names.NAME_RULE}",
                key,
            )


def check_settings(config: DictConfig) -> None:
    """Check the store, the files to log, `keep_best`, `start` and `trust`."""
    uri = config.tracking.uri
    if uri.partition(":")[0].lower().split("+")[0] not in SCHEMES:
        raise ConfigError(
            "tracking.uri",
            "must be an MLflow tracking URI of a known scheme",
            uri,
            SCHEMES,
        )
    path = uri.removeprefix("sqlite:///").partition("?")[0]
    if uri.startswith("sqlite") and (
        path.startswith(("sqlite", ":", "file:")) or path.endswith("/") or not path
    ):
        raise ConfigError("tracking.uri", "must name a file: sqlite:///PATH", uri)
    for path in config.tracking.code or ():
        if not Path(path).exists():
            raise ConfigError(
                "tracking.code",
                "must list files and folders that exist, or be null",
                path,
            )
    best = config.training.keep_best
    if best is not None and (best.metric, best.mode) != (None, None):
        if best.metric is None or not best.metric.startswith("val/"):
            rule = "must be a metric of the validation split, such as val/loss or val/accuracy"
            raise ConfigError("training.keep_best.metric", rule, best.metric)
        if best.mode is None:
            rule = f"must say which {best.metric} is best"
            raise ConfigError(
                "training.keep_best.mode", rule, None, schema.Mode.__members__
            )
    if config.start.weights_only and config.start.run is None:
        raise ConfigError(
            "start.weights_only",
            "must come with start.run, whose weights are meant",
            True,
        )
    allow_list.check_allowed(config.trust.allow)


def _check_targets(config: DictConfig) -> None:
    nodes = {key: config[key] for key in ("dataset", "model", "optimizer", "schedule")}
    nodes |= {
        key: node for key, node in by_output(config.training.loss) if node is not None
    }
    metrics = [
        metric
        for group in METRIC_GROUPS
        for metric in metrics_of(config.training, group)
    ]
    nodes |= {metric.key: metric.node for metric in metrics}
    nodes |= {
        f"training.callbacks.{name}": node
        for name, node in config.training.callbacks.items()
    }
    if OmegaConf.select(config, "dataset.augment") is not None:
        nodes["dataset.augment"] = config.dataset.augment
    for key, node in nodes.items():
        target = node.get("_target_") if isinstance(node, DictConfig) else node
        if not (isinstance(node, DictConfig) and isinstance(target, str)):
            raise ConfigError(
                f"{key}._target_", "must be the dotted name of what builds it", target
            )
    check_names(metrics)

"""Checks of a composed config that go beyond types; they do not modify the config."""

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf

from pipeline.common import memory_budget, secrets, sqlite_uri
from pipeline.common.errors import ConfigError
from pipeline.common.signals import STOP_TAG
from pipeline.config import (
    metric_names,
    schema,
    sizes,
    text_keys,
    trust_entries,
    validation_sets,
)
from pipeline.config.model_uris import MODEL, MODEL_NAME
from pipeline.config.objective_nodes import (
    METRIC_GROUPS,
    by_output,
    check_names,
    metrics_of,
)
from pipeline.config.plain import leaves, plain
from pipeline.config.sizes import LARGEST

SCHEMES = ("sqlite", "http", "https", "postgresql", "mysql", "mssql")
# Maximum number of replicas. On a CPU, each replica is a logical device with one
# thread, and more threads than cores would only wait for each other.
_MOST_REPLICAS = max(16, os.cpu_count() or 1)
# Matches keys whose value is a count if it is an integer. Memory sizes are not counts.
_COUNTED = re.compile(
    r"(accumulation|training|hardware|scaling|tracking)\.(?!\w*memory$)\w+"
    r"|dataset\.shuffle_buffer|dataset\.pad\.multiple|hardware\.profile\.\w+"
    r"|dataset\.validations\.\w+\.every"
)
_MOST_EXAMPLES = 64  # maximum of `tracking.show.examples`
_MOST_XLA_LENGTHS = 32  # as in `accumulation`, which is not imported here
# Names of what `tracking.show` logs.
_SHOWN_BY_US = ("examples", "fixed", "worst", "confusion", "reliability")
# Beginnings of the names of Keras' optimizers.
_KERAS = ("keras.", "tensorflow.keras.")


@dataclass(frozen=True)
class Check:
    """A rule that a config value must follow.

    Attributes:
        rule: the rule in words, to follow `must be` in an error.
        holds: returns whether a value follows the rule.
    """

    rule: str
    holds: Callable[[Any], bool]

    def or_null(self) -> "Check":
        """Return a check that also accepts null."""
        return Check(
            f"{self.rule}, or null", lambda value: value is None or self.holds(value)
        )


def check_form(config: DictConfig) -> None:
    """Check that the config has exactly the keys of the schema, each with a value.

    The node of an object must also have a `_target_`.
    """
    composed: Any = OmegaConf.to_container(config)
    keys = leaves(composed)
    # The merge raises for a key that the schema lacks, and restores a deleted key.
    merged = OmegaConf.to_container(OmegaConf.merge(schema.Config, composed))
    for key, value in leaves(merged).items():
        if value == MISSING or key not in keys:
            raise ConfigError(key, "must be given")
    # Register the secrets of the URI first, as a later error could show the URI.
    secrets.remember(config.tracking.uri)
    _check_targets(config)


def values_in_text(config: DictConfig) -> dict[str, int | bool]:
    """Return the counts and flags that the config has as text, by dotted key.

    The value of an environment variable, as in `${oc.env:EVERY}`, is always text.
    """
    values: dict[str, int | bool] = {}
    for key in leaves(OmegaConf.to_container(config)):
        is_counted = key not in text_keys.TYPES and _COUNTED.fullmatch(key)
        is_flag = _CHECKS.get(key) in (_FLAG, _SWITCH, _XLA)
        if not is_counted and not is_flag:
            continue
        # Resolve the links of these keys only: others are reported by their checks.
        value = OmegaConf.select(config, key)
        if not isinstance(value, str):
            continue
        if is_counted and re.fullmatch(r"\d{1,20}", value, re.ASCII):
            values[key] = int(value)
        elif is_flag and value in ("true", "false"):
            values[key] = value == "true"
    return values


def check_values(config: DictConfig) -> None:
    """Check each value independently of the others.

    The optimizer's arguments other than the learning rate are checked only if the
    optimizer is from Keras.
    """
    checks: dict[str, Check] = {}
    if config.optimizer._target_.startswith(_KERAS):
        checks |= _KERAS_OPTIMIZER_CHECKS
    checks |= _CHECKS
    for key, check in checks.items():
        value = OmegaConf.select(config, key, default=MISSING)
        if value != MISSING and not check.holds(value):
            if OmegaConf.is_config(value):
                value = OmegaConf.to_container(value)
            raise ConfigError(key, f"must be {check.rule}", value)

    for key, value in leaves(plain(config)).items():
        if _COUNTED.fullmatch(key):
            entries = [value]
            if isinstance(value, list):
                entries = value
            for entry in entries:
                if _is_integer(entry) and entry > LARGEST:
                    raise ConfigError(key, f"must be at most {LARGEST}", entry)
        if not metric_names.is_name(key):
            rule = (
                "must be a name that MLflow accepts for a param: "
                f"{metric_names.NAME_RULE}"
            )
            raise ConfigError(key, rule, key)


def check_settings(config: DictConfig) -> None:
    """Check the store, files to log, `keep_best`, `validations`, `start`, `trust`."""
    _check_store(config.tracking.uri)
    if STOP_TAG in config.tracking.tags:
        rule = "must be left out: this tag ends the run that has it"
        value = config.tracking.tags[STOP_TAG]
        raise ConfigError(f"tracking.tags.{STOP_TAG}", rule, value)
    for path in config.tracking.code or ():
        if not Path(path).exists():
            rule = "must list files and folders that exist, or be null"
            raise ConfigError("tracking.code", rule, path)
    _check_register(config.tracking)
    _check_keep_best(config.training.keep_best)
    _check_names_of_shown(config.training.shown)
    _check_validations(config)
    is_model = MODEL.fullmatch(str(config.start.run)) is not None
    if is_model and not config.start.weights_only:
        rule = "must be true if start.run is a model, which has no optimizer"
        raise ConfigError("start.weights_only", rule, config.start.weights_only)
    if is_model and config.hardware.workers != 1:
        rule = "must be a run directory if there are several workers"
        raise ConfigError("start.run", rule, config.start.run)
    if config.start.weights_only and config.start.run is None:
        rule = "must come with start.run, which provides the weights"
        raise ConfigError("start.weights_only", rule, True)
    trust_entries.check_allowed(config.trust.allow)


def _check_register(tracking: Any) -> None:
    """Check that the name is one of MLflow's registry, and that a model is logged."""
    name = tracking.register
    if name is None:
        return
    if not MODEL_NAME.fullmatch(name):
        rule = "must consist of up to 100 letters, digits, _, - and ."
        raise ConfigError("tracking.register", rule, name)
    if not tracking.log_model:
        rule = (
            "must be null with tracking.log_model=false: there is no model to register"
        )
        raise ConfigError("tracking.register", rule, name)


def _check_store(uri: str) -> None:
    """Reject a tracking URI with an unknown scheme, or of a server without a host.

    Also reject an SQLite URI that does not name a file, or that would be misread.
    """
    scheme = uri.partition(":")[0].lower().split("+")[0]
    if scheme not in SCHEMES:
        rule = "must be an MLflow tracking URI of a known scheme"
        raise ConfigError("tracking.uri", rule, uri, SCHEMES)
    if scheme != "sqlite":
        _check_address(uri, scheme)
        return

    path = sqlite_uri.path_in(uri)
    # If the URI does not begin with `sqlite:///` in lower case, the path is all of it.
    names_no_file = path.lower().startswith(("sqlite", ":", "file:"))
    if names_no_file or not path or path.endswith("/"):
        raise ConfigError("tracking.uri", "must name a file: sqlite:///PATH", uri)
    rule = sqlite_uri.misread(uri)
    if rule:
        raise ConfigError("tracking.uri", rule, uri)
    options = uri.partition("?")[2]
    if options and not re.fullmatch(r"\w+=[^&/]*(&\w+=[^&/]*)*", options):
        rule = "must have no ? in its path; options follow the path: ?timeout=30"
        raise ConfigError("tracking.uri", rule, uri)


def _check_address(uri: str, scheme: str) -> None:
    """Reject the URI of a server that is not an address, such as `http:`."""
    has_address = "://" in uri
    if scheme in ("http", "https"):
        try:
            address = urlsplit(uri)
            has_address = bool(address.hostname) and address.port != 0
        except ValueError:  # the port is not a number below 65536
            has_address = False
    if not has_address:
        rule = f"must have the form {scheme}://HOST:PORT"
        if "@" in uri:
            rule += ", with special characters in a password percent-encoded"
        raise ConfigError("tracking.uri", rule, uri)


def _check_keep_best(keep_best: Any) -> None:
    """Check that the metric is one of the validation split, and that a mode is given."""
    if keep_best is None:
        return
    metric = keep_best.metric
    mode = keep_best.mode
    if metric is None and mode is None:
        return
    if metric is None or not metric.startswith("val/"):
        rule = (
            "must be a metric of the validation split, such as val/loss or val/accuracy"
        )
        raise ConfigError("training.keep_best.metric", rule, metric)
    if mode is None:
        modes = schema.Mode.__members__
        rule = f"must say whether the smallest or the largest {metric} is best"
        meant = ""
        if metric.endswith("loss"):
            meant = "min"
        elif metric.endswith("accuracy"):
            meant = "max"
        raise ConfigError("training.keep_best.mode", rule, None, modes, meant=meant)


def _check_names_of_shown(functions: Mapping[str, Any]) -> None:
    """Check that each name of `training.shown` can be a part of a file's name."""
    for name in functions:
        is_file_name = re.fullmatch(r"[A-Za-z0-9_][\w\-. ]{0,59}", str(name), re.ASCII)
        if not is_file_name or name in _SHOWN_BY_US:
            rule = (
                "must have names of up to 60 letters, digits, _, -, . and blanks, "
                f"other than {', '.join(_SHOWN_BY_US)}"
            )
            raise ConfigError("training.shown", rule, name)


def _check_validations(config: DictConfig) -> None:
    """Check the form, the names and the intervals of `dataset.validations`."""
    dataset: Any = OmegaConf.to_container(config.dataset, resolve=True)
    sets = validation_sets.parse(dataset.get("validations"))
    metrics = []
    for group in METRIC_GROUPS:
        for metric in metrics_of(config.training, group):
            metrics.append(metric.full_name)
    validation_sets.check_names(sets, metrics)
    for validation_set in sets:
        every = validation_set.every
        if every is not None and not _EVALUATION_INTERVAL.holds(every):
            rule = f"must be {_EVALUATION_INTERVAL.rule}"
            raise ConfigError(f"{validation_set.key}.every", rule, every)
        validation_sets.check_node(validation_set, dataset)


def _check_targets(config: DictConfig) -> None:
    """Check that each object's node has a `_target_`, and each metric a valid name."""
    nodes = {key: config[key] for key in ("dataset", "model", "optimizer", "schedule")}
    for key, node in by_output(config.training.loss):
        if node is not None:
            nodes[key] = node
    metrics = []
    for group in METRIC_GROUPS:
        metrics += metrics_of(config.training, group)
    for metric in metrics:
        nodes[metric.key] = metric.node
    for group in ("callbacks", "shown"):
        for name, node in config.training[group].items():
            nodes[f"training.{group}.{name}"] = node
    if OmegaConf.select(config, "dataset.augment") is not None:
        nodes["dataset.augment"] = config.dataset.augment

    for key, node in nodes.items():
        target = node
        if isinstance(node, DictConfig):
            target = None
            if "_target_" in node:
                # Unlike `get`, an index names the key if the value is a wrong link.
                target = node["_target_"]
        if not isinstance(node, DictConfig) or not isinstance(target, str):
            rule = "must be the dotted name of the code that builds the object"
            raise ConfigError(f"{key}._target_", rule, target)
    check_names(metrics)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, float) or _is_integer(value)


def _is_bool(value: object) -> bool:
    # Check the type exactly, as OmegaConf would accept any number as a Boolean.
    return isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_integer(value) and value >= 1


def _is_index(value: Any) -> bool:
    return _is_integer(value) and value >= 0


def _is_part_of_epoch(value: object) -> bool:
    return re.fullmatch(r"epoch/[1-9]\d{0,3}", str(value)) is not None


def _is_evaluation_interval(value: object) -> bool:
    return value == "epoch" or _is_part_of_epoch(value) or _is_count(value)


def _is_positive(value: Any) -> bool:
    return _is_number(value) and 0 < value < math.inf


def _is_not_negative(value: Any) -> bool:
    return _is_number(value) and 0 <= value < math.inf


def _are_indices(node: Any) -> bool:
    """Return whether a node is an index, or a list of distinct indices."""
    indices: Any = [node]
    if isinstance(node, ListConfig):
        # Unlike iteration, this names the entry if its value is a wrong link.
        indices = OmegaConf.to_container(node, resolve=True)
    if not indices or len(set(indices)) < len(indices):
        return False
    return all(_is_index(index) for index in indices)


def _are_patterns(node: Any) -> bool:
    """Return whether a node is a list of regular expressions that are not empty."""
    if not isinstance(node, ListConfig):
        return False
    patterns: Any = OmegaConf.to_container(node, resolve=True)
    for pattern in patterns:
        if not isinstance(pattern, str) or not pattern:
            return False
        try:
            re.compile(pattern)
        except re.error:
            return False
    return True


def _are_lengths(node: Any) -> bool:
    """Return whether a node is null, a length with its parts, or a list of these."""
    if node is None:
        return True
    entries: Any = [node]
    if isinstance(node, ListConfig):
        entries = node
    if not entries or not all(isinstance(entry, DictConfig) for entry in entries):
        return False
    return all(
        _is_null_or_has(entry, length=_is_name_or_node, parts=_are_names)
        for entry in entries
    )


def _is_name_or_node(value: Any) -> bool:
    target = value
    if isinstance(value, DictConfig):
        target = value.get("_target_")
    return isinstance(target, str)


def _are_names(node: Any) -> bool:
    """Return whether a node is a list of texts."""
    if not isinstance(node, ListConfig) or not node:
        return False
    return all(isinstance(name, str) for name in node)


def _are_class_weights(node: Any) -> bool:
    """Return whether a node is null, or maps class indices to weights of at least 0."""
    if node is None:
        return True
    if not isinstance(node, Mapping) or not node:
        return False
    classes_are_indices = all(_is_index(label) for label in node)
    return classes_are_indices and all(map(_is_not_negative, node.values()))


def _are_loss_weights(node: Any) -> bool:
    """Return whether a node has a finite number or null for each output."""
    for _, weight in by_output(node):
        if weight is not None and not (_is_number(weight) and math.isfinite(weight)):
            return False
    return True


def _is_null_or_has(node: Any, /, **holds: Callable[[Any], bool]) -> bool:
    """Return whether a node is null, or has exactly these keys with valid values.

    Args:
        node: the value of the key.
        holds: for each key, a function that returns whether the value is valid.
    """
    if node is None:
        return True
    if not isinstance(node, DictConfig) or set(node) != set(holds):
        return False
    return all(is_right(node[name]) for name, is_right in holds.items())


def _is_null_or_shows(node: Any) -> bool:
    """Return whether a node is null, or a mapping with keys of `tracking.show`."""
    if node is None:
        return True
    if not isinstance(node, DictConfig):
        return False
    checks = {
        "examples": lambda value: _is_index(value) and value <= _MOST_EXAMPLES,
        "confusion": _is_bool,
        "reliability": _is_bool,
    }
    return all(name in checks and checks[name](node[name]) for name in node)


def _are_xla_lengths(value: Any) -> bool:
    if value in ("auto", None):
        return True
    if not isinstance(value, ListConfig) or not all(map(_is_count, value)):
        return False
    is_increasing = list(value) == sorted(set(value))
    return 1 <= len(value) <= _MOST_XLA_LENGTHS and is_increasing


_COUNT = Check("at least 1", _is_count)
_POSITIVE = Check("a positive number", _is_positive)
_NOT_NEGATIVE = Check("a number of at least 0", _is_not_negative)
_SHARE = Check(
    "at least 0 and below 1", lambda value: _is_number(value) and 0 <= value < 1
)
_SIZE = Check(
    "a size such as 8GiB", lambda value: memory_budget.parsed(value) is not None
)
_SWITCH = Check("true, false or auto", lambda value: _is_bool(value) or value == "auto")
_XLA = Check(
    "true, false, auto or fastest",
    lambda value: _is_bool(value) or value in ("auto", "fastest"),
)
_LENGTHS = Check(
    f"auto, null, or a list of at most {_MOST_XLA_LENGTHS} increasing whole numbers of "
    "at least 1",
    _are_xla_lengths,
)
_FLAG = Check("true or false", _is_bool)
_EVALUATION_INTERVAL = Check(
    "a positive number of updates, 'epoch', or a part of it such as 'epoch/4'",
    _is_evaluation_interval,
)
_PATTERNS = Check(
    "a list of regular expressions for paths of variables, such as [bias, norm]",
    _are_patterns,
)

# Other values are rejected, as Keras mostly accepts them without a warning, and then
# does not clip, or diverges.
_KERAS_OPTIMIZER_CHECKS = {
    "optimizer.clipnorm": _POSITIVE.or_null(),
    "optimizer.global_clipnorm": _POSITIVE.or_null(),
    "optimizer.clipvalue": _POSITIVE.or_null(),
    "optimizer.beta_1": _SHARE,
    "optimizer.beta_2": _SHARE,
    "optimizer.rho": _SHARE,
    "optimizer.momentum": _SHARE,
    "optimizer.ema_momentum": _SHARE,
    "optimizer.epsilon": _NOT_NEGATIVE,
    "optimizer.weight_decay": _NOT_NEGATIVE.or_null(),
    "optimizer.adam_beta_1": _SHARE,
    "optimizer.adam_beta_2": _SHARE,
    "optimizer.adam_lr_ratio": _NOT_NEGATIVE,
    "optimizer.adam_weight_decay": _NOT_NEGATIVE.or_null(),
    "optimizer.ns_steps": _COUNT,
    "optimizer.rms_rate": _POSITIVE.or_null(),
    "optimizer.exclude_layers": _PATTERNS.or_null(),
    "optimizer.epsilon_1": _NOT_NEGATIVE,
    "optimizer.epsilon_2": _NOT_NEGATIVE,
    "optimizer.clip_threshold": _POSITIVE,
}
# The checks are made in this order, and the first that fails is reported.
_CHECKS = {
    "optimizer.learning_rate": _POSITIVE,
    "optimizer.exclude_from_decay": _PATTERNS,
    "schedule.decay_rate": _POSITIVE,
    "tracking.patience": _POSITIVE,
    "tracking.log_every": _COUNT,
    "accumulation.noise_scale_every": _COUNT,
    "hardware.gpus_per_job": _COUNT,
    "hardware.jobs_per_gpu": _COUNT,
    "scaling.reference_batch_size": _COUNT,
    "hardware.parallel_jobs": _COUNT.or_null(),
    "dataset.shuffle_buffer": _COUNT.or_null(),
    "scaling.peak_batch_size": _COUNT.or_null(),
    "scaling.rate": Check("sqrt or null", lambda value: value in ("sqrt", None)),
    "training.class_weight": Check(
        "null, or a number of at least 0 for each class; classes are whole numbers",
        _are_class_weights,
    ),
    "training.loss_weights": Check(
        "null, or a number for each output", _are_loss_weights
    ),
    "dataset.in_memory": _SWITCH,
    "accumulation.same_noise": _SWITCH,
    "hardware.xla": _XLA,
    "hardware.xla_lengths": _LENGTHS,
    "hardware.fused_attention": _SWITCH,
    "dataset.shuffle_files": _FLAG,
    "dataset.batched": _FLAG,
    "hardware.deterministic": _FLAG,
    "hardware.open_ports": _FLAG,
    "hardware.tf32": _FLAG,
    "tracking.confined": _FLAG,
    "tracking.log_model": _FLAG,
    "tracking.system_metrics": _FLAG,
    "start.weights_only": _FLAG,
    "scaling.ema": _FLAG,
    "schedule.clock": Check(
        "updates or examples", lambda value: value in ("updates", "examples")
    ),
    "dataset.checksum": Check("full or none", lambda value: value in ("full", "none")),
    "dataset.pad": Check(
        "null, or a multiple of at least 1 and a value: {multiple: 8, value: 0}",
        lambda pad: _is_null_or_has(pad, multiple=_is_count, value=_is_number),
    ),
    "dataset.lengths": Check(
        "null, or a length and the parts of an example that have it: {length: "
        "x.length, parts: [x.tokens, y]}, or a list of these",
        _are_lengths,
    ),
    "training.evaluate_every": _EVALUATION_INTERVAL,
    "training.accept_changed_code": _FLAG,
    "training.evaluate_at_start": _FLAG,
    "training.checkpoint_every": Check(
        "a positive number of updates, 'epoch', 'auto' or null",
        lambda value: value in (None, "auto", "epoch") or _is_count(value),
    ),
    "tracking.experiment": Check(
        "a name of 1 to 250 characters",
        lambda value: bool(value.strip()) and len(value) <= 250,
    ),
    "schema": Check(
        f"{schema.SCHEMA}, the schema version of this program",
        lambda value: value == schema.SCHEMA,
    ),
    "seed": Check("from 0 to 4294967295", lambda value: 0 <= value < 2**32),
    "accumulation.micro_batch_size": Check(
        f"an integer, {' or '.join(sizes.SEARCHED)}",
        lambda value: _is_integer(value) or value in sizes.SEARCHED,
    ).or_null(),
    "accumulation.micro_batch_tokens": _COUNT.or_null(),
    "hardware.memory": _SIZE.or_null(),
    "hardware.gpu_memory": _SIZE.or_null(),
    "hardware.gpu": Check(
        "the index of a GPU, counted from 0, or a list of distinct indices",
        _are_indices,
    ).or_null(),
    "hardware.profile": Check(
        "null, or the first update and the number of updates: {start: 10, updates: 5}",
        lambda profile: _is_null_or_has(profile, start=_is_count, updates=_is_count),
    ),
    "tracking.show": Check(
        "null, or any of {examples: 16, confusion: true, reliability: true}, with at "
        f"most {_MOST_EXAMPLES} examples",
        _is_null_or_shows,
    ),
    "hardware.replicas": Check(
        f"at most {_MOST_REPLICAS} GPUs, or logical devices on a CPU",
        lambda value: value <= _MOST_REPLICAS,
    ),
}

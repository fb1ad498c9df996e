"""What `compile` and `fit` take for each output of a model, by its name: losses, metrics, labels and weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import keras

from .keras_internals import mask_of
from .weighting import Nest

# One `keras.losses.Loss` for every output, or a dict or list of one for each, None for an output without; None for
# a model that learns from `add_loss` alone.
Losses = Any
Metrics = Sequence[keras.metrics.Metric] | Mapping[str, Sequence[keras.metrics.Metric]]


class Term(NamedTuple):
    """One output's part of the loss."""

    name: str  # of the output
    loss: keras.losses.Loss
    scale: float | None  # of `loss_weights`
    y: Nest
    output: Nest
    sample_weight: Nest


def by_name(model: keras.Model, outputs: Nest) -> dict[str, Nest]:
    """Return the outputs under their names, in their order.

    These are the keys of a dict, joined by `/` where dicts are nested; of a list the names that a functional model
    gives its outputs, else their numbers. The only output of another model has the name "".
    """
    flat = keras.tree.flatten_with_path(outputs)
    names = ["/".join(map(str, path)) for path, _ in flat]
    known = getattr(model, "output_names", None) or []
    if not isinstance(outputs, dict) and len(set(known)) == len(names):
        names = known
    return dict(zip(names, (output for _, output in flat), strict=True))


def spread(nest: Nest, names: Sequence[str], *, to_all: bool = False) -> dict[str, Nest]:
    """Return what `nest` has for each of the outputs `names`.

    Args:
        nest: a dict by name, a list or tuple in the order of the outputs, or a leaf, which is for the only output.
        to_all: a leaf is for every output.

    Raises:
        ValueError: a name is not that of an output, or the number of entries is wrong.
    """
    if not keras.tree.is_nested(nest):
        if len(names) > 1 and nest is not None and not to_all:
            raise ValueError(f"must be given for each of the outputs {', '.join(names)}")
        return dict.fromkeys(names, nest)
    flat = keras.tree.flatten_with_path(nest)
    if isinstance(nest, list | tuple):
        if len(flat) != len(names):
            raise ValueError(f"must have {len(names)} entries, one an output. Received: {len(flat)}")
        return dict(zip(names, (leaf for _, leaf in flat), strict=True))
    given = {"/".join(map(str, path)): leaf for path, leaf in flat}
    if list(names) == [""] and len(given) == 1:
        return dict.fromkeys(names, *given.values())
    for name in given:
        if name not in names:
            raise ValueError(f"must be named as an output, one of {', '.join(names)}. Received: {name}")
    return given


def terms(
    loss: Losses, loss_weights: Any, y: Nest, outputs: Mapping[str, Nest], sample_weight: Nest = None
) -> list[Term]:
    """Return the parts of the loss as `compile(loss=…, loss_weights=…)` has them, in the order of the outputs.

    Args:
        loss: as `Losses` says; every output has an entry.
        loss_weights: a number for each output, 1 where there is none.
        y: labels for each output that has a loss; those of the others are not looked at.
        outputs: as `by_name` returns them.
        sample_weight: one for all outputs, or one for each.

    Raises:
        ValueError: they do not fit the outputs, or each other.
    """
    names = list(outputs)
    losses = spread(loss, names, to_all=True)
    if missing := [name for name in names if name not in losses]:
        raise ValueError(f"must name every output, with null for one without a loss. Missing: {', '.join(missing)}")
    learned = [name for name in names if losses[name] is not None]
    labels = labels_by_name(loss, y, names)
    scales, weights = spread(loss_weights, names), spread(sample_weight, names, to_all=True)
    if isinstance(sample_weight, dict) and (unweighted := [name for name in learned if name not in weights]):
        raise ValueError(f"there must be sample weights for each output. Missing: {', '.join(unweighted)}")
    if unlabelled := [name for name in learned if labels.get(name) is None]:
        of = f"for the output {unlabelled[0]}" if unlabelled[0] else "for the loss"
        raise ValueError(f"there must be labels {of}")
    return [
        Term(name, losses[name], scales.get(name), labels[name], outputs[name], weights.get(name)) for name in learned
    ]


def labels_by_name(loss: Losses, y: Nest, outputs: Iterable[str]) -> dict[str, Nest]:
    """Return the labels by output; a list that has none for outputs without a loss is in the order of the others."""
    names = list(outputs)
    all_given = loss is None or isinstance(y, dict) or (isinstance(y, list | tuple) and len(y) == len(names))
    if all_given:
        return spread(y, names)
    losses = spread(loss, names, to_all=True)
    return spread(y, [name for name in names if losses.get(name) is not None])


def measured(*given: Metrics) -> dict[str, keras.metrics.Metric]:
    """Return each metric under the name that `fit` gives it: `<output>_<metric>` where it is of one of several."""
    return {_full_name(output, metric): metric for metrics in given for output, metric in _flat(metrics)}


def _full_name(output: str | None, metric: keras.metrics.Metric) -> str:
    return f"{output}_{metric.name}" if output else metric.name


def _flat(metrics: Metrics) -> list[tuple[str | None, keras.metrics.Metric]]:
    if not isinstance(metrics, Mapping):
        return [(None, metric) for metric in metrics]
    return [(output, metric) for output, listed in metrics.items() for metric in listed]


def update_metrics(metrics: Metrics, y: Nest, outputs: Mapping[str, Nest], sample_weight: Nest = None) -> None:
    """Update the metrics with one micro-batch, weighted by the mask of their output where there is one.

    Args:
        metrics: of the only output, or by the output's name.
        y: as `labels_by_name` returns them.
        outputs, sample_weight: as `terms` takes them; the weights for `weighted_metrics` alone.

    Raises:
        ValueError: a metric is of no output, or of one that has no labels.
    """
    if not metrics:
        return
    names = list(outputs)
    if len(names) > 1 and not isinstance(metrics, Mapping):
        raise ValueError(f"must be given by the name of an output, one of {', '.join(names)}")
    labels = spread(y, names)
    weights = spread(sample_weight, names, to_all=True)
    for output, metric in _flat(metrics):
        name = names[0] if output is None else output
        if name not in outputs:
            raise ValueError(f"must be of an output, one of {', '.join(names)}. Received: {name}")
        if labels.get(name) is None:
            raise ValueError("there must be labels for it")
        mask, weight = mask_of(outputs[name]), weights.get(name)
        if weight is None:
            weight = mask  # Keras' own look for it themselves
        metric.update_state(labels[name], outputs[name], **({} if weight is None else {"sample_weight": weight}))

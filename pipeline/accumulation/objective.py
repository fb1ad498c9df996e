"""The objective of a training: losses, loss weights and metrics, as in `compile`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import keras

from .batch import Nest, spread
from .choices import check_choice
from .keras_internals import get_loss, mask_of
from .padding import check_metric, metric_weight

# As in `compile`: one loss for all outputs, or a dict or list of losses, with None for
# an output without a loss. None alone is for a model that learns from `add_loss`.
Losses = Any
Metrics = Sequence[keras.metrics.Metric] | Mapping[str, Sequence[keras.metrics.Metric]]


class Term(NamedTuple):
    """One output's part of the loss."""

    name: str  # of the output
    loss: keras.losses.Loss
    scale: float | None  # the output's entry of `loss_weights`
    y: Nest
    output: Nest
    sample_weight: Nest


def check_loss_over(loss_over: Any) -> None:
    """Reject a value of `loss_over` that is none of its choices.

    Raises:
        ValueError: the value is none of the choices.
    """
    remark = ""
    if keras.tree.is_nested(loss_over):
        remark = ", the same for all outputs"
    check_choice("loss_over", loss_over, ("example", "effective_batch"), remark)


def check_added_losses(added_losses: Any) -> None:
    """Reject a value of `added_losses` that is none of its choices.

    Raises:
        ValueError: the value is none of the choices.
    """
    check_choice("added_losses", added_losses, ("mean", "sum"))


@dataclass(frozen=True)
class Objective:
    """The losses that are minimized, and the metrics.

    Attributes:
        loss: the loss or losses, as in `compile`.
        loss_weights: a number per output, by name or in order.
        metrics: metrics for the only output, or lists of metrics by output name. They
            are weighted by the mask of the output.
        weighted_metrics: metrics in the same form, weighted by the sample weights or,
            without any, by the mask of the output.
        layer_metrics: metrics that the model's layers update in their calls.
        added_losses: whether a scalar of `add_loss` is the "mean" or the "sum" over the
            examples of its batch.
        loss_over: "example" if the loss of an example does not depend on other
            examples. "effective_batch" computes all losses over the effective batch,
            which costs a second forward pass; see `over_effective_batch`.

    Raises:
        ValueError: `added_losses` or `loss_over` is not one of its choices, or
            `loss_over` is "effective_batch" without a loss.
    """

    loss: Losses
    loss_weights: Any = None
    metrics: Metrics = ()
    weighted_metrics: Metrics = ()
    layer_metrics: Sequence[keras.metrics.Metric] = ()
    added_losses: str = "mean"
    loss_over: str = "example"

    def __post_init__(self) -> None:
        check_loss_over(self.loss_over)
        check_added_losses(self.added_losses)
        if self.over_batch and self.loss is None:
            rule = "loss_over must be example if there is no loss"
            reason = "because add_loss is computed per micro-batch"
            raise ValueError(f"{rule}, {reason}. Received: 'effective_batch'")

    @property
    def over_batch(self) -> bool:
        """Whether the losses are computed over the whole effective batch."""
        return self.loss_over == "effective_batch"

    @classmethod
    def from_loss(
        cls, loss: Losses | Objective, loss_over: str | None = None
    ) -> Objective:
        """Return `loss` if it is an objective, else an objective with this loss only.

        If `loss_over` is not None, it replaces the objective's attribute `loss_over`.
        """
        objective = loss if isinstance(loss, Objective) else cls(loss)
        if loss_over is None:
            return objective
        return replace(objective, loss_over=loss_over)

    def of_micro_batch(self) -> Objective:
        """Return the objective for a single micro-batch.

        If `over_batch` is true, the result has no loss, so that only the losses that
        the model adds are minimized.
        """
        if self.over_batch:
            return replace(self, loss=None, loss_over="example")
        return self

    def terms(
        self, y: Nest, outputs: Mapping[str, Nest], sample_weight: Nest = None
    ) -> list[Term]:
        """Return the terms of the loss, in the order of the outputs.

        The losses, labels and weights take the same forms as in Keras' `compile` and
        `fit`.

        Args:
            y: labels; those of outputs without a loss are ignored.
            outputs: the outputs by name; see `by_name`.
            sample_weight: sample weights for all outputs, or by name or in order.

        Raises:
            ValueError: the losses, loss weights, labels or sample weights do not fit
                the outputs, an output with a loss has no labels, or a loss has a
                `__call__` of its own.
        """
        if self.loss is None:
            return []
        names = list(outputs)
        losses = spread(self.loss, names, "loss", to_all=True)
        missing = [name for name in names if name not in losses]
        if missing:
            rule = "loss must name every output, with null for one without a loss"
            raise ValueError(f"{rule}. Missing: {', '.join(missing)}")

        learned = [name for name in names if losses[name] is not None]
        labels = labels_by_name(self.loss, y, names)
        scales = spread(self.loss_weights, names, "loss_weights")
        weights = spread(sample_weight, names, "sample_weight", to_all=True)
        if isinstance(sample_weight, dict):
            missing = [name for name in learned if name not in weights]
            if missing:
                rule = "there must be sample weights for each output"
                raise ValueError(f"{rule}. Missing: {', '.join(missing)}")
        for name in learned:
            if labels.get(name) is None:
                subject = f"the output {name}" if name else "the loss"
                raise ValueError(f"there must be labels for {subject}")

        terms = []
        for name in learned:
            loss = get_loss(losses[name], labels[name], outputs[name])
            _check_call(loss)
            terms.append(
                Term(
                    name,
                    loss,
                    scales.get(name),
                    labels[name],
                    outputs[name],
                    weights.get(name),
                )
            )
        return terms

    def update_metrics(
        self,
        y: Nest,
        outputs: Mapping[str, Nest],
        sample_weight: Nest,
        padded: bool = False,
    ) -> None:
        """Update the metrics with one micro-batch.

        `weighted_metrics` are weighted by the sample weights. Without sample weights,
        and in `metrics`, the mask of the output is used, if there is one. `padded` is
        whether micro-batches are padded, each to its own length.

        Raises:
            ValueError: a metric is for an output that does not exist or has no labels,
                or it would count padded positions.
        """
        names = list(outputs)
        labels = labels_by_name(self.loss, y, names)
        weights = spread(sample_weight, names, "sample_weight", to_all=True)
        _update(self.metrics, labels, outputs, {}, padded)
        _update(self.weighted_metrics, labels, outputs, weights, padded)

    def measured(self) -> dict[str, keras.metrics.Metric]:
        """Return all metrics by the names that `fit` gives them.

        A metric that is given by output name is called `<output>_<metric>`.
        """
        named = {}
        for metrics in (self.metrics, self.weighted_metrics, self.layer_metrics):
            for output, metric in _with_outputs(metrics):
                name = f"{output}_{metric.name}" if output else metric.name
                named[name] = metric
        return named


def _check_call(loss: keras.losses.Loss) -> None:
    if type(loss).__call__ is not keras.losses.Loss.__call__:
        rule = "loss must compute one value per example in `call`"
        reason = "because `__call__` is not called"
        raise ValueError(f"{rule}, {reason}. Received: {loss.name}")


def couples_examples(loss: Any) -> bool:
    """Return whether a loss is known to depend on several examples at once.

    Such losses are Keras' `Circle`, and losses or functions whose attribute
    `couples_examples` is true.
    """
    function = getattr(loss, "fn", loss)  # `compile` wraps a function
    function = getattr(function, "func", function)  # and so does `functools.partial`
    if isinstance(loss, keras.losses.Circle) or function is keras.losses.circle:
        return True
    candidates = (loss, function)
    return any(getattr(each, "couples_examples", False) for each in candidates)


def by_name(model: keras.Model, outputs: Nest) -> dict[str, Nest]:
    """Return the outputs by name, in order.

    The names are the keys of a dict, joined by `/` if dicts are nested. Otherwise they
    are the output names of a functional model, or else the indices in a list. Any other
    model has only one output, whose name is "".
    """
    paths_and_outputs = keras.tree.flatten_with_path(outputs)
    names = ["/".join(map(str, path)) for path, _ in paths_and_outputs]
    names_of_model = getattr(model, "output_names", None) or []
    if not isinstance(outputs, dict) and len(set(names_of_model)) == len(names):
        names = names_of_model
    return dict(zip(names, keras.tree.flatten(outputs), strict=True))


def labels_by_name(loss: Losses, y: Nest, outputs: Iterable[str]) -> dict[str, Nest]:
    """Return the labels by output name, for the names `outputs`.

    A list of labels may leave out the outputs without a loss.
    """
    names = list(outputs)
    is_complete_list = isinstance(y, list | tuple) and len(y) == len(names)
    if loss is None or isinstance(y, dict) or is_complete_list:
        return spread(y, names, "labels")
    losses = spread(loss, names, "loss", to_all=True)
    learned = [name for name in names if losses.get(name) is not None]
    return spread(y, learned, "labels")


def _update(
    metrics: Metrics,
    labels: Mapping[str, Nest],
    outputs: Mapping[str, Nest],
    weights: Mapping[str, Nest],
    padded: bool,
) -> None:
    names = list(outputs)
    if metrics and len(names) > 1 and not isinstance(metrics, Mapping):
        rule = "metrics must be given by output name"
        raise ValueError(f"{rule}, one of {', '.join(names)}")
    for output, metric in _with_outputs(metrics):
        name = names[0] if output is None else output
        if name not in outputs:
            rule = f"metrics must belong to an output, one of {', '.join(names)}"
            raise ValueError(f"{rule}. Received: {name}")
        if labels.get(name) is None:
            raise ValueError(f"there must be labels for the metric {metric.name}")

        # Pass on the mask: only Keras' own metrics would find it by themselves.
        weight = weights.get(name)
        if weight is None:
            weight = mask_of(outputs[name])
        if padded:
            check_metric(metric, labels[name], outputs[name], weight)
            weight = metric_weight(metric, weight)
        if weight is None:
            metric.update_state(labels[name], outputs[name])
        else:
            metric.update_state(labels[name], outputs[name], sample_weight=weight)


def _with_outputs(metrics: Metrics) -> list[tuple[str | None, keras.metrics.Metric]]:
    """Return (output name, metric) pairs; the name is None for the only output."""
    if not isinstance(metrics, Mapping):
        return [(None, metric) for metric in metrics]
    pairs: list[tuple[str | None, keras.metrics.Metric]] = []
    for output, metrics_of_output in metrics.items():
        pairs += [(output, metric) for metric in metrics_of_output]
    return pairs

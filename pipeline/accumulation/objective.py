"""What is minimised and measured: the losses, loss weights and metrics of each output by name, as in `compile`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import keras

from .batch import Nest, spread
from .keras_internals import get_loss, mask_of

# As `compile` takes it: one for every output, or a dict or list, None for an output without; None for `add_loss` alone.
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


@dataclass(frozen=True)
class Objective:
    """What is minimised and measured.

    Attributes:
        loss: as `compile` takes it.
        loss_weights: a number for each output, by name or in order.
        metrics, weighted_metrics: of the only output or by name; the mask weighs the former, sample weights the latter.
        layer_metrics: those that the model's layers update in their calls.
        added_losses: whether a scalar of `add_loss` is the "mean" of what the examples of its batch add, or the "sum".
        loss_over: "example" if the loss of an example does not depend on the others; "effective_batch" computes all
            losses over the whole effective batch, at the price of a second forward pass: see `over_effective_batch`.
    """

    loss: Losses
    loss_weights: Any = None
    metrics: Metrics = ()
    weighted_metrics: Metrics = ()
    layer_metrics: Sequence[keras.metrics.Metric] = ()
    added_losses: str = "mean"
    loss_over: str = "example"

    def __post_init__(self) -> None:
        if self.loss_over not in ("example", "effective_batch"):
            rule, choices = (
                "loss_over must be the same for all outputs",
                "example, effective_batch",
            )
            raise ValueError(
                f"{rule}. Received: {self.loss_over!r}. Choices: {choices}"
            )
        if self.over_batch and self.loss is None:
            raise ValueError(
                "loss_over must be example without a loss: add_loss is of micro-batches. Received: None"
            )

    @property
    def over_batch(self) -> bool:
        """Whether the losses are over the effective batch."""
        return self.loss_over == "effective_batch"

    def of_micro_batch(self) -> Objective:
        """Return what is minimised over a micro-batch by itself: what the model adds, if the losses are over more."""
        return (
            replace(self, loss=None, loss_over="example") if self.over_batch else self
        )

    @classmethod
    def of(cls, loss: Losses | Objective, loss_over: str | None = None) -> Objective:
        """Return `loss` as an objective without metrics, or as it is if it is an objective; `loss_over` changes it."""
        found = loss if isinstance(loss, Objective) else cls(loss)
        return found if loss_over is None else replace(found, loss_over=loss_over)

    def terms(
        self, y: Nest, outputs: Mapping[str, Nest], sample_weight: Nest = None
    ) -> list[Term]:
        """Return the parts of the loss as `compile` has them, in the order of the outputs, which `by_name` returns.

        Labels of outputs without a loss are ignored.

        Raises:
            ValueError: they do not fit the outputs, or each other.
        """
        if self.loss is None:
            return []
        names = list(outputs)
        losses = spread(self.loss, names, to_all=True)
        if missing := [name for name in names if name not in losses]:
            raise ValueError(
                f"must name every output, with null for one without a loss. Missing: {', '.join(missing)}"
            )
        learned = [name for name in names if losses[name] is not None]
        labels = labels_by_name(self.loss, y, names)
        scales, weights = (
            spread(self.loss_weights, names),
            spread(sample_weight, names, to_all=True),
        )
        if isinstance(sample_weight, dict) and (
            unweighted := [name for name in learned if name not in weights]
        ):
            raise ValueError(
                f"there must be sample weights for each output. Missing: {', '.join(unweighted)}"
            )
        if unlabelled := [name for name in learned if labels.get(name) is None]:
            of = f"for the output {unlabelled[0]}" if unlabelled[0] else "for the loss"
            raise ValueError(f"there must be labels {of}")
        made = {
            name: get_loss(losses[name], labels[name], outputs[name])
            for name in learned
        }
        return [
            Term(n, made[n], scales.get(n), labels[n], outputs[n], weights.get(n))
            for n in learned
        ]

    def update_metrics(
        self, y: Nest, outputs: Mapping[str, Nest], sample_weight: Nest
    ) -> None:
        """Update the metrics with one micro-batch, weighted by the mask of their output where there is one.

        Raises:
            ValueError: a metric is of no output, or of one that has no labels.
        """
        names = list(outputs)
        labels, weights = (
            labels_by_name(self.loss, y, names),
            spread(sample_weight, names, to_all=True),
        )
        for metrics, given in ((self.metrics, {}), (self.weighted_metrics, weights)):
            if metrics and len(names) > 1 and not isinstance(metrics, Mapping):
                raise ValueError(
                    f"must be given by the name of an output, one of {', '.join(names)}"
                )
            for output, metric in _flat(metrics):
                name = names[0] if output is None else output
                if name not in outputs:
                    raise ValueError(
                        f"must be of an output, one of {', '.join(names)}. Received: {name}"
                    )
                if labels.get(name) is None:
                    raise ValueError("there must be labels for it")
                mask, weight = mask_of(outputs[name]), given.get(name)
                weight = (
                    mask if weight is None else weight
                )  # Keras' own look for a mask themselves
                by = {} if weight is None else {"sample_weight": weight}
                metric.update_state(labels[name], outputs[name], **by)

    def measured(self) -> dict[str, keras.metrics.Metric]:
        """Return all metrics as `fit` names them: `<output>_<metric>` where one is of one of several outputs."""
        flat = [
            *_flat(self.metrics),
            *_flat(self.weighted_metrics),
            *_flat(self.layer_metrics),
        ]
        return {
            f"{output}_{metric.name}" if output else metric.name: metric
            for output, metric in flat
        }


def couples_examples(loss: Any) -> bool:
    """Return whether a loss is known to depend on several examples at once.

    Known are Keras' `Circle`, and losses and functions of your own with a true attribute `couples_examples`.
    """
    function = getattr(loss, "fn", loss)  # `compile` wraps a function
    function = getattr(function, "func", function)  # and so does `functools.partial`
    known = isinstance(loss, keras.losses.Circle) or function is keras.losses.circle
    return known or any(
        getattr(each, "couples_examples", False) for each in (loss, function)
    )


def labels_by_name(loss: Losses, y: Nest, outputs: Iterable[str]) -> dict[str, Nest]:
    """Return the labels by output; a list that has none for outputs without a loss is in the order of the others."""
    names = list(outputs)
    if not (
        loss is None
        or isinstance(y, dict)
        or (isinstance(y, list | tuple) and len(y) == len(names))
    ):
        losses = spread(loss, names, to_all=True)
        names = [name for name in names if losses.get(name) is not None]
    return spread(y, names)


def _flat(metrics: Metrics) -> list[tuple[str | None, keras.metrics.Metric]]:
    if not isinstance(metrics, Mapping):
        return [(None, metric) for metric in metrics]
    return [(output, metric) for output, listed in metrics.items() for metric in listed]


def by_name(model: keras.Model, outputs: Nest) -> dict[str, Nest]:
    """Return the outputs by their names, in their order.

    The names are the keys of a dict, joined by `/` where dicts are nested; for a list, the names that a functional
    model gives its outputs, else their numbers. The only output of any other model has the name "".
    """
    flat = keras.tree.flatten_with_path(outputs)
    names = ["/".join(map(str, path)) for path, _ in flat]
    known = getattr(model, "output_names", None) or []
    if not isinstance(outputs, dict) and len(set(known)) == len(names):
        names = known
    return dict(zip(names, (output for _, output in flat), strict=True))

"""Checks that the data, the model and the objective of a run can be cut by tokens."""

from typing import Any

import tensorflow as tf

from pipeline.accumulation import Evaluation, internals
from pipeline.common.errors import ConfigError, as_config_error
from pipeline.config.resolve import XLA_LENGTHS, RunSpec
from pipeline.config.sizes import MICRO, TOKENS
from pipeline.dataset.splits import Data


def check_data(spec: RunSpec, data: Data) -> None:
    """Reject a cut by tokens of examples whose lengths are not known.

    Raises:
        ConfigError: no input of a split has an unequal length, or `dataset.pad` is
            null.
    """
    if not spec.cuts_by_tokens:
        return
    is_ragged = spec.dataset.get("pad") is not None
    for split in data.splits.values():
        inputs = tf.nest.flatten(split.element_spec[0])
        is_ragged = is_ragged and any(map(_varies, inputs))
    if not is_ragged:
        rule = (
            "must come with dataset.pad, such as {multiple: 8, value: 0}, and with "
            "inputs of unequal length in each split: the lengths of dense inputs are "
            "not known. Give the examples without padding, or set dataset.lengths, "
            f"such as {{length: x.length, parts: [x.tokens, y]}}, or cut by {MICRO}"
        )
        raise ConfigError(TOKENS, rule, spec.batching.micro_batch_tokens)


def check_update(spec: RunSpec, evaluation: Evaluation, batch_spec: Any) -> None:
    """Reject a model or an objective for which padding would change an update.

    The evaluation is traced, not run; only made-up examples are computed.

    Args:
        spec: the spec of a run that cuts by tokens.
        evaluation: the evaluation of the run, with its model and its objective.
        batch_spec: the spec of an effective batch.

    Raises:
        ConfigError: padding would count.
    """

    def check(batch: Any) -> None:
        internals.prepared_for_tokens(evaluation.model, batch)
        if spec.same_noise:
            internals.check_noise(evaluation.model, internals.parts_of(batch)[0])
        evaluation(batch)

    rule = "must be null, as padding would change the update"
    tokens = spec.batching.micro_batch_tokens
    with as_config_error(TOKENS, rule, tokens):
        tf.function(check, autograph=False).get_concrete_function(batch_spec)

    xla_lengths = spec.config.hardware.xla_lengths
    if isinstance(xla_lengths, list) and not spec.times_xla:
        rule = (
            "must be null if the model or its loss fails when all inputs and labels "
            f"are padded to the same length, such as {xla_lengths[-1]}"
        )
        with as_config_error(XLA_LENGTHS, rule, xla_lengths):
            _trace_at(xla_lengths[-1], evaluation, batch_spec)


def _trace_at(length: int, evaluation: Evaluation, batch_spec: Any) -> None:
    """Trace the evaluation of a batch whose parts are all padded to one length.

    Shapes that do not fit each other raise an error then, as all of them are known.
    """

    def padded(leaf: Any) -> Any:
        if not isinstance(leaf, tf.RaggedTensorSpec):
            return leaf
        examples, _, *others = leaf.shape.as_list()
        return tf.TensorSpec([examples, length, *others], leaf.dtype)

    padded_spec = tf.nest.map_structure(padded, batch_spec)
    padded_evaluation = Evaluation(evaluation.model, evaluation.objective, 1)
    step = tf.function(padded_evaluation, autograph=False)
    step.get_concrete_function(padded_spec)


def _varies(spec: Any) -> bool:
    """Return whether a part of an example has a first axis without a fixed size."""
    if isinstance(spec, tf.RaggedTensorSpec):
        return True
    return bool(spec.shape.rank) and spec.shape[0] is None

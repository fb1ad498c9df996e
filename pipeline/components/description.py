"""Descriptions of the parts of a run: tags, first lines and an example input."""

from typing import Any

import tensorflow as tf

from pipeline.accumulation import internals
from pipeline.components.assembly import Parts
from pipeline.config.schema import HardwareConfig
from pipeline.config.sizes import Batching


def tags(parts: Parts) -> dict[str, str]:
    """Return the tags of a run that describe its model and its scaling.

    The tags name the layers whose results depend on how an effective batch is cut into
    micro-batches, and the changes by the scaling rule.
    """
    stateful = internals.batch_dependent_layers(parts.model, parts.forward)
    noisy = parts.forward.cut_dependent_noise
    tags_of_run = {
        "model.batch_dependent_layers": ", ".join(stateful) or "none",
        "model.cut_dependent_noise": ", ".join(noisy) or "none",
    }
    if parts.record.scaling:
        tags_of_run["scaling"] = parts.record.scaling
    return tags_of_run


def first_lines(parts: Parts) -> list[str]:
    """Return the lines that a new run prints before it trains.

    The lines give the changes by the scaling rule, notes about the data, the model and
    what is compiled, and the `differences_from_large_batch`.
    """
    scope_note = xla_scope_note(
        parts.spec.config.hardware, parts.plan.batching, parts.devices.on_gpu
    )
    token_note = ""
    if parts.spec.cuts_by_tokens:
        token_note = (
            "the gradient noise scale is not measured: micro-batches that are cut by "
            "tokens are not random samples"
        )
    lines = [line for line in (parts.record.scaling, scope_note, token_note) if line]
    return [*lines, *parts.record.notes, *differences_from_large_batch(parts)]


def xla_scope_note(hardware: HardwareConfig, batching: Batching, on_gpu: bool) -> str:
    """Return a line if `hardware.xla_scope` does not have its full effect, or else ""."""
    scope = hardware.xla_scope.name
    effect = "has no effect"
    reason = ""
    if scope == "step":
        return ""
    if hardware.xla is False:
        reason = "hardware.xla is false"
    elif hardware.xla == "auto" and not on_gpu:
        reason = "hardware.xla=auto compiles nothing on a CPU"
    elif batching.micro_batch_tokens is not None and not hardware.xla_lengths:
        reason = "a cut by tokens is not compiled without hardware.xla_lengths"
    elif batching.replicas > 1:
        reason = "it supports only one replica"
    elif scope == "update" and batching.micro_batch_tokens is not None:
        effect = "acts as apply"
        reason = "micro-batches that are cut by tokens have several sizes"
    elif (
        scope == "update"
        and batching.effective_batch_size % batching.micro_batch_size != 0
    ):
        effect = "acts as apply"
        reason = (
            f"micro-batches of {batching.micro_batch_size} do not divide "
            f"{batching.effective_batch_size} examples"
        )
    if not reason:
        return ""
    return f"hardware.xla_scope={scope} {effect}: {reason}"


def differences_from_large_batch(parts: Parts) -> list[str]:
    """Return the reasons why an update differs from one on an uncut effective batch.

    Each reason is one line that ends with the names of the layers that cause it. The
    list is empty if the effective batch is not cut.
    """
    if not parts.spec.largest.is_cut:
        return []
    config = parts.spec.config.accumulation
    return internals.differences_from_large_batch(
        parts.model,
        parts.forward,
        hold_statistics=config.moving_statistics.name == "effective",
        allow_noise=config.same_noise == "auto",
    )


def example_inputs(parts: Parts) -> Any:
    """Return up to four inputs as NumPy arrays, for the signature of the logged model.

    Raises:
        TypeError: the inputs are neither a dense tensor nor a dict of dense tensors.
    """
    is_dense = all(map(tf.is_tensor, tf.nest.flatten(parts.inputs)))
    if not is_dense or not isinstance(parts.inputs, tf.Tensor | dict):
        what = "an input that is neither a dense tensor nor a dict of dense tensors"
        raise TypeError(f"{what} has no signature")
    return tf.nest.map_structure(lambda leaf: leaf.numpy(), parts.inputs)

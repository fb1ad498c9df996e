"""Decides whether cuDNN computes a run's attention (`hardware.fused_attention`)."""

from dataclasses import replace
from typing import Any

import keras
import tensorflow as tf

from pipeline.accumulation import internals
from pipeline.common import nvidia
from pipeline.common.errors import ConfigError
from pipeline.components.devices import Devices
from pipeline.config.resolve import (
    FUSED_ATTENTION,
    RunSpec,
    check_fused_attention,
)


def check(spec: RunSpec) -> None:
    """Reject `hardware.fused_attention=true` if this config or machine rules it out.

    Call this when the devices are set up, before anything is created.

    Raises:
        ConfigError: the value is rejected.
    """
    # Check the config again: in a resumed run, the recorded value may have replaced
    # `auto` after the config was resolved.
    check_fused_attention(spec)
    if spec.config.hardware.fused_attention is True and not nvidia.all_are_hopper():
        raise _must_be_off("it needs all GPUs to be of NVIDIA's Hopper generation")


def decide(
    spec: RunSpec,
    run_devices: Devices,
    model: keras.Model,
    batch_spec: Any,
    micro_batch_size: int,
) -> tuple[RunSpec, Devices]:
    """Decide whether attention is fused, and store the decision in the spec.

    Args:
        spec: the spec, with `true`, `false` or `auto` for `hardware.fused_attention`.
        run_devices: the devices of the run.
        model: a built model.
        batch_spec: the spec of an effective batch.
        micro_batch_size: examples per micro-batch.

    Returns:
        The spec and the devices. The spec has `true` if every worker can fuse at least
        one attention of the model, else `false`. The description of the devices says
        that attention is fused or, if it was required, why it is not. With
        `hardware.xla=fastest`, both are returned unchanged.

    Raises:
        ConfigError: fused attention is required, but XLA compiles nothing.
    """
    hardware = spec.config.hardware
    is_required = hardware.fused_attention is True
    if hardware.fused_attention is False or spec.times_xla:
        # `xla_choice` calls this for each of the variants that it times.
        return spec, run_devices

    reasons: list[str] = []
    if nvidia.all_are_hopper() and not hardware.deterministic:
        # Decide in the strategy's scope: under a strategy, `hardware.xla=auto` compiles
        # nothing.
        with run_devices.strategy.scope():
            is_compiled = _is_compiled(spec, model, batch_spec)
        if is_compiled:
            reasons = internals.why_attention_is_not_fused(
                model, batch_spec, micro_batch_size
            )
        elif is_required:
            raise _must_be_off("XLA compiles nothing here; see hardware.xla")

    is_fused = run_devices.agree("" in reasons)
    spec = spec.changed({FUSED_ATTENTION: is_fused})
    line = ""
    if is_fused:
        line = _line_if_fused(reasons)
    elif is_required:
        line = _line_if_not_fused(reasons)
    return spec, replace(run_devices, description=run_devices.description + line)


def _is_compiled(spec: RunSpec, model: keras.Model, batch_spec: Any) -> bool:
    """Return whether XLA compiles the micro-steps of a run."""
    if spec.dataset.get("batched"):  # XLA would compile for each size of a batch
        return False
    if spec.cuts_by_tokens:  # XLA would compile for each length
        return False
    compiled = []

    def note(batch: Any) -> None:
        xla = spec.config.hardware.xla
        compiled.append(internals.compiled_by_xla(xla, model, batch))

    tf.function(note, autograph=False).get_concrete_function(batch_spec)
    return all(compiled)


def _line_if_fused(reasons: list[str]) -> str:
    fused = reasons.count("")
    if fused == len(reasons):
        return ", fused attention"
    other = next(reason for reason in reasons if reason)
    return f", {fused} of {len(reasons)} attentions fused ({other})"


def _line_if_not_fused(reasons: list[str]) -> str:
    reason = "the model has no attention without dropout"
    if reasons:
        reason = next(
            (reason for reason in reasons if reason), "another worker cannot fuse it"
        )
    return f", attention not fused ({reason})"


def _must_be_off(why: str) -> ConfigError:
    return ConfigError(FUSED_ATTENTION, f"must be false or auto: {why}", True)

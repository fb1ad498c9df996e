"""The line about a `hardware.xla_scope` that has not its full effect."""

from __future__ import annotations

import pytest

from pipeline.components.description import xla_scope_note
from pipeline.config.schema import HardwareConfig, XlaScope
from pipeline.config.sizes import Batching


@pytest.mark.parametrize(
    ("xla", "scope", "micro_batch_size", "replicas", "note"),
    [
        (True, "update", 32, 1, ""),
        (False, "step", 32, 1, ""),
        (True, "apply", 50, 1, ""),
        (False, "apply", 32, 1, "has no effect: hardware.xla is false"),
        ("auto", "update", 32, 1, "has no effect: hardware.xla=auto compiles nothing"),
        (True, "apply", 32, 2, "has no effect: it supports only one replica"),
        (True, "update", 50, 1, "acts as apply: micro-batches of 50 do not divide 128"),
    ],
)
def test_a_scope_without_its_full_effect_is_named(
    xla, scope, micro_batch_size, replicas, note
):
    hardware = HardwareConfig(xla=xla, xla_scope=XlaScope[scope])
    factor = -(-128 // (micro_batch_size * replicas))
    batching = Batching(128, micro_batch_size, factor, replicas)
    line = xla_scope_note(hardware, batching, on_gpu=False)
    assert bool(line) is bool(note)
    assert note in line

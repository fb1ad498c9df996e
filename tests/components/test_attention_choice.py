"""`hardware.fused_attention`: where it is decided, said, recorded and rejected.

TensorFlow tells of a Hopper GPU that is not there, so nothing is computed on it.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import keras
import pytest
import tensorflow as tf
from keras import layers

from pipeline.checkpoints import resume_rules
from pipeline.common import nvidia
from pipeline.common.errors import ConfigError
from pipeline.components import attention
from pipeline.components.devices import Devices
from pipeline.tracking.journal_file import Past
from pipeline.tracking.journal_lines import RunStart
from tests import composing
from tests.accumulation.replicas import strategy_on

KEY = "hardware.fused_attention"
SPEC = (tf.TensorSpec((None, 6), tf.int32), tf.TensorSpec((None, 6), tf.int32))


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that TensorFlow lists, with what it says of it, which a test may change."""
    details = {"device_name": "H100", "compute_capability": (9, 0)}
    config = tf.config

    def one_device(kind=None):
        return [SimpleNamespace(name=f"{kind}:0", device_type="GPU")]

    monkeypatch.setattr(config, "get_visible_devices", one_device)
    monkeypatch.setattr(config.experimental, "get_device_details", lambda _: details)
    return details


def spec_of(*overrides):
    return composing.spec_of(overrides)


def network(dropout=0.0):
    inputs = keras.Input((None,), dtype="int32")
    x = layers.Embedding(5, 32)(inputs)
    heads = layers.MultiHeadAttention(2, 16, dropout=dropout)
    x = heads(x, x, use_causal_mask=True)
    return keras.Model(inputs, layers.Dense(5, dtype="float32")(x))


def decided(model, *overrides, batch_spec=SPEC, replicas=1):
    """Return the value that is recorded, and the first line; `auto` is the default."""
    run_devices = Devices(strategy_on(replicas), True, "H100")
    spec, run_devices = attention.decide(
        spec_of(*overrides), run_devices, model, batch_spec, 2
    )
    assert spec.resolved["hardware"]["fused_attention"] is (
        spec.config.hardware.fused_attention
    )
    return spec.config.hardware.fused_attention, run_devices.description


def test_it_is_used_and_said_where_all_conditions_hold(gpu, precision):
    precision("mixed_bfloat16")
    for override in ([], [f"{KEY}=true"], ["hardware.xla=true"]):
        assert decided(network(), *override) == (True, "H100, fused attention")
    assert decided(network(), f"{KEY}=false") == (False, "H100")


@pytest.mark.parametrize(
    ("capability", "override"),
    [
        ((8, 0), "hardware.xla=true"),
        pytest.param((10, 0), "hardware.xla=true", marks=pytest.mark.slow),
        ((9, 0), "hardware.xla=false"),
        ((9, 0), "hardware.deterministic=true"),
    ],
)
def test_auto_leaves_attention_to_keras_elsewhere(gpu, precision, capability, override):
    precision("mixed_bfloat16")
    gpu["compute_capability"] = capability
    assert decided(network(), override) == (False, "H100")


def test_auto_is_off_on_a_cpu(precision):
    precision("mixed_bfloat16")
    assert not nvidia.all_are_hopper()
    assert decided(network(), "hardware.xla=true") == (False, "H100")


@pytest.mark.slow
def test_true_says_why_a_model_is_left_to_keras(gpu, precision):
    asked = f"{KEY}=true"
    why = "H100, attention not fused (it computes in float32)"
    assert decided(network(), asked) == (False, why)
    assert decided(network()) == (False, "H100")

    precision("mixed_bfloat16")
    why = "H100, attention not fused (the model has no attention without dropout)"
    assert decided(network(0.1), asked) == (False, why)
    unknown = "its shape is not known when it is traced: (2, None, 2, 16)"
    any_length = (tf.TensorSpec((None, None), tf.int32), SPEC[1])
    why = f"H100, attention not fused ({unknown})"
    assert decided(network(), asked, batch_spec=any_length) == (False, why)

    model = network()
    own = layers.MultiHeadAttention(1, 12)(*[model.output] * 2)
    both = keras.Model(model.input, own)
    value, line = decided(both)
    assert value is True
    assert re.fullmatch(r"H100, 1 of 2 attentions fused \(its heads are 12 .*\)", line)


def test_true_is_rejected_where_xla_compiles_nothing(gpu, precision):
    precision("mixed_bfloat16")
    model = network()
    model.layers[1].supports_jit = False
    rule = f"{KEY} must be false or auto: XLA compiles nothing here"
    with pytest.raises(ConfigError, match=rule):
        decided(model, f"{KEY}=true")
    assert decided(model) == (False, "H100")


def test_several_replicas_are_compiled_where_the_config_says_so(gpu, precision):
    precision("mixed_bfloat16")
    with strategy_on(2).scope():
        model = network()
    assert decided(model, replicas=2) == (False, "H100")
    line = "H100, fused attention"
    assert decided(model, "hardware.xla=true", replicas=2) == (True, line)


def test_true_is_rejected_without_a_hopper_gpu(gpu):
    attention.check(spec_of(f"{KEY}=true"))
    gpu["compute_capability"] = (8, 0)
    rule = f"{KEY} must be false or auto: it needs all GPUs to be of NVIDIA's Hopper generation"
    with pytest.raises(ConfigError, match=rule):
        attention.check(spec_of(f"{KEY}=true"))
    attention.check(spec_of())


@pytest.mark.parametrize(
    ("recorded", "now", "value", "changes"),
    [
        (True, "auto", True, []),
        pytest.param(False, "auto", False, [], marks=pytest.mark.slow),
        (None, "auto", False, []),
        (True, "false", False, [f"{KEY} False (was True)"]),
        (None, "true", True, [f"{KEY} True (was False)"]),
    ],
)
def test_a_resumed_run_takes_what_it_began_with(recorded, now, value, changes):
    """A record of before the key, None here, had Keras' own attention."""
    before = spec_of().changed({KEY: recorded}).recorded
    if recorded is None:
        del before["hardware"]["fused_attention"]
    cut = {"effective_batch_size": 128}
    spec = spec_of(f"{KEY}={now}")
    start = RunStart(store=spec.config.tracking.uri, segment={"cut": cut})
    past = Past(Path("journal.jsonl"), start=start)
    spec = resume_rules._with_recorded_choices(spec, before, past)
    assert spec.config.hardware.fused_attention is value
    assert resume_rules.changes(before, spec, past) == changes

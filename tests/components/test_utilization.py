"""The share of the peak: by the device's name, and for an update however it is cut."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import tensorflow as tf

from pipeline.components import assembly, fitting, utilization
from pipeline.config.compose import composed
from pipeline.config.resolve import resolve
from pipeline.training import recorder as recording

A100 = "NVIDIA A100-SXM4-80GB"
T4 = "Tesla T4"


@pytest.mark.parametrize(
    ("name", "precision", "tf32", "teraflops"),
    [
        (A100, "mixed_bfloat16", True, 312),
        (A100, "mixed_float16", True, 312),
        (A100, "float32", True, 156),
        (A100, "float32", False, 19.5),
        (A100, "float64", True, 19.5),
        ("NVIDIA H100 80GB HBM3", "mixed_bfloat16", True, 989),
        ("NVIDIA H100 PCIe", "mixed_bfloat16", True, 756),
        ("NVIDIA H100 NVL", "mixed_bfloat16", True, 835),
        ("NVIDIA H200", "mixed_bfloat16", True, 989),
        ("NVIDIA L4", "float32", True, 60),
        ("NVIDIA L40S", "float32", True, 183),
        (T4, "mixed_float16", True, 65),
        (T4, "float32", True, 8.1),
        (T4, "mixed_bfloat16", True, 0),  # it has none
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", "float32", True, 0),  # a part of one
        ("NVIDIA A1000", "float32", True, 0),
        ("GPU", "float32", True, 0),
    ],
)
def test_the_peak_is_that_of_the_name_and_the_precision(
    name, precision, tf32, teraflops
):
    assert utilization.peak_flops(name, precision, tf32) == pytest.approx(
        teraflops * 1e12, rel=1e-12
    )


def parts_of(*overrides):
    small = ["model=mlp", "model.hidden=[16]", "hardware.device=cpu"]
    return assembly.assemble(resolve(composed([*small, *overrides])))


class Rows:
    """A tracker that keeps the performance of updates."""

    def __init__(self):
        self.rows = {}

    def update(self, update, results, performance, at):
        self.rows[update] = performance


@pytest.mark.slow
def test_an_update_has_the_flops_of_its_examples_at_every_factor(monkeypatch):
    """A layer of 64 × 16 without a gradient by its inputs, and one of 16 × 10.

    The tail of an epoch has 29 examples.
    """
    of_example = 2 * (2 * 64 * 16 + 3 * 16 * 10)
    monkeypatch.setattr(recording, "FETCH_UPDATES", 1)
    monkeypatch.setattr(fitting.devices, "gpu_names", lambda: [A100, A100])
    for factor in (1, 8):
        parts = parts_of(
            "accumulation.effective_batch_size=128", f"accumulation.factor={factor}"
        )
        parts = replace(parts, devices=SimpleNamespace(on_gpu=True, workers=2))
        tracker = Rows()
        monkeypatch.setattr(fitting.devices, "peak_memory", lambda used: 0)
        recorder = fitting.recorder(parts, tracker)
        recorder.layout.names = ("loss", "gradient_norm", "learning_rate")
        # The first update is traced: its seconds are not those of an update.
        for update in (1, 2, 12):
            results = tf.constant([1.0, 1.0, 1.0, math.nan, 0.0], tf.float64)
            recorder.add(update, results, traces=1)
        for update, examples in ((2, 128), (12, 29)):
            row = tracker.rows[update]
            peak = 2 * 2 * 156e12  # of two GPUs of each of two workers, in TF32
            flops = row["model_flops_utilization"] * row["update_seconds"] * peak
            expected = pytest.approx(of_example * examples, rel=1e-12)
            assert flops == expected, (factor, update)


@pytest.mark.slow
def test_it_is_left_out_where_flops_or_the_peak_are_unknown(capsys):
    parts = parts_of()
    assert utilization.share_of_peak(parts, []) == 0
    assert utilization.share_of_peak(parts, [A100, "GPU"]) == 0
    assert capsys.readouterr().err == ""
    parts = assembly.assemble(
        resolve(composed(["experiment=text", "hardware.device=cpu"]))
    )
    assert utilization.share_of_peak(parts, [A100]) == 0
    line = (
        "perf/model_flops_utilization is left out, as FLOPs are not known for "
        "examples of unequal length"
    )
    assert capsys.readouterr().err.strip().removeprefix("pipeline: ") == line

"""benchmarks/gpu.py runs every piece on a CPU with tiny sizes.

The FLOPs of its networks are those that a person counts.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys

import numpy as np
import psutil
import pytest
import tensorflow as tf

from benchmarks import children, gpu, gpu_texts, keras_models
from benchmarks.gpu_comparisons import COMPARISONS, MemoryUse, Trained
from benchmarks.workloads import on_gpu
from pipeline.accumulation import training_flops
from pipeline.accumulation.internals import why_attention_is_not_fused
from pipeline.components.model import decoder
from tests.running import ROOT

TIMED = {
    "found",
    "train",
    "fit",
    "peers",
    "sizes",
    "layers",
    "profile",
    "update",
    "scopes",
    "texts",
    "peak",
}
CONDITIONS = {
    "device",
    "processors",
    "platform",
    "versions",
    "begun",
    "seconds",
    "options",
}


def run(*arguments, cwd):
    """Run it as a file, on the CPU; the environment does not name the project."""
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), *arguments]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "PYTHONPATH": ""}
    return subprocess.run(
        command,
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=gpu.LIMIT + 60,
    )


@pytest.mark.soak
def test_every_part_has_its_figures(tmp_path):
    path = tmp_path / "result.json"
    done = run("--tiny", "--output", str(path), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(path.read_text())
    assert result["missing"] == []
    assert set(result) > CONDITIONS
    summaries = result["figures"]
    assert {summary["part"] for summary in summaries} == set(gpu.PARTS)
    met = {}
    for summary in summaries:
        if summary["met"] is not None:
            met[summary["part"], summary["subject"]] = summary["met"]
    assert met == {
        ("equal", "transformer"): True,
        ("repeatable", "transformer"): True,
        ("attention", "causal"): True,
        ("attention", "no mask"): True,
        ("two", "CPU"): True,
        ("limits", "out of memory"): True,
    }
    assert (tmp_path / "profile_4.trace.json.gz").exists()

    # However texts are cut, their updates are the same, but for rounding to bfloat16.
    losses = []
    for summary in summaries:
        if summary["part"] == "texts" and summary["what"].startswith("loss"):
            losses.append(summary["median"])
    assert len(losses) == 4
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-3)

    # A line of JSON for the device, then one after each piece, in order.
    lines = []
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            lines.append(json.loads(line))
    first, *after_pieces = lines
    assert first["on_gpu"] is False
    parts = [line["piece"].split()[0] for line in after_pieces]
    assert parts == [piece.part for piece in gpu.pieces(gpu.PARTS, tiny=True)]

    # These lines have all rounds; the file has a summary of each figure.
    figures = []
    for line in after_pieces:
        figures += line["figures"]
    assert len(figures) == len(summaries)
    for figure, summary in zip(figures, summaries, strict=True):
        assert figure["what"] == summary["what"]
        assert len(figure["values"]) == summary["rounds"] > 0
        assert all(map(math.isfinite, figure["values"]))
        is_absent = figure["what"] == "installations found"  # PyTorch's or JAX'
        if figure["part"] in TIMED and not is_absent:
            assert min(figure["values"]) > 0

    # The table comes last, a line for each figure.
    *_, head, _ = done.stdout.splitlines()[: -len(figures)]
    assert head.split()[:4] == ["part", "of", "figure", "median"]
    rows = done.stdout.splitlines()[-len(figures) :]
    for row, figure in zip(rows, figures, strict=True):
        assert row.startswith(figure["part"])
        assert figure["what"] in row


def test_the_attention_of_texts_that_are_cut_by_examples_can_be_fused(precision):
    precision("mixed_bfloat16")
    case = gpu_texts.TINY_CASE
    effective_batches = gpu_texts.effective_batches_of(case)
    batches = gpu_texts.endless(effective_batches, by_tokens=False)
    model = decoder(classes=257, length=case.longest, width=16, blocks=1, heads=2)
    assert why_attention_is_not_fused(model, batches.element_spec, case.micro) == [""]


@pytest.mark.slow
def test_what_there_is_no_time_for_is_in_the_table(tmp_path):
    path = tmp_path / "result.json"
    arguments = ("memory", "large", "--tiny", "--seconds-limit", "0")
    done = run(*arguments, "--output", str(path), cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    missing = json.loads(path.read_text())["missing"]
    assert [(line["part"], line["subject"]) for line in missing] == [
        ("large", ""),
        ("memory", "transformer10m factor 2"),
        ("memory", "transformer10m factor 64"),
    ]
    for line, expected in zip(done.stdout.splitlines()[-3:], missing, strict=True):
        assert line.split()[0] == expected["part"]
        assert line.endswith("left out: 0 s were over")


@pytest.mark.slow
def test_without_a_gpu_it_is_rejected_in_one_line(tmp_path):
    done = run(cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "gpu.py: TensorFlow must find a GPU, or --tiny must be given: "
        "CPU (no GPU answers)"
    )
    assert done.stdout == ""


@pytest.mark.slow
def test_an_unknown_part_is_rejected_in_one_line(tmp_path):
    done = run("equals", cwd=tmp_path)
    assert done.returncode == 2
    known = ", ".join(gpu.PARTS)
    assert done.stderr == f"gpu.py: PART must be one of {known}. Received: equals\n"


def test_what_is_most_wanted_comes_first_and_there_is_time_for_all_of_it():
    tiny = gpu.pieces(gpu.PARTS, tiny=True)
    large = gpu.pieces(gpu.PARTS, tiny=False)
    for pieces in (tiny, large):
        assert list(dict.fromkeys(piece.part for piece in pieces)) == list(gpu.PARTS)
    assert gpu.PARTS[:3] == ("found", "attention", "large")
    assert sum(piece.seconds for piece in large) <= gpu.LIMIT
    first_parts = gpu.PARTS[: gpu.PARTS.index("peers") + 1]
    assert sum(piece.seconds for piece in gpu.pieces(first_parts, False)) <= 600


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "arguments", "seconds", "values", "failure"),
    [
        ("builtins:dict", {"a": 1, "b": 2}, 60, ["a", "b"], ""),
        ("os:abort", {}, 60, [], "killed by SIGABRT"),
        ("signal:pause", {}, 2, [], "took longer than 2 s"),
        (
            "math:sqrt",
            {},
            60,
            [],
            "TypeError: math.sqrt() takes exactly one argument (0 given)",
        ),
    ],
)
def test_how_a_process_ends_is_returned(
    monkeypatch, function, arguments, seconds, values, failure
):
    monkeypatch.setattr(children, "start_methods", ["spawn"])
    assert children.run(function, arguments, seconds) == (values, failure)


@pytest.mark.slow
def test_what_a_process_has_started_ends_with_it(monkeypatch):
    monkeypatch.setattr(children, "start_methods", ["spawn"])
    sleeping = ["sleep", f"9{os.getpid()}"]
    _, failure = children.run("subprocess:Popen", {"args": sleeping}, 60)
    # It yields nothing, but it has started a process.
    assert failure.startswith("TypeError")
    commands = [process.info["cmdline"] for process in psutil.process_iter(["cmdline"])]
    assert sleeping not in commands


@pytest.mark.slow
def test_a_micro_batch_that_does_not_fit_is_halved(monkeypatch):
    from benchmarks import throughput

    tried = []

    def updates(model, batch, micro, xla):
        def step():
            if len(batch[0]) > 4 * 16:
                raise tf.errors.ResourceExhaustedError(None, None, "no memory")
            return {"loss": tf.constant(1.0)}

        tried.append(micro)
        return step

    monkeypatch.setattr(throughput, "updates", updates)
    workload = on_gpu("transformer10m")
    micro, rates = throughput._rates(workload, None, False, 0.01)
    assert (micro, tried) == (16, [64, 32, 16])
    assert len(rates) == throughput.ROUNDS


@pytest.mark.parametrize(
    ("larger", "growth", "met"),
    [
        (104_500_000, 0.5, True),
        (100_500_000, 0.5, True),
        (101_900_000, 1.9, False),
        (106_000_000, 2.0, False),
    ],
)
def test_the_batch_is_subtracted_if_it_is_on_the_device(larger, growth, met):
    fewer = [MemoryUse(100_000_000, 1_000_000)]
    more = [MemoryUse(larger, 5_000_000)]
    (figure,) = COMPARISONS["memory"]("resnet50", fewer, more, False)
    assert figure.values == pytest.approx([growth])
    assert figure.met is met


def test_what_differs_is_found():
    def compared(part, first, second):
        figures = COMPARISONS[part]("", first, second, False)
        return [figure.met for figure in figures]

    zeros = np.zeros((2, 2))
    reference = [Trained("a", [zeros, np.ones(3)]), Trained("b", [np.zeros(1)])]
    moved = [
        Trained("a", [zeros, np.array([1, 1, 1 + 2e-10])]),
        Trained("b", [np.array([-0.0])]),
    ]
    diverged = [
        Trained("a", [zeros, np.array([np.nan, 1, 1])]),
        Trained("b", [np.zeros(1)]),
    ]
    assert compared("equal", reference, moved) == [False, True]
    assert compared("equal", reference, diverged) == [False, True]
    assert compared("repeatable", reference, moved) == [False, False]
    assert compared("repeatable", reference, reference) == [True, True]


@pytest.mark.slow
def test_flops_of_a_transformer():
    """No sum, norm or look-up counts.

    A block of width 8 has 4 projections, 2 dense layers of 8 × 32, and 2 products. As
    every product comes after the embedding, which learns, each has both gradients.
    """
    model = keras_models.transformer(
        layers=3, width=8, heads=2, vocabulary=11, length=5
    )
    block = 4 * 8 * 8 + 2 * 8 * 32 + 2 * 5 * 8
    adds = 5 * (3 * block + 8 * 11)
    x = np.zeros((2, 5), np.int32)
    assert training_flops(model, keras_models.loss(), (x, x)) == (6 * adds, [])


def bottlenecks(inputs, width, side, blocks, strides):
    """Return the multiply-adds of a stage.

    Its first block strides in its 3 × 3 and has a shortcut of 1 × 1.
    """
    before_stride = inputs * width * (side * strides) ** 2
    after_stride = (9 * width * width + width * 4 * width) * side**2
    shortcut = inputs * 4 * width * side**2
    other = (4 * width * width + 9 * width * width + width * 4 * width) * side**2
    return before_stride + after_stride + shortcut + (blocks - 1) * other


@pytest.mark.slow
def test_flops_of_resnet_50():
    first = 7 * 7 * 3 * 64 * 112**2
    stages = (
        bottlenecks(64, 64, 56, 3, 1)
        + bottlenecks(256, 128, 28, 4, 2)
        + bottlenecks(512, 256, 14, 6, 2)
        + bottlenecks(1024, 512, 7, 3, 2)
    )
    adds = first + stages + 2048 * 1000
    # This variant is known for so many; He et al. 2015 stride in the 1 × 1: 3.8.
    assert adds == pytest.approx(4.09e9, rel=1e-3)

    model = keras_models.resnet(50, 224, 1000)
    x = np.zeros((2, 224, 224, 3), np.float32)
    y = np.zeros(2, np.int32)
    # The first convolution has no gradient by the image.
    expected = 6 * adds - 2 * first
    assert training_flops(model, keras_models.loss(), (x, y)) == (expected, [])

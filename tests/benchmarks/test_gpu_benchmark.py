"""benchmarks/gpu.py runs every piece on a CPU with tiny sizes; FLOPs of its networks are those of a person."""

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

from benchmarks import children, gpu, models, networks
from pipeline.accumulation import training_flops
from tests.running import ROOT

TIMED = {"found", "train", "beside", "sizes", "layers", "profile", "update", "peak"}


def run(*arguments, cwd):
    """As a file, where nothing says where the project is, on the CPU."""
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


@pytest.mark.slow
def test_every_part_has_its_figures(tmp_path):
    path = tmp_path / "result.json"
    done = run("--tiny", "--output", str(path), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(path.read_text())
    assert result["missing"] == []
    assert {
        "device",
        "processors",
        "platform",
        "versions",
        "begun",
        "seconds",
        "options",
    } < set(result)
    figures = result["figures"]
    assert {figure["part"] for figure in figures} == set(gpu.PARTS)
    assert all(
        figure["values"] and all(map(math.isfinite, figure["values"]))
        for figure in figures
    )
    timed = [f for f in figures if f["part"] in TIMED and f["subject"] != "PyTorch"]
    assert all(min(figure["values"]) > 0 for figure in timed)
    assert {
        (f["part"], f["subject"]): f["met"] for f in figures if f["met"] is not None
    } == {
        **{(part, "transformer"): True for part in ("equal", "repeatable")},
        **{("two", "CPU"): True, ("limits", "out of memory"): True},
    }
    assert (tmp_path / "profile_4.trace.json.gz").exists()
    # A line of JSON for the device, then one after each piece, in order.
    first, *lines = [
        json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")
    ]
    assert first["on_gpu"] is False
    assert [line["piece"].split()[0] for line in lines] == [
        piece.part for piece in gpu.pieces(gpu.PARTS, tiny=True)
    ]
    assert sum(len(line["figures"]) for line in lines) == len(figures)
    # The table is what comes last, a line for each figure.
    *_, head, _ = done.stdout.splitlines()[: -len(figures)]
    assert head.split()[:4] == ["part", "of", "figure", "median"]
    for line, figure in zip(
        done.stdout.splitlines()[-len(figures) :], figures, strict=True
    ):
        assert line.startswith(figure["part"])
        assert figure["what"] in line


@pytest.mark.slow
def test_what_there_is_no_time_for_is_said_in_the_table(tmp_path):
    path = tmp_path / "result.json"
    done = run(
        "memory",
        "large",
        "--tiny",
        "--seconds-limit",
        "0",
        "--output",
        str(path),
        cwd=tmp_path,
    )
    assert done.returncode == 1, done.stderr
    missing = json.loads(path.read_text())["missing"]
    assert [(line["part"], line["subject"]) for line in missing] == [
        *(("memory", f"transformer10m factor {factor}") for factor in (2, 64)),
        ("large", ""),
    ]
    for line, expected in zip(done.stdout.splitlines()[-3:], missing, strict=True):
        assert line.split()[0] == expected["part"]
        assert line.endswith("left out: 0 s were over")


@pytest.mark.slow
def test_without_a_gpu_it_is_refused_in_one_line(tmp_path):
    done = run(cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "gpu.py: TensorFlow must find a GPU, or --tiny must be given: CPU (no GPU answers)"
    )
    assert done.stdout == ""


@pytest.mark.slow
def test_an_unknown_part_is_refused_in_one_line(tmp_path):
    done = run("equals", cwd=tmp_path)
    assert done.returncode == 2
    assert (
        done.stderr
        == f"gpu.py: PART must be one of {', '.join(gpu.PARTS)}. Received: equals\n"
    )


def test_what_is_most_wanted_comes_first_and_there_is_time_for_all_of_it():
    tiny, large = (gpu.pieces(gpu.PARTS, tiny=small) for small in (True, False))
    for known in (tiny, large):
        assert list(dict.fromkeys(piece.part for piece in known)) == list(gpu.PARTS)
    assert gpu.PARTS[:4] == ("found", "train", "equal", "repeatable")
    assert sum(piece.seconds for piece in large) <= gpu.LIMIT


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "arguments", "found", "why"),
    [
        ("builtins:dict", {"a": 1, "b": 2}, ["a", "b"], ""),
        ("os:abort", {}, [], "killed by SIGABRT"),
        ("signal:pause", {}, [], "took longer than 2 s"),
        (
            "math:sqrt",
            {},
            [],
            "TypeError: math.sqrt() takes exactly one argument (0 given)",
        ),
    ],
)
def test_how_a_process_ends_is_said(monkeypatch, function, arguments, found, why):
    monkeypatch.setattr(children, "methods", ["spawn"])
    assert children.run(function, arguments, 2 if "longer" in why else 60) == (
        found,
        why,
    )


@pytest.mark.slow
def test_what_a_process_has_started_ends_with_it(monkeypatch):
    monkeypatch.setattr(children, "methods", ["spawn"])
    sleeping = ["sleep", f"9{os.getpid()}"]
    _, why = children.run("subprocess:Popen", {"args": sleeping}, 60)
    assert why.startswith(
        "TypeError"
    )  # it yields nothing, but it has started a process
    assert not any(
        process.info["cmdline"] == sleeping
        for process in psutil.process_iter(["cmdline"])
    )


@pytest.mark.slow
def test_a_micro_batch_that_does_not_fit_is_halved(monkeypatch):
    from benchmarks import gpu_workloads, throughput

    tried = []

    def updates(model, batch, micro, xla):
        def step():
            if len(batch[0]) > 4 * 16:
                raise tf.errors.ResourceExhaustedError(None, None, "no memory")
            return {"loss": tf.constant(1.0)}

        tried.append(micro)
        return step

    monkeypatch.setattr(throughput, "updates", updates)
    micro, rates = throughput._rates(
        gpu_workloads.workload("transformer10m", tiny=False), None, False, 0.01
    )
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
def test_the_batch_is_taken_off_where_it_lies_on_the_device(larger, growth, met):
    (figure,) = gpu.COMPARED["memory"](
        "resnet50", [(100_000_000, 1_000_000)], [(larger, 5_000_000)], False
    )
    assert figure.values == pytest.approx([growth])
    assert figure.met is met


def test_what_differs_is_found():
    one = [("a", [np.zeros((2, 2)), np.ones(3)]), ("b", [np.zeros(1)])]
    other = [
        ("a", [np.zeros((2, 2)), np.array([1, 1, 1 + 2e-10])]),
        ("b", [np.array([-0.0])]),
    ]
    assert [figure.met for figure in gpu.COMPARED["equal"]("", one, other, False)] == [
        False,
        True,
    ]
    nan = [("a", [np.zeros((2, 2)), np.array([np.nan, 1, 1])]), ("b", [np.zeros(1)])]
    assert [figure.met for figure in gpu.COMPARED["equal"]("", one, nan, False)] == [
        False,
        True,
    ]
    assert [
        figure.met for figure in gpu.COMPARED["repeatable"]("", one, other, False)
    ] == [False, False]
    assert [
        figure.met for figure in gpu.COMPARED["repeatable"]("", one, one, False)
    ] == [True, True]


@pytest.mark.slow
def test_flops_of_a_transformer():
    """No sum, norm or look-up counts. Of a block of width 8: 4 projections, 2 dense layers of 8 × 32, 2 products.

    As every product comes after the embedding, which learns, each has both gradients.
    """
    model = networks.transformer(layers=3, width=8, heads=2, vocabulary=11, length=5)
    adds = 5 * (3 * (4 * 8 * 8 + 2 * 8 * 32 + 2 * 5 * 8) + 8 * 11)
    x = np.zeros((2, 5), np.int32)
    assert training_flops(model, models.loss(), (x, x)) == (6 * adds, [])


def bottlenecks(inputs, width, side, blocks, strides):
    "Multiply-adds of a stage, whose first block strides in its 3 × 3 and has a shortcut of 1 × 1."
    first = (
        inputs * width * (side * strides) ** 2
        + (9 * width * width + width * 4 * width) * side**2
    )
    shortcut = inputs * 4 * width * side**2
    others = (4 * width * width + 9 * width * width + width * 4 * width) * side**2
    return first + shortcut + (blocks - 1) * others


@pytest.mark.slow
def test_flops_of_resnet_50():
    stages = (
        (64, 64, 56, 3, 1),
        (256, 128, 28, 4, 2),
        (512, 256, 14, 6, 2),
        (1024, 512, 7, 3, 2),
    )
    adds = (
        7 * 7 * 3 * 64 * 112**2
        + sum(bottlenecks(*stage) for stage in stages)
        + 2048 * 1000
    )
    assert adds == pytest.approx(
        4.09e9, rel=1e-3
    )  # as is said of this variant; He et al. 2015 stride in the 1 × 1: 3.8
    model = networks.resnet(50, 224, 1000)
    first = 7 * 7 * 3 * 64 * 112**2  # has no gradient by the image
    batch = np.zeros((2, 224, 224, 3), np.float32), np.zeros(2, np.int32)
    assert training_flops(model, models.loss(), batch) == (6 * adds - 2 * first, [])

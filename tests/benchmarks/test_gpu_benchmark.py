"""benchmarks/gpu.py runs on a CPU with tiny sizes, and counts FLOPs as a person would."""

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
from keras import Input, Model, layers

from benchmarks import children, flops, gpu, networks
from tests.running import ROOT

TIMED = {"peak", "update", "logging", "auto", *gpu.NETWORKS}


def run(*arguments, cwd, timeout=400):
    """As a file, where nothing says where the project is, on the CPU."""
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), *arguments]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "PYTHONPATH": ""}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout)


@pytest.mark.slow
def test_every_part_has_its_figures(tmp_path):
    path = tmp_path / "result.json"
    done = run("--tiny", "--output", str(path), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(path.read_text())
    assert result["missing"] == []
    assert {"device", "processors", "platform", "versions", "begun", "seconds", "options"} < set(result)
    figures = result["figures"]
    assert {figure["part"] for figure in figures} == set(gpu.PARTS)
    assert all(figure["values"] and all(map(math.isfinite, figure["values"])) for figure in figures)
    assert all(min(figure["values"]) > 0 for figure in figures if figure["part"] in TIMED)
    assert {(f["part"], f["subject"]): f["met"] for f in figures if f["met"] is not None} == {
        (part, name): True for part in ("equal", "repeatable") for name in ("resnet18", "transformer")
    }
    for name in gpu.NETWORKS:
        known = {figure["subject"] for figure in figures if figure["part"] == name}
        assert known == ({*gpu.PRECISIONS, "float16, XLA"} if name == "transformer10m" else {"bfloat16"})
    # The table is what comes last, a line for each figure.
    *_, head, _ = done.stdout.splitlines()[: -len(figures)]
    assert head.split()[:4] == ["part", "of", "figure", "median"]
    for line, figure in zip(done.stdout.splitlines()[-len(figures) :], figures, strict=True):
        assert line.startswith(figure["part"])
        assert figure["what"] in line


@pytest.mark.slow
def test_what_there_is_no_time_for_is_said_in_the_table(tmp_path):
    path = tmp_path / "result.json"
    done = run("memory", "resnet50", "--tiny", "--seconds-limit", "0", "--output", str(path), cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    missing = json.loads(path.read_text())["missing"]
    assert [(line["part"], line["subject"]) for line in missing] == [
        *(("memory", f"transformer10m factor {factor}") for factor in (2, 64)),
        ("resnet50", "bfloat16"),
    ]
    for line, expected in zip(done.stdout.splitlines()[-3:], missing, strict=True):
        assert line.split()[0] == expected["part"]
        assert line.endswith("left out: 0 s were over")


@pytest.mark.slow
def test_without_a_gpu_it_is_refused_in_one_line(tmp_path):
    done = run(cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "gpu.py: TensorFlow must find a GPU, or --tiny must be given."
    assert done.stdout == ""


@pytest.mark.slow
def test_an_unknown_part_is_refused_in_one_line(tmp_path):
    done = run("equals", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == f"gpu.py: PART must be one of {', '.join(gpu.PARTS)}. Received: equals\n"


def test_a_tiny_run_has_every_part_and_the_large_one_every_network_in_every_precision():
    tiny, large = (gpu.pieces(gpu.PARTS, tiny=small) for small in (True, False))
    assert {piece.part for piece in tiny} == set(gpu.PARTS)
    assert sum(piece.part in gpu.NETWORKS for piece in large) == len(gpu.NETWORKS) * len(gpu.PRECISIONS) * 2
    assert [piece.part for piece in large if "resnet50" in piece.subject] == ["memory", "memory", "update"]


def test_what_is_expected_of_all_parts_is_under_eight_minutes():
    assert sum(piece.seconds for piece in gpu.pieces(gpu.PARTS, tiny=False)) <= gpu.LIMIT < 8 * 60
    assert {piece.part for piece in gpu.pieces(gpu.PARTS, tiny=False)} == set(gpu.PARTS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "arguments", "found", "why"),
    [
        ("builtins:dict", {"a": 1, "b": 2}, ["a", "b"], ""),
        ("os:abort", {}, [], "killed by SIGABRT"),
        ("signal:pause", {}, [], "took longer than 2 s"),
        ("math:sqrt", {}, [], "TypeError: math.sqrt() takes exactly one argument (0 given)"),
    ],
)
def test_how_a_process_ends_is_said(monkeypatch, function, arguments, found, why):
    monkeypatch.setattr(children, "methods", ["spawn"])
    assert children.run(function, arguments, 2 if "longer" in why else 60) == (found, why)


@pytest.mark.slow
def test_what_a_process_has_started_ends_with_it(monkeypatch):
    monkeypatch.setattr(children, "methods", ["spawn"])
    sleeping = ["sleep", f"9{os.getpid()}"]
    _, why = children.run("subprocess:Popen", {"args": sleeping}, 60)
    assert why.startswith("TypeError")  # it yields nothing, but it has started a process
    assert not any(process.info["cmdline"] == sleeping for process in psutil.process_iter(["cmdline"]))


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
    micro, rates = throughput._rates(gpu_workloads.workload("transformer10m", tiny=False), None, False, 0.01)
    assert (micro, tried) == (16, [64, 32, 16])
    assert len(rates) == throughput.ROUNDS


@pytest.mark.parametrize(
    ("larger", "growth", "met"),
    [(104_500_000, 0.5, True), (100_500_000, 0.5, True), (101_900_000, 1.9, False), (106_000_000, 2.0, False)],
)
def test_the_batch_is_taken_off_where_it_lies_on_the_device(larger, growth, met):
    (figure,) = gpu.COMPARED["memory"]("resnet50", [(100_000_000, 1_000_000)], [(larger, 5_000_000)], False)
    assert figure.values == pytest.approx([growth])
    assert figure.met is met


def test_what_differs_is_found():
    one = [("a", [np.zeros((2, 2)), np.ones(3)]), ("b", [np.zeros(1)])]
    other = [("a", [np.zeros((2, 2)), np.array([1, 1, 1 + 2e-10])]), ("b", [np.array([-0.0])])]
    assert [figure.met for figure in gpu.COMPARED["equal"]("", one, other, False)] == [False, True]
    nan = [("a", [np.zeros((2, 2)), np.array([np.nan, 1, 1])]), ("b", [np.zeros(1)])]
    assert [figure.met for figure in gpu.COMPARED["equal"]("", one, nan, False)] == [False, True]
    assert [figure.met for figure in gpu.COMPARED["repeatable"]("", one, other, False)] == [False, False]
    assert [figure.met for figure in gpu.COMPARED["repeatable"]("", one, one, False)] == [True, True]


def forward(layer, *shapes):
    inputs = [Input(shape) for shape in shapes]
    return flops.of_forward(Model(inputs, layer(*inputs)))


COUNTED = {
    "dense": (lambda: forward(layers.Dense(5), (3,)), 2 * 3 * 5),
    "dense at each place": (lambda: forward(layers.Dense(5), (7, 3)), 7 * 2 * 3 * 5),
    # 9 × 8 at strides 2, padded: 5 × 4 places.
    "convolution": (lambda: forward(layers.Conv2D(6, 3, strides=2, padding="same"), (9, 8, 4)), 2 * 5 * 4 * 6 * 9 * 4),
    "grouped convolution": (lambda: forward(layers.Conv2D(6, 3, groups=2), (5, 5, 4)), 2 * 3 * 3 * 6 * 9 * 2),
    "einsum": (lambda: forward(layers.EinsumDense("abc,cde->abde", (7, 2, 3)), (7, 4)), 2 * 7 * 4 * 2 * 3),
    "einsum with an ellipsis": (lambda: forward(layers.EinsumDense("...x,xy->...y", 6), (7, 4)), 2 * 7 * 4 * 6),
    # 5 queries of width 8 to 7 values of width 6, two heads of 3 and 4: projections, two products, output of width 8.
    "attention": (
        lambda: forward(layers.MultiHeadAttention(2, 3, value_dim=4), (5, 8), (7, 6)),
        2 * (5 * 8 * 6 + 7 * 6 * 6 + 7 * 6 * 8 + 2 * 5 * 7 * 3 + 2 * 5 * 7 * 4 + 5 * 8 * 8),
    ),
    "a model in a model": (lambda: forward(Model(i := Input((3,)), layers.Dense(5)(i)), (3,)), 2 * 3 * 5),
    # No sum, norm or look-up counts. Of a block of width 8: 4 projections, 2 dense layers of 8 × 32, 2 products.
    "transformer": (
        lambda: flops.of_forward(networks.transformer(layers=3, width=8, heads=2, vocabulary=11, length=5)),
        2 * 5 * (3 * (4 * 8 * 8 + 2 * 8 * 32 + 2 * 5 * 8) + 8 * 11),
    ),
}


@pytest.mark.parametrize("what", COUNTED)
def test_flops_are_those_that_are_counted_by_hand(what):
    count, expected = COUNTED[what]
    assert count() == expected


def bottlenecks(inputs, width, side, blocks, strides):
    "Multiply-adds of a stage, whose first block strides in its 3 × 3 and has a shortcut of 1 × 1."
    first = inputs * width * (side * strides) ** 2 + (9 * width * width + width * 4 * width) * side**2
    shortcut = inputs * 4 * width * side**2
    others = (4 * width * width + 9 * width * width + width * 4 * width) * side**2
    return first + shortcut + (blocks - 1) * others


@pytest.mark.slow
def test_flops_of_resnet_50():
    stages = ((64, 64, 56, 3, 1), (256, 128, 28, 4, 2), (512, 256, 14, 6, 2), (1024, 512, 7, 3, 2))
    adds = 7 * 7 * 3 * 64 * 112**2 + sum(bottlenecks(*stage) for stage in stages) + 2048 * 1000
    assert adds == pytest.approx(
        4.09e9, rel=1e-3
    )  # as is said of this variant; He et al. 2015 stride in the 1 × 1: 3.8
    model = networks.resnet(50, 224, 1000)
    assert flops.of_forward(model) == 2 * adds
    assert flops.of_training(model) == 6 * adds


def test_what_cannot_be_counted_is_refused():
    with pytest.raises(TypeError, match=r"no FLOPs are known for a layer of the kind LSTM: lstm"):
        forward(layers.LSTM(4), (5, 3))

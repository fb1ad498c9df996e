"""The benchmarks run and say what they found; how fast anything is, is not asserted here."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import __main__, memory, processes
from benchmarks.processes import PEERS
from benchmarks.workloads import NAMES, examples

ROOT = Path(__file__).parents[2]
TINY = ("--models", "mlp", "--rounds", "2", "--seconds", "0.01", "--starts", "1")
TRACKED = ("--tracked-rounds", "2", "--tracked-seconds", "0.05")


def bench(*arguments):
    command = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=600
    )


@pytest.mark.slow
def test_a_figure_for_every_contender_in_the_table_and_in_the_json(tmp_path):
    path = tmp_path / "result.json"
    done = bench(
        "update", "tracking", "checkpoints", *TINY, *TRACKED, "--output", str(path)
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(path.read_text())
    assert {
        "device",
        "processors",
        "platform",
        "versions",
        "begun",
        "seconds",
        "options",
    } < set(result)
    found = {
        (figure["part"], figure["subject"], figure["what"])
        for figure in result["figures"]
    }
    assert found == {
        ("update", "mlp", "update ÷ limit, calls"),
        ("update", "mlp", "update ÷ limit, strict"),
        ("update", "mlp", "with noise scale, 1 in 10 ÷ without"),
        ("update", "mlp", "time accumulated ÷ at factor 1"),
        ("update", "mlp", "speed at factor 32 ÷ at factor 1, same micro-batch"),
        ("tracking", "mlp", "tracked ÷ bare"),
        ("tracking", "mlp", "CPU of a logged update"),
        ("checkpoints", "mlp", "stall"),
        ("checkpoints", "mlp", "cost of one"),
        ("checkpoints", "mlp", "every five minutes ÷ bare"),
    }
    for figure in result["figures"]:
        assert all(math.isfinite(value) for value in figure["values"])
        assert figure["what"] == "cost of one" or all(
            value > 0 for value in figure["values"]
        )
        first, third = figure["quartiles"]
        assert first <= figure["median"] <= third
        assert figure["what"] in done.stdout
    ratios = [
        figure
        for figure in result["figures"]
        if not figure["unit"] and figure["part"] != "checkpoints"
    ]
    assert all(
        len(figure["values"]) == 2 and len(figure["best"]) == 2 for figure in ratios
    )


@pytest.mark.soak
def test_the_start_is_measured_on_a_new_and_on_an_existing_store(tmp_path):
    path = tmp_path / "result.json"
    done = bench("startup", *TINY, "--output", str(path))
    assert done.returncode == 0, done.stderr
    figures = json.loads(path.read_text())["figures"]
    assert [figure["subject"] for figure in figures] == [
        "--help",
        "wrong config",
        "new store",
        "existing store",
    ]
    assert all(
        len(figure["values"]) == 1 and math.isfinite(figure["median"])
        for figure in figures
    )


@pytest.mark.slow
def test_an_unknown_part_is_refused(tmp_path):
    done = bench("updates", "--output", str(tmp_path / "result.json"))
    assert done.returncode == 2
    assert (
        "PART must be one of startup, main, auto, memory, update, peers, "
        in done.stderr
    )
    assert "Received: updates" in done.stderr


@pytest.mark.slow
def test_every_peer_that_is_there_takes_turns(tmp_path):
    path = tmp_path / "result.json"
    done = bench("peers", *TINY, "--output", str(path))
    assert done.returncode == 0, done.stderr
    figures = {
        figure["what"]: figure for figure in json.loads(path.read_text())["figures"]
    }
    others = {"train ÷ fit", "train ÷ fit, an update an execution"}
    if PEERS.exists():
        others |= {"train ÷ PyTorch", "train ÷ Accelerate", "train ÷ Lightning"}
    else:
        assert "`make peers` sets them up" in done.stderr
    assert set(figures) == others | {"train ÷ best peer"}
    assert all(
        len(figure["values"]) == 2 and figure["median"] > 0
        for figure in figures.values()
    )
    assert figures["train ÷ best peer"]["median"] == min(
        figures[what]["median"] for what in others
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_workload_in_pytorch_is_that_in_keras(name):
    """Weight for weight, and with the same number of outputs: the first loss of either is about the logarithm."""
    if not PEERS.exists():
        pytest.skip(
            "PyTorch is compared with where `make peers` has set it up, which takes 6 GB"
        )
    from benchmarks import models

    count = 2
    code = (
        "import sys, torch; from benchmarks.pytorch import networks; from benchmarks.workloads import examples, SHAPES;"
        "name, count = sys.argv[1], int(sys.argv[2]); model = networks.build(name);"
        "x, y = map(torch.from_numpy, examples(name, count));"
        "x = x.permute(0, 3, 1, 2) if name in networks.IMAGES else x; outputs = model(x);"
        "print(sum(p.numel() for p in model.parameters()), sorted(outputs.shape),"
        "torch.nn.functional.cross_entropy(outputs, y).item())"
    )
    printed = subprocess.run(
        [str(PEERS), "-c", code, name, str(count)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    weights, *shape, loss = re.findall(r"[\d.]+", printed)
    model = models.build(name)
    x, y = examples(name, count)
    outputs = model(x, training=True)
    assert int(weights) == models.weights(model)
    assert list(map(int, shape)) == sorted(outputs.shape)
    chance = math.log(outputs.shape[-1])
    assert float(loss) == pytest.approx(chance, rel=0.7)
    assert float(models.loss()(y, outputs)) == pytest.approx(chance, rel=0.7)


@pytest.mark.soak
def test_memory(monkeypatch):
    monkeypatch.setattr(memory, "FACTORS", (1, 64))
    *peaks, growth = memory.measure("mlp", 1)
    assert {(figure.what, figure.over) for figure in peaks} == {
        *(
            (what, size)
            for what in ("accumulated", "at factor 1")
            for size in (32, 2048)
        ),
        ("Keras' fit, accumulated", 2048),
    }
    assert growth.what == "growth from factor 1 to 64 beyond the batch"
    assert all(math.isfinite(figure.median) for figure in (*peaks, growth))


@pytest.mark.soak
def test_replicas_and_the_main_job(tmp_path, monkeypatch):
    """In this process. Each job runs once, which makes its store; how a command is timed the start's benchmark has."""
    path = tmp_path / "result.json"
    monkeypatch.setattr(processes, "seconds", lambda *_: 2.0)
    monkeypatch.setattr(
        sys, "argv", ["benchmarks", "replicas", "main", *TINY, "--output", str(path)]
    )
    __main__.main()
    figures = json.loads(path.read_text())["figures"]
    whats = {figure["what"] for figure in figures}
    assert whats >= {
        "speed of 2 logical ÷ 1",
        "speed of 4 logical ÷ 1",
        "start to end",
        "speed ÷ Keras with MLflow",
    }
    assert ("speed ÷ Lightning with MLflow" in whats) == PEERS.exists()
    assert all(math.isfinite(figure["median"]) for figure in figures)


@pytest.mark.slow
def test_the_report_fills_the_page_and_draws(tmp_path):
    from benchmarks import report
    from benchmarks.figures import Figure

    figures = [
        Figure("peers", "mlp", "train ÷ fit", [1.5, 1.6], best={"train": 1.0}),
        Figure("peers", "cnn", "train ÷ fit", [0.9, 0.95]),
        Figure(
            "peers", "mlp", "train ÷ best peer", [1.5, 1.6], at_least=1.0, note="fit"
        ),
        Figure(
            "peers", "cnn", "train ÷ best peer", [0.9, 0.95], at_least=1.0, note="fit"
        ),
        Figure("startup", "--help", "to the answer", [0.5], "s", at_most=1.0),
        *(
            Figure("memory", "cnn", what, [100.0 * size], "MiB", over=size)
            for what in ("accumulated", "at factor 1", "Keras' fit, accumulated")
            for size in (32, 64)
        ),
    ]
    result = {
        **{
            "begun": 0.0,
            "seconds": 600.0,
            "device": "CPU",
            "processors": 2,
            "processor": "a processor",
        },
        **{
            "platform": "Linux",
            "versions": {"keras": "3.15.1"},
            "figures": [each.as_dict() for each in figures],
        },
    }
    (tmp_path / "result.json").write_text(json.dumps(result))
    page = tmp_path / "performance.md"
    page.write_text(f"before\n\n{report.BEGIN}\nold\n{report.END}\n\nafter\n")
    command = [
        sys.executable,
        "-m",
        "benchmarks.report",
        str(tmp_path / "result.json"),
        "--docs",
        str(tmp_path),
    ]
    for _ in range(2):  # the same again
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert page.read_text().splitlines() == [
        *("before", "", report.BEGIN, ""),
        "Measured on 1 January 1970 in 10 minutes with `make bench`, on CPU: 2 cores of a processor, Linux; "
        "keras 3.15.1. Of 3 targets 1 were missed. All figures are in `docs/bench.json`.",
        "",
        "| part | figure | target | mlp | cnn |  |",
        "| --- | --- | --- | --- | --- | --- |",
        "| peers | train ÷ fit |  | 1.55 [1.52…1.58] | 0.93 [0.91…0.94] |  |",
        "| peers | train ÷ best peer | ≥ 1.00 | 1.55 [1.52…1.58], fit | 0.93 [0.91…0.94], fit, **missed** |  |",
        "| startup | --help: to the answer | ≤ 1.00 s |  |  | 0.50 s |",
        "",
        *report.PICTURES.splitlines(),
        *("", report.END, "", "after"),
    ]
    assert (tmp_path / "bench.json").read_bytes() == (
        tmp_path / "result.json"
    ).read_bytes()
    for picture in ("bench_peers.png", "bench_memory.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
    page.write_text("no place for it\n")
    assert (
        "needs a line"
        in subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stderr
    )


def test_the_figure_over_all_models_is_a_geometric_mean():
    from benchmarks import peers
    from benchmarks.figures import BEST, Figure

    best = [
        Figure("peers", name, BEST, [value])
        for name, value in (("mlp", 2.0), ("cnn", 0.5), ("wide", 8.0))
    ]
    other = Figure("peers", "mlp", "train ÷ fit", [100.0])
    (mean,) = peers.overall([*best, other])
    assert mean.median == pytest.approx(2.0)
    assert (mean.subject, mean.met) == ("3 models", True)
    assert peers.overall([best[0], other]) == []


def test_quartiles_and_targets():
    from benchmarks.figures import Figure, table

    figure = Figure(
        "update",
        "mlp",
        "a ÷ b",
        [1.0, 3.0, 2.0, 4.0, 5.0],
        best={"a": 1234.0},
        at_least=3.0,
    )
    assert (figure.median, figure.quartiles, figure.met) == (3.0, (2.0, 4.0), True)
    missed = Figure("startup", "--help", "to the answer", [1.5], "s", at_most=1.0)
    assert (missed.quartiles, missed.met) == ((1.5, 1.5), False)
    assert Figure("tracking", "mlp", "c ÷ d", [1.0]).met is None
    head, _, *rows = table([figure, missed]).splitlines()
    assert head.split()[:4] == ["part", "of", "figure", "median"]
    assert rows[0].split()[-2:] == ["a", "1,234"]
    assert "MISSED" in rows[1]


def test_contenders_take_turns_and_their_errors_are_not_lost():
    from benchmarks.turns import Coroutine, alternate

    order = []

    def body(name):
        def run(pause):
            while True:
                order.append(name)
                pause()

        return Coroutine(run)

    contenders = {"a": body("a"), "b": body("b")}
    times = alternate(contenders, 3)
    for contender in contenders.values():
        contender.close()
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert {name: len(values) for name, values in times.items()} == {"a": 3, "b": 3}

    def broken(pause):
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        Coroutine(broken)()


CHILD = """
import sys
from benchmarks.child import Child
child = Child()
print("what a library prints")
child.ready(weights=7)
for update in range(5):
    open(sys.argv[1], "a").write("x")
    child.updated()
sys.exit("no more updates")
"""


@pytest.mark.slow
def test_a_contender_in_a_process_of_its_own(tmp_path):
    from benchmarks.processes import Process

    done = tmp_path / "done"
    process = Process([sys.executable, "-c", CHILD, str(done)], 2)
    assert process.said == {"weights": 7}
    process()
    assert done.read_text() == "xx"
    process()
    assert done.read_text() == "xxxx"
    with pytest.raises(RuntimeError, match=r"ended with 1: (.*\n)*no more updates"):
        process()
    with pytest.raises(RuntimeError, match="no more updates"):
        process()
    with pytest.raises(RuntimeError, match=r"No module named benchmarks\.nothing"):
        Process([sys.executable, "-m", "benchmarks.nothing"], 1)
    waiting = Process([sys.executable, "-c", CHILD, str(done)], 1)
    waiting.close()
    assert done.read_text() == "xxxxx"

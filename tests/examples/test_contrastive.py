"""The example of a loss over the effective batch trains by the command on its top; `verify` tells what it is over."""

from __future__ import annotations

import ast
import shlex
import shutil

import pytest

from tests.parameters import mostly_slow
from tests.running import ROOT, Store, pipeline

PROJECT = ROOT / "examples" / "contrastive"
OWN = ("--config-dir", "conf", "experiment=towers")
BRIEF = (
    "training.epochs=null",
    "training.updates=3",
    "tracking.system_metrics=false",
    "tracking.log_model=false",
)


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(PROJECT, tmp_path / "contrastive")


@pytest.mark.slow
def test_it_learns(folder):
    text = (
        ast.get_docstring(
            ast.parse((PROJECT / "towers.py").read_text(encoding="utf-8"))
        )
        or ""
    )
    command = text.split("&& pipeline ")[1].splitlines()[0]
    pipeline(*shlex.split(command), "tracking.system_metrics=false", cwd=folder)
    run = Store(folder).run()
    assert run.data.params["training.loss_over"] == "effective_batch"
    assert run.data.metrics["val/loss"] < 1


@pytest.mark.soak
def test_verify_tells_what_the_loss_is_over(folder):
    said = pipeline("verify", *OWN, cwd=folder)
    assert said.stdout.splitlines()[1].endswith("are equal within rounding")
    said = pipeline("verify", *OWN, "training.loss_over=example", cwd=folder, status=2)
    assert (
        "training.loss_over must be effective_batch: info_nce is a loss of several examples at once"
        in said.stderr
    )
    code = (
        (folder / "towers.py")
        .read_text(encoding="utf-8")
        .replace("couples_examples", "unmarked")
    )
    (folder / "towers.py").write_text(code, encoding="utf-8")
    said = pipeline("verify", *OWN, "training.loss_over=example", cwd=folder, status=3)
    assert (
        "info_nce (InfoNCE): its loss of an example depends on the others"
        in said.stdout
    )


@pytest.mark.parametrize(
    "devices", mostly_slow(["replicas=2", "workers=2"], [], ["replicas=2"])
)
def test_replicas_and_workers_train_as_one_device(folder, devices):
    def losses(*given):
        pipeline(
            "train", *OWN, *BRIEF, "hardware.precision=float64", *given, cwd=folder
        )
        store = Store(folder)
        return list(store.history(store.run(), "train/loss").values())

    expected = losses("accumulation.factor=8")
    assert len(expected) == 3
    shutil.rmtree(folder / "mlruns")
    # 64 examples an update, whose sums are in another order: 1e-15 an update.
    given = (f"hardware.{devices}", "hardware.open_ports=true")
    assert losses("accumulation.factor=4", *given) == pytest.approx(expected, rel=1e-12)

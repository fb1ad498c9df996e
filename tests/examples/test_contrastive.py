"""The example of a loss over the effective batch trains by the command on its top.

`verify` tells what its loss is over.
"""

from __future__ import annotations

import shutil

import pytest

from tests.examples.commands import command_on_top_of
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
    command = command_on_top_of(PROJECT / "towers.py")
    pipeline(*command, "tracking.system_metrics=false", cwd=folder)
    run = Store(folder).run()
    assert run.data.params["training.loss_over"] == "effective_batch"
    assert run.data.metrics["val/loss"] < 1


@pytest.mark.soak
def test_verify_tells_what_the_loss_is_over(folder):
    equal = pipeline("verify", *OWN, cwd=folder)
    assert equal.stdout.splitlines()[1].endswith("are equal within rounding")

    over_examples = ("verify", *OWN, "training.loss_over=example")
    rejected = pipeline(*over_examples, cwd=folder, status=2)
    rule = (
        "training.loss_over must be effective_batch: info_nce is a loss that compares "
        "examples"
    )
    assert rule in rejected.stderr

    # Without its mark, the loss is found by what it computes.
    file = folder / "towers.py"
    code = file.read_text(encoding="utf-8").replace("couples_examples", "unmarked")
    file.write_text(code, encoding="utf-8")
    different = pipeline(*over_examples, cwd=folder, status=3)
    finding = (
        "info_nce (InfoNCE): its loss for an example depends on the other examples"
    )
    assert finding in different.stdout


@pytest.mark.parametrize(
    "devices", mostly_slow(["replicas=2", "workers=2"], [], ["replicas=2"])
)
def test_replicas_and_workers_train_as_one_device(folder, devices):
    def losses(*overrides):
        float64 = "hardware.precision=float64"
        pipeline("train", *OWN, *BRIEF, float64, *overrides, cwd=folder)
        store = Store(folder)
        return list(store.history(store.run(), "train/loss").values())

    expected = losses("accumulation.factor=8")
    assert len(expected) == 3
    shutil.rmtree(folder / "mlruns")
    # 64 examples an update, whose sums are in another order: 1e-15 an update.
    on_devices = losses(
        "accumulation.factor=4", f"hardware.{devices}", "hardware.open_ports=true"
    )
    assert on_devices == pytest.approx(expected, rel=1e-12)

"""The example of fine-tuning trains on from the weights of a run, and `verify` proves it.

The commands are those on its top.
"""

from __future__ import annotations

import ast
import shlex
import shutil

import keras
import numpy as np
import pytest

from tests.examples.commands import command_on_top_of
from tests.running import ROOT, Store, pipeline, python

PROJECT = ROOT / "examples" / "finetune"
HIDDEN = ("hidden_1", "hidden_2")
RANK = 4


def further_commands():
    """Return the command lines of the docstring, below the first, without continuation."""
    tree = ast.parse((PROJECT / "finetune.py").read_text(encoding="utf-8"))
    text = ast.get_docstring(tree).replace("\\\n", "")
    lines = [line.strip() for line in text.splitlines() if line.startswith("    ")]
    commands = [shlex.split(line) for line in lines]
    return [command for command in commands if command[0] in ("pipeline", "mlflow")]


def download(folder, command, run_id, to):
    """Run MLflow's command, as a user's shell does, and return the model."""
    command = [word.replace("RUN", run_id) for word in command[1:]]
    command[-1] = str(to)
    done = python(
        "-c",
        f"import sys; sys.argv = ['mlflow', *{command!r}]; "
        "from mlflow.cli import cli; cli()",
        cwd=folder,
        MLFLOW_TRACKING_URI="sqlite:///mlruns/mlflow.db",
    )
    _, err = done.communicate()
    assert done.returncode == 0, err
    return keras.models.load_model(to / "model/data/model.keras", compile=False)


def kernel_of(model, name):
    return model.get_layer(name).get_weights()[0]


@pytest.mark.slow
def test_frozen_layers_and_lora_begin_with_the_trained_weights(tmp_path):
    folder = tmp_path / "finetune"
    shutil.copytree(PROJECT, folder)
    frozen, mlflow, lora, verify = further_commands()
    store = Store(folder)
    quiet = "tracking.system_metrics=false"

    pipeline(*command_on_top_of(PROJECT / "finetune.py"), quiet, cwd=folder)
    base = store.run()
    assert base.data.metrics["val/accuracy"] > 0.97
    base_id = base.info.run_id
    trained = download(folder, mlflow, base_id, folder / "base")

    words = [word.replace("RUN", base_id) for word in frozen[1:]]
    pipeline(*words, quiet, cwd=folder)
    run = newest(store, base)
    assert run.data.metrics["val/accuracy"] > 0.85
    assert run.data.tags["start.run"] == base_id
    head_only = download(folder, mlflow, run.info.run_id, folder / "frozen")
    for name in HIDDEN:
        np.testing.assert_array_equal(
            kernel_of(head_only, name), kernel_of(trained, name)
        )
    assert np.any(kernel_of(head_only, "logits") != kernel_of(trained, "logits"))

    pipeline(*lora[1:], quiet, cwd=folder)
    run = newest(store, base, run)
    assert run.data.metrics["val/accuracy"] > 0.9
    adapted = download(folder, mlflow, run.info.run_id, folder / "lora")
    for name in HIDDEN:
        change = kernel_of(adapted, name) - kernel_of(trained, name)
        sizes = np.linalg.svd(change, compute_uv=False)
        # The product of the two matrices, up to rounding.
        assert sizes[RANK - 1] > 1e-3 > 1e-5 > sizes[RANK]

    done = pipeline(*verify[1:], cwd=folder)
    assert done.stdout.splitlines()[1].endswith("are equal within rounding")
    done = pipeline("verify", "--config-dir", "conf", "experiment=frozen", cwd=folder)
    assert done.stdout.splitlines()[1].endswith("are equal within rounding")


def newest(store, *others):
    """Return the one run that is not among the others."""
    known = {run.info.run_id for run in others}
    (run,) = [run for run in store.runs() if run.info.run_id not in known]
    return run

"""What callbacks log, through an interruption, a resume and a rerun, in a real store."""

from __future__ import annotations

import pytest

from tests.running import TINY, Store, one_process

MINE = """
from pathlib import Path
import keras, mlflow, pipeline

class Logs(keras.callbacks.Callback):
    def __init__(self, offset):
        super().__init__()
        self.offset = offset
        self.update = 0

    def get_state(self):
        return {"update": self.update}

    def set_state(self, state):
        self.update = state["update"]

    def on_train_batch_end(self, batch, logs=None):
        self.update += 1
        pipeline.log("mine", self.update + self.offset)
        failure = Path("fail")
        if self.update == 19 and failure.exists():
            failure.unlink()
            raise RuntimeError("once")

    def on_epoch_end(self, epoch, logs=None):
        logs["added"] = 10 * (epoch + 1)

class Fluent(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        mlflow.set_tracking_uri("sqlite:///stray.db")
        mlflow.log_metric("stray", 1.0)
        mlflow.end_run()
"""
RUN = (
    *("train", *TINY, "training.epochs=2", "training.checkpoint_every=10"),
    *("hardware.deterministic=true", "hydra.run.dir=run"),
    *(
        "+training.callbacks.mine._target_=mine.Logs",
        "+training.callbacks.mine.offset=0",
    ),
)
UPDATES = 24


@pytest.mark.slow
def test_what_a_callback_logs_is_there_once_after_a_resume_and_compared_by_rerun(
    tmp_path,
):
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "fail").touch()
    command = " ".join(RUN)
    answers = one_process({"train": command, "resume": "resume run"}, tmp_path)
    assert answers["train"]["status"] == 1, answers["train"]["err"]
    assert answers["resume"]["status"] == 0, answers["resume"]["err"]

    # Updates 11 to 19 were trained twice; `history` allows each step once.
    store = Store(tmp_path)
    run = store.run()
    updates = range(1, UPDATES + 1)
    assert store.history(run, "train/mine") == {step: step for step in updates}
    assert store.history(run, "train/added") == {12: 10.0, 24: 20.0}
    assert len(store.history(run, "train/loss")) == UPDATES

    again = f"rerun {run.info.run_id} --allow mine.Logs"
    lines = {"same": again, "other": f"{again} training.callbacks.mine.offset=1"}
    answers = one_process(lines, tmp_path)
    assert answers["same"]["status"] == 0, answers["same"]["err"]
    assert "bit-equal" in answers["same"]["err"]
    assert answers["other"]["status"] == 3, answers["other"]["err"]
    assert "train/mine at update 1: 1.0 then, 2.0 now" in answers["other"]["err"]


@pytest.mark.slow
def test_mlflow_s_own_functions_are_named_with_what_to_use(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    words = ("train", *TINY, "+training.callbacks.mine._target_=mine.Fluent")
    (answer,) = one_process({"train": " ".join(words)}, tmp_path).values()
    assert answer["status"] == 0, answer["err"]
    assert "to the run that trains, call pipeline.log(" in answer["err"]

"""A run that is killed at any moment leaves a closed run in the store, every point of its journal once, no process."""

from __future__ import annotations

import json
import os
import random
import signal
import time

import psutil
import pytest

from tests.running import TINY, Store, start, wait
from tests.shared import place_store

pytestmark = pytest.mark.soak
STATUS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}


@pytest.mark.parametrize("seed", range(200))
def test_a_kill_at_any_moment(tmp_path, seed):
    chance = random.Random(seed)
    number = chance.choice([signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
    place_store(tmp_path)
    process = start("train", *TINY, "training.epochs=100000", "hydra.run.dir=run", cwd=tmp_path, warm=True)
    journal = tmp_path / "run" / "journal.jsonl"
    wait(journal.exists)
    time.sleep(chance.uniform(0, 5))
    os.kill(process.pid, number)
    _, err = process.communicate(timeout=120)
    assert process.returncode == STATUS[number], err
    wait(lambda: not [each for each in psutil.process_iter() if _is_in(each, tmp_path)])
    text = journal.read_text()
    lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]  # the last may be half a line
    written = [line["step"] for line in lines if "train/loss" in line.get("metrics", {})]
    runs = Store(tmp_path).runs()
    assert len(runs) == 1 or not written
    for run in runs:
        assert run.info.status == "KILLED"
        assert list(Store(tmp_path).history(run, "train/loss")) == written == list(range(1, len(written) + 1))


def _is_in(process: psutil.Process, folder) -> bool:
    try:
        return process.cwd() == str(folder)
    except psutil.Error:
        return False

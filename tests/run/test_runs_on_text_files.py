"""Runs on text files, from end to end: with a tokenizer of one's own and a cache."""

from __future__ import annotations

import json
import re

import pyarrow.parquet as pq
import pytest

from tests.killed_run import KILL
from tests.running import Store, pipeline, train_in

CODE = """
class Letters:
    vocab_size = 27
    version = "1"

    def __call__(self, text):
        letters = [letter for letter in text.lower() if "a" <= letter <= "z"]
        return [ord(letter) - ord("a") for letter in letters]
"""
CONFIG = (
    "dataset=text_files",
    "dataset.files=texts",
    "dataset.validation_split=0.2",
    "dataset.longest=30",
    "dataset.tokenizer={_target_: mine.Letters}",
    "dataset.pad.multiple=4",
    "model=decoder",
    "model.length=32",
    "model.width=8",
    "model.blocks=1",
    "model.heads=2",
    "objective=language_model",
    "accumulation.effective_batch_size=16",
    "accumulation.micro_batch_tokens=100",
    "training.epochs=3",
    "hardware.deterministic=true",
    "tracking.log_model=false",
    "tracking.system_metrics=false",
)
CACHE = "dataset.token_cache=cache"
STREAMED = ("dataset.in_memory=false", "dataset.shuffle_buffer=10")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with texts and two runs: without a cache and with one."""
    folder = tmp_path_factory.mktemp("texts")
    (folder / "mine.py").write_text(CODE)
    (folder / "texts").mkdir()
    for file in range(3):
        lines = [f"{file} " + "abcdefghij" * (n % 7) + "xyz" for n in range(30)]
        (folder / "texts" / f"{file}.txt").write_text("\n".join(lines))
    trained(folder, "plain", *STREAMED)
    trained(folder, "cached", *STREAMED, CACHE)
    return folder


def trained(folder, name, *more, **options):
    return train_in(folder, name, *CONFIG, *more, **options)


def histories(folder, name):
    store = Store(folder)
    return store.histories(store.run(name))


@pytest.mark.slow
def test_rows_are_equal_with_a_cache_and_after_a_kill(folder):
    rows = histories(folder, "plain")
    assert len(rows["train/loss"]) > 9
    assert histories(folder, "cached") == rows

    every = "training.checkpoint_every=1"
    trained(folder, "killed", *STREAMED, CACHE, KILL, every, status=-9, AT="13")
    done = pipeline("resume", "killed", cwd=folder)
    # An epoch has nine updates: the checkpoint is from within the second one.
    assert re.search("continues after update 1[123]", done.stderr)
    assert histories(folder, "killed")["train/loss"] == rows["train/loss"]


@pytest.mark.slow
def test_a_rerun_is_equal_and_notices_another_tokenizer(folder):
    run_id = Store(folder).run("cached").info.run_id
    command = ("rerun", run_id, "tracking.experiment=again")
    line = pipeline(*command, cwd=folder, status=2).stderr
    assert "dataset.tokenizer._target_ of a config from a tracking store must" in line
    done = pipeline(*command, "--allow", "mine", cwd=folder)
    assert "bit-equal" in done.stderr

    (folder / "mine.py").write_text(CODE.replace('version = "1"', 'version = "2"'))
    line = pipeline(*command, "--allow", "mine", cwd=folder, status=2).stderr
    (folder / "mine.py").write_text(CODE)
    assert (
        f"dataset must have the version 'tokenizer 1' of run {run_id}. "
        "Received: 'tokenizer 2'." in line
    )


@pytest.mark.slow
def test_it_is_evaluated_and_predicts(folder):
    (folder / "others.txt").write_text("bcdefgh\nabcabc\n")
    own = pipeline("evaluate", "cached", "--no-log", cwd=folder).stdout
    loss = histories(folder, "cached")["val/loss"]
    assert f"{loss[max(loss)]:.6g}" in own
    others = ("dataset.validation_split=others.txt", "--name", "others")
    printed = pipeline("evaluate", "cached", *others, cwd=folder).stdout
    assert re.search(r"^others .* 2$", printed, re.MULTILINE)

    pipeline("predict", "cached", "--out", "rows.parquet", cwd=folder)
    rows = pq.read_table(folder / "rows.parquet")
    recorded = json.loads((folder / "cached" / "dataset.json").read_text())
    assert rows.num_rows == recorded["examples"]["validation"]


@pytest.mark.slow
def test_texts_that_are_longer_than_the_model_takes_are_rejected(folder):
    line = trained(folder, "long", "dataset.longest=33", status=2).stderr
    assert (
        "model.length must be at least 36, the length to which dataset.pad may pad "
        "inputs of dataset.longest=33 tokens. Received: 32." in line
    )

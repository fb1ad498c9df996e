"""The example of a tokenizer of one's own trains by the command on its top."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.examples.commands import command_on_top_of
from tests.running import ROOT, Store, pipeline

PROJECT = ROOT / "examples" / "own_tokenizer"


@pytest.mark.slow
def test_it_trains_on_words(tmp_path):
    """On the pages of the documentation, whose number of words differs over time."""
    folder = tmp_path / "examples" / "own_tokenizer"
    shutil.copytree(PROJECT, folder, ignore=shutil.ignore_patterns("tokens"))
    (tmp_path / "docs").mkdir()
    for page in (ROOT / "docs").glob("*.md"):
        shutil.copy(page, tmp_path / "docs")
    command = command_on_top_of(PROJECT / "words.py")
    pipeline(*command, "tracking.system_metrics=false", cwd=folder)
    store = Store(folder)
    run = store.run()
    assert run.data.metrics["val/accuracy"] > 0.2
    artifact = store.client.download_artifacts(run.info.run_id, "dataset.json", folder)
    with open(artifact, encoding="utf-8") as file:
        record = json.load(file)
    assert record["version"] == "tokenizer 1"
    assert "words.txt" in record["files"]
    (cache,) = (path for path in (folder / "tokens").iterdir() if path.is_dir())
    assert (cache / "train-00000.tfrecord").exists()

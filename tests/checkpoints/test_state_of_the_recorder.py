"""A checkpoint that lacks a part of the recorder's state is damaged.

The file may still be as its manifest says, if a person has changed both.
"""

from __future__ import annotations

import hashlib
import json

import pytest

from pipeline.__main__ import main
from pipeline.checkpoints import files
from tests.checkpoints.test_files import LEAST, saved


def change(folder, change):
    """Change the recorder's state in a checkpoint, and its hash in the manifest."""
    meta = folder / "meta.json"
    content = json.loads(meta.read_text())
    change(content["values"]["recorder"])
    meta.write_text(json.dumps(content))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["sha256"]["meta.json"] = hashlib.sha256(meta.read_bytes()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("key", LEAST["recorder"])
def test_the_checkpoint_before_is_used(tmp_path, capsys, key):
    saved(tmp_path, 1, 2)
    change(tmp_path / "2", lambda state: state.pop(key))
    assert files.newest(tmp_path).updates_done == 1
    assert capsys.readouterr().err == (
        f"the checkpoint {tmp_path / '2'} is damaged and is not used: meta.json, line 1: "
        f"{key} is missing\n"
    )


def test_critical_rejects_a_checkpoint_without_the_last_rate(tmp_path, capsys):
    run = tmp_path / "run"
    saved(run / "checkpoints", 2)
    (run / "journal.jsonl").write_text("")
    for break_it, fault in (
        (lambda state: state["last"].pop("learning_rate"), "learning_rate is missing"),
        (lambda state: state.pop("last"), "last is missing"),
    ):
        change(run / "checkpoints" / "2", break_it)
        assert main(["critical", f"{run}@2"]) == 2
        line = capsys.readouterr().err
        assert f"meta.json, line 1: {fault}" in line
        assert len(line.splitlines()) == 1

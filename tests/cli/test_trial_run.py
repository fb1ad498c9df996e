"""The trial run of docs/command_line.md: one update, an evaluation, and one folder."""

from __future__ import annotations

import shlex

import pytest

from tests.docs.pages import command_lines, read_blocks, read_pages
from tests.running import TINY, pipeline

PAGE = "docs/command_line.md"


@pytest.mark.slow
def test_a_trial_run_trains_one_update_and_leaves_one_folder(tmp_path):
    lines = []
    for block in read_blocks(read_pages()):
        if block.page == PAGE and "trial" in block.text:
            lines += command_lines(block)
    command = shlex.split(lines[0])
    assert command[:2] == ["pipeline", "train"]
    assert lines[1] == "rm -r trial"

    run = pipeline(*["train", *TINY, *command[2:]], cwd=tmp_path, new_store=True)
    assert "update 1/1  val/loss" in run.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["trial"]

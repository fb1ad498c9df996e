"""A command line without its argument is answered by the name of what is missing."""

from __future__ import annotations

import pytest

from pipeline.__main__ import main
from pipeline.rerun.request import parse_command_line


@pytest.mark.parametrize(
    ("verb", "missing"),
    [
        ("rerun", "RUN_ID"),
        ("resume", "RUN"),
        ("stop", "RUN"),
        ("critical", "RUN@UPDATE"),
    ],
)
def test_what_is_missing_is_named_and_nothing_else(verb, missing, capsys):
    assert main([verb]) == 2
    line = f"pipeline: {missing} must be given: see pipeline {verb} --help.\n"
    assert capsys.readouterr().err == line


def test_a_resumed_run_has_its_own_config(capsys):
    """An option of Hydra would replace the config of the run."""
    assert main(["resume", "run", "--config-dir", "mine"]) == 2
    rule = "--config-dir must be left out: a run continues with its own config"
    assert rule in capsys.readouterr().err


def test_a_rerun_takes_any_number_of_overrides_in_any_place():
    assert parse_command_line(["abc"], None).overrides == []
    request = parse_command_line(["seed=1", "--dry", "seed=2"], None)
    assert request.run_id == "seed=1"  # the first one
    assert request.overrides == ["seed=2"]
    request = parse_command_line(["abc", "a=1", "--allow", "mine", "b=2"], None)
    assert (request.overrides, request.allow) == (["a=1", "b=2"], ["mine"])


@pytest.mark.slow
def test_keys_that_a_sweep_file_sets_for_another_group_are_named(capsys):
    wrong = "training.epochs=-1"  # ends the command before anything is created
    assert main(["sweep", "does_it_pay", "model=mlp", "dataset=digits", wrong]) == 2
    kept, kept_of_dataset, rejection = capsys.readouterr().err.splitlines()
    assert kept == (
        "with model=mlp, does_it_pay.yaml still sets model.width, model.blocks: "
        "add '~model.width' '~model.blocks' to remove what does not apply"
    )
    assert kept_of_dataset.startswith("with dataset=digits, does_it_pay.yaml still")
    assert "training.epochs" in rejection

    deletions = ["~model.width", "~model.blocks"]
    assert main(["sweep", "does_it_pay", "model=mlp", *deletions, wrong]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    # The file sweeps this group, so its keys are those of each option.
    assert main(["sweep", "does_it_pay", "scaling=choice(none)", wrong]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert main(["sweep", "does_it_pay", "model.width=16", wrong]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1

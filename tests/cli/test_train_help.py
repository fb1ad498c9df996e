"""`pipeline train --help`, and the usage lines of all verbs."""

from __future__ import annotations

import re

import pytest

from pipeline.__main__ import VERBS, main
from pipeline.common.errors import count
from pipeline.config.key_guide import FIRST_KEYS


def printed(capsys, *arguments: str) -> str:
    """Return what a command prints to standard output."""
    status: object = 0
    try:
        status = main(arguments)
    except SystemExit as exit:  # argparse has printed the help
        status = exit.code
    assert status == 0
    answer = capsys.readouterr()
    assert answer.err == ""
    return answer.out


def test_help_of_train_shows_twelve_keys_and_how_to_see_all(capsys):
    out = printed(capsys, "train", "--help")
    keys = re.findall(r"^  ([\w.]+)=", out, re.MULTILINE)
    assert tuple(keys) == FIRST_KEYS.keys
    assert len(keys) == 12
    assert (
        "  accumulation.effective_batch_size=128\n"
        "      examples per optimizer update, over all replicas\n"
    ) in out
    assert "  optimizer.learning_rate=0.01\n      the highest rate of" in out
    assert "  hardware.precision=float32\n      (float32 | float64 | mixed_b" in out
    assert (
        "\n  optimizer: adafactor, adam, adamw, lion, momentum, muon, rmsprop, sgd\n"
        in out
    )
    assert "pipeline train --cfg job " in out
    assert "docs/config_reference.md " in out
    assert "batch_schedule" not in out
    assert max(len(line) for line in out.splitlines()) <= 88


def test_help_of_train_shows_the_overrides_in_effect(capsys):
    overrides = ["experiment=text", "seed=7", "tracking.uri=http://me:pw@host"]
    out = printed(capsys, "train", "-h", "-m", *overrides)
    assert "  dataset=topics\n" in out
    assert "  seed=7\n" in out
    assert "  tracking.uri=http://***@host\n" in out


def test_help_leaves_out_a_rate_that_the_optimizer_lacks(capsys):
    out = printed(capsys, "train", "--help", "~optimizer.learning_rate")
    assert "optimizer.learning_rate=" not in out
    assert "  optimizer=adamw\n" in out


def test_help_of_a_wrong_config_is_the_error(capsys):
    assert main(["train", "--help", "model=nope"]) == 2
    answer = capsys.readouterr()
    assert answer.out == ""
    rule = "model must name one of the options of this group. Received: 'nope'."
    assert rule in answer.err


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_a_usage_line_ends_with_the_overrides(verb, capsys):
    out = printed(capsys, *verb.split(), "--help")
    usage = " ".join(out.partition("\n\n")[0].split())
    assert re.fullmatch(rf"usage: pipeline ?{verb} .*\[overrides( \.\.\.)?\]", usage)
    assert usage.count("[overrides") == 1


def test_a_count_of_one_has_a_singular():
    assert [count(n, "job") for n in (0, 1, 2)] == ["0 jobs", "1 job", "2 jobs"]
    assert count(2, "batch", "batches") == "2 batches"


def test_an_unknown_option_is_named_with_the_verb(capsys):
    assert main(["sync", "--nonsense"]) == 2
    assert capsys.readouterr().err == (
        "pipeline: arguments must be those of pipeline sync: see pipeline sync --help. "
        "Received: '--nonsense'.\n"
    )


def test_an_unknown_option_before_the_verb_is_answered_in_one_line(capsys):
    assert main(["--nonsense"]) == 2
    answer = "pipeline: VERB must be given: see pipeline --help.\n"
    assert capsys.readouterr().err == answer

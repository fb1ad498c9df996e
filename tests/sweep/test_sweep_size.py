"""A grid without jobs, or with more than anybody can wait for, is rejected at once."""

from __future__ import annotations

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from pipeline.common.errors import ConfigError
from pipeline.sweep import sweep_size


def check(*overrides):
    sweep_size.check(OverridesParser.create().parse_overrides(list(overrides)))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["seed=range(0,1,0)"], "seed must be a range with a step other than 0"),
        (["seed=range(5,1)"], "seed must be a range with at least one value"),
        (
            ["model=cnn,mlp", "+seed=range(0,1000000000)"],
            "seed must have fewer values: the sweep has 2,000,000,000 jobs, and at most "
            "5,000 are allowed",
        ),
        (
            ["seed=0,1", "optimizer.learning_rate=interval(1e-4,1e-1)"],
            "optimizer.learning_rate must be a list of values, such as 0.01,0.1: an "
            "interval needs hydra/sweeper=search. Received: .interval",
        ),
        (["scaling.warmup=range(0,1,1e-9)"], "scaling.warmup must have fewer values"),
        ([f"seed={','.join(map(str, range(6_000)))}"], "the sweep has 6,000 jobs"),
    ],
)
def test_what_nobody_can_run_is_rejected(overrides, message):
    with pytest.raises(ConfigError, match=message):
        check(*overrides)


def test_of_two_overrides_with_one_key_the_last_counts(capsys):
    check("seed=range(0,1000000)", "seed=0,1", "model=mlp", "dataset=glob(*)")
    assert capsys.readouterr().err == ""


def test_a_large_grid_is_announced(capsys):
    check("seed=range(0,100)", "accumulation.factor=range(1,31)")
    assert capsys.readouterr().err == "composing 3,000 jobs\n"

"""The space of a search: the same for each trial, and rejected before the first one."""

from __future__ import annotations

import optuna
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from pipeline.common.errors import ConfigError
from pipeline.sweep import search


def space_of(*texts):
    overrides = OverridesParser.create().parse_overrides(list(texts))
    return {override.get_key_element(): override for override in overrides}


def chosen(*texts, trials=3):
    """Return the overrides of some trials."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    space = space_of(*texts)
    choices = search._choices(space)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0))
    jobs = []
    for number in range(trials):
        trial = study.ask()
        jobs.append(search._choose(trial, space, choices))
        study.tell(trial, number)
    return jobs


def test_a_shuffled_range_has_the_same_values_in_each_trial():
    for (override,) in chosen("seed=shuffle(range(0,4))"):
        assert override in {"seed=0", "seed=1", "seed=2", "seed=3"}


def test_an_interval_of_whole_numbers_gives_whole_numbers():
    for (override,) in chosen("accumulation.factor=int(interval(1,8))"):
        assert 1 <= int(override.partition("=")[2]) <= 8
    for (override,) in chosen("optimizer.learning_rate=interval(1,8)"):
        assert "." in override


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("optimizer.learning_rate=tag(log,interval(0,0.1))", "starts above 0"),
        ("optimizer.learning_rate=interval(0.2,0.1)", "start is not above its end"),
    ],
)
def test_an_interval_without_values_is_rejected(text, rule):
    with pytest.raises(ConfigError, match=f"optimizer.learning_rate must be .*{rule}"):
        chosen(text)

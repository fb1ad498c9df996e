"""The space of a search: the same for each trial, and rejected before the first one."""

from __future__ import annotations

import optuna
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from pipeline.common.errors import ConfigError
from pipeline.sweep import search
from tests.running import pipeline


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


def test_the_ranges_of_numbers_are_recorded():
    rate = "optimizer.learning_rate"
    space = space_of(
        f"{rate}=tag(log, interval(1e-4, 1e-1))",
        "model.depth=4,2,8",
        "optimizer=adamw,lion",
        "seed=1",
    )
    assert search._ranges(space, search._choices(space)) == {
        rate: {"low": 1e-4, "high": 1e-1, "log": True, "listed": False},
        "model.depth": {"low": 2.0, "high": 8.0, "log": False, "listed": True},
    }


def test_an_unknown_key_of_a_search_is_named_with_the_nearest_one(tmp_path):
    """Hydra makes an error without the key of it, also for a key of a sweep's file."""
    sweeps = tmp_path / "sweeps"
    sweeps.mkdir()
    file = (
        "defaults: [config, override hydra/sweeper: search, _self_]\n"
        "hydra: {sweeper: {n_trials: 3}}\n"
    )
    (sweeps / "mine.yaml").write_text(file)
    done = pipeline("sweep", "mine", cwd=tmp_path, status=2)
    assert done.stderr == (
        "pipeline: hydra.sweeper.n_trials must be a key of the search. Received: "
        "'n_trials'. Choices: trials, at_once, seed, params. Did you mean 'trials'?\n"
    )
    assert list(tmp_path.iterdir()) == [sweeps]


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

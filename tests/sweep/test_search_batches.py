"""A batch of a search has no two jobs of the same values."""

from __future__ import annotations

from types import SimpleNamespace

import optuna
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from pipeline.sweep import search


class Launcher:
    """Keeps the jobs of each batch, and returns a loss for each."""

    def __init__(self):
        self.batches = []
        self.numbers = []

    def launch(self, jobs, first):
        self.batches.append(jobs)
        self.numbers.append(first)
        return [SimpleNamespace(return_value=1.0 + len(job)) for job in jobs]


def searched(*overrides, trials, at_once, seed=0):
    """Return the launcher of a search that has ended."""
    sweeper = search.SearchSweeper(trials, at_once, seed, {})
    sweeper._parser = OverridesParser.create()
    sweeper._launcher = Launcher()
    sweeper.sweep(list(overrides))
    return sweeper._launcher


@pytest.mark.parametrize("seed", range(5))
def test_values_of_a_job_of_the_same_batch_are_drawn_again(seed):
    space = ("accumulation.factor=1,2", "optimizer=sgd,adamw")
    launcher = searched(*space, trials=8, at_once=4, seed=seed)
    for jobs in launcher.batches:
        assert len({tuple(job) for job in jobs}) == 4
    assert launcher.numbers == [0, 4]


def test_a_batch_is_smaller_where_there_are_not_enough_values():
    launcher = searched("accumulation.factor=1,2,4", trials=8, at_once=5)
    assert [len(jobs) for jobs in launcher.batches] == [3, 3, 2]
    assert launcher.numbers == [0, 3, 6]
    (jobs,) = searched("accumulation.factor=4", trials=1, at_once=2).batches
    assert jobs == [["accumulation.factor=4"]]


def test_where_no_values_are_equal_the_jobs_are_those_of_optuna_alone():
    """A search of an earlier version goes on with the same jobs."""
    text = "optimizer.learning_rate=tag(log,interval(0.001,1))"
    launcher = searched(text, trials=6, at_once=3, seed=4)

    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=4))
    for jobs in launcher.batches:
        trials = [study.ask() for _ in jobs]
        for trial, job in zip(trials, jobs, strict=True):
            key = "optimizer.learning_rate"
            rate = trial.suggest_float(key, 0.001, 1.0, log=True)
            assert job == [f"{key}={rate:.4g}"]
            study.tell(trial, 2.0)

"""A param that is too long for MLflow is cut, and says so; the names of runs."""

from __future__ import annotations

import pytest

from pipeline.tracking import journal_file
from pipeline.tracking.journal_file import JOURNAL_NAME
from pipeline.tracking.params import param_text
from pipeline.tracking.tracker import name_by_overrides
from tests.running import TINY, Store, pipeline
from tests.tracking.memory_store import START, MemoryStore
from tests.tracking.test_uploader import ship

LONG = "x" * 7_000
NOTE = " … (cut: 7,000 characters in all)"


def test_a_text_that_is_cut_ends_with_its_full_length():
    assert param_text(LONG) == "x" * (6_000 - len(NOTE)) + NOTE
    assert len(param_text(LONG)) == 6_000
    assert param_text(LONG[:6_000]) == LONG[:6_000]
    assert param_text(LONG[:6_001]).endswith(" … (cut: 6,001 characters in all)")
    assert param_text(None) == "None"


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ([], ""),
        (["tracking.tags.note=x", "hydra.run.dir=run"], ""),
        (["experiment=text"], "text"),
        (["seed=2", "optimizer.learning_rate=0.1"], "digits seed=2 rate=0.1"),
        (["~training.callbacks.stop", "experiment=text"], "text ~stop"),
        (["+model.rate=0.5"], "digits model.rate=0.5"),
    ],
)
def test_a_run_is_named_by_the_overrides_that_change_what_is_run(overrides, name):
    assert name_by_overrides(overrides, "digits") == name


def test_a_long_param_of_a_run_is_cut(tmp_path):
    writer = journal_file.create(tmp_path / JOURNAL_NAME)
    writer.write({"time": 1, "start": START | {"params": {"a": LONG, "b": 2}}})
    writer.write({"time": 2, "run": {"run_id": "r", "experiment_id": "1"}})
    writer.write({"time": 3, "end": "FINISHED"})
    writer.close()
    store = MemoryStore()
    ship(store, tmp_path / JOURNAL_NAME)
    assert store.run["params"] == {"a": param_text(LONG), "b": "2"}


@pytest.mark.slow
def test_the_long_params_of_a_sweep_and_of_verify_are_cut(tmp_path):
    override = f"+tracking.tags.note={LONG}"
    pipeline("train", "-m", *TINY, "seed=0", override, cwd=tmp_path)
    pipeline("verify", "--log", *TINY, override, cwd=tmp_path)
    cut = {}
    for run in Store(tmp_path).runs():
        for key, value in run.data.params.items():
            if "characters in all" in value:
                assert len(value) == 6_000
                cut[run.info.run_name, key] = value
    names = {(name.partition(" ")[0], key) for name, key in cut}
    assert names == {
        ("sweep", "overrides"),
        ("job", "tracking.tags.note"),
        ("verify", "tracking.tags.note"),
    }
    verified = cut["verify", "tracking.tags.note"]
    assert verified == param_text(LONG)

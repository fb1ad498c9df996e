"""With `training.resume=auto`, a run directory that is new each time is named."""

from __future__ import annotations

from functools import partial

import pytest

from pipeline.launch import hydra_job

LINE = (
    "training.resume=auto begins a new run, because the run directory is new each "
    "time; to resume this run later, give it a fixed hydra.run.dir=FOLDER"
)


@pytest.mark.parametrize(
    ("overrides", "is_named"),
    [
        (["training.resume=auto"], True),
        (["training.resume=auto", "hydra.run.dir=outputs/${now:%Y}"], True),
        (["training.resume=auto", "hydra.run.dir=long"], False),
        ([], False),
    ],
)
def test_a_run_that_cannot_be_resumed_automatically_says_so(
    tmp_path, monkeypatch, capsys, overrides, is_named
):
    monkeypatch.chdir(tmp_path)
    trained = []

    def train(config, overrides, run_dir):
        trained.append(run_dir)
        return 0.0

    hydra_job.run(partial(hydra_job.in_run_dir, train), overrides)
    assert len(trained) == 1
    printed = capsys.readouterr().err.splitlines()
    assert (LINE in printed) == is_named

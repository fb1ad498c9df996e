"""Seeds are added to a sweep by the command that its report names."""

from __future__ import annotations

import json
import shlex

import pytest

from pipeline.report import reading
from pipeline.report.verdict import command_for_seeds
from tests import synthetic
from tests.running import pipeline
from tests.sweep.test_again import PLAN
from tests.sweep.test_sweep import PLANNED


@pytest.mark.slow
def test_the_command_plans_the_same_jobs_and_one_more_seed_of_each(tmp_path):
    """Those that have finished have the same names, by which they are left out."""
    (tmp_path / "hydra_plugins").mkdir()
    (tmp_path / "hydra_plugins" / "planned.py").write_text(PLANNED)
    names = []
    for factor in (1, 2, 4, 8, 16):
        for seed in range(3):
            names.append(f"factor={factor} seed={seed} batch={16 * factor}")
    store = synthetic.store(tmp_path)
    varied = ["accumulation.factor", "seed"]
    made = synthetic.PlantedSweep(store, names, varied, "factor_at_fixed_micro_batch")
    for name in names:
        seed = int(name.split("seed=")[1][0])
        made.job(name, {"train/loss": [2, 1]}, seed=seed)
    made.end()

    sweep = reading.read(store.uri, made.run_id)
    command = command_for_seeds(sweep, 1)
    assert command.startswith("pipeline sweep factor_at_fixed_micro_batch --again ")
    assert command.endswith(" seed=0,1,2,3")
    done = pipeline(*shlex.split(command)[1:], PLAN, cwd=tmp_path)
    planned = json.loads(done.stdout)
    assert set(names) < set(planned)
    assert len(planned) == len(names) + 5
    assert {name.split()[1] for name in set(planned) - set(names)} == {"seed=3"}

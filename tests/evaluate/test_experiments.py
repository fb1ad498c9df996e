"""`pipeline evaluate RUN@best` of every experiment, in float64."""

from __future__ import annotations

import pytest

from tests.running import ROOT, Store, one_process
from tests.shared import place_store

EXPERIMENTS = sorted(file.stem for file in ROOT.glob("conf/experiment/*.yaml"))
FEW = (
    "hardware.precision=float64 training.updates=6 training.evaluate_every=2 "
    "training.checkpoint_every=2 tracking.system_metrics=false tracking.log_model=false"
)
# The loss falls, so that the best checkpoint is an earlier one.
BEST = "training.keep_best.metric=val/loss training.keep_best.mode=max"
SMALL = {
    "exact": "model.filters=[4]",
    "images": "model.filters=[4]",
    "text": "model.blocks=1 model.width=16 +optimizer.use_ema=true",
}


@pytest.mark.slow
def test_the_best_checkpoint_has_the_results_of_the_run(tmp_path):
    place_store(tmp_path)
    lines = {}
    for name in EXPERIMENTS:
        place = f"tracking.experiment={name} hydra.run.dir={name}"
        lines[name] = (
            f"train experiment={name} {FEW} {BEST} {SMALL.get(name, '')} {place}"
        )
        lines[f"best of {name}"] = f"evaluate {name}@best"
        lines[f"last of {name}"] = f"evaluate {name}"
    answers = one_process(lines, tmp_path)
    for name, answer in answers.items():
        assert answer["status"] == 0, (name, answer["err"])

    store = Store(tmp_path)
    compared = set()
    for name in EXPERIMENTS:
        run = store.run(name)
        best = int(run.data.metrics["best/update"])
        histories = store.histories(run, "eval/validation/")
        assert len(histories) > 1
        for key, values in histories.items():
            logged = store.history(run, key.replace("eval/validation/", "val/"))
            assert set(values) == {best, 6}
            for step, value in values.items():
                assert value == pytest.approx(logged[step], rel=1e-12), (name, key)
        tested = store.histories(run, "test/")
        for key, values in tested.items():
            evaluated = store.history(run, key.replace("test/", "eval/test/"))
            assert evaluated[best] == pytest.approx(values[best], rel=1e-12), key
        if best != 6:
            # A control: the checkpoints differ.
            losses = histories["eval/validation/loss"]
            assert losses[best] != pytest.approx(losses[6], rel=1e-6)
            compared.add(name)
    assert compared

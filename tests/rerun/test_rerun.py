"""`pipeline rerun`: real runs in one folder, run again from their records in another, by other processes.

Three processes do most of it, since each loads TensorFlow: one makes the runs, one runs them again, one refuses.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from mlflow.entities import Metric, Param

from pipeline.config.compose import composed
from pipeline.rerun.command import Rerun
from pipeline.trust.gate import Gate
from tests.parameters import mostly_slow
from tests.running import ROOT, Store, one_process, pipeline
from tests.shared import place_store

QUIET = "tracking.log_model=false tracking.system_metrics=false"
SMALL = f"training.epochs=1 hardware.deterministic=true {QUIET}"
OPTIMIZERS = sorted(path.stem for path in (ROOT / "conf" / "optimizer").glob("*.yaml"))
HERE = (
    "adamw",
)  # the others are of a sweep that `--sweep` runs again, each job in a process of its own
MULTIRUN = (
    f"train -m hydra/launcher=basic model=mlp {SMALL} tracking.experiment=optimizers"
)
UPDATES = 12  # in an epoch
OLD = Path(__file__).parents[1] / "fixtures" / "record_0"

MINE = """
from pathlib import Path
import keras, numpy as np, tensorflow as tf
from pipeline.dataset import Data

def moons(data_dir):
    rows = np.load(Path(data_dir or ".") / "moons.npy")
    examples = tf.data.Dataset.from_tensor_slices((rows[:, :2], rows[:, 2].astype("int64")))
    return Data(examples.take(200), examples.skip(200), classes=2)

def tiny(input_shape, classes, units=8):
    layers = [keras.layers.Dense(units, "relu"), keras.layers.Dropout(0.2), keras.layers.Dense(classes)]
    return keras.Sequential([keras.Input(input_shape), *layers])
"""


def own(folder: Path) -> None:
    """A user's own code, config and data."""
    import numpy as np

    (folder / "conf/dataset").mkdir(parents=True)
    (folder / "conf/model").mkdir()
    (folder / "mine.py").write_text(MINE)
    (folder / "conf/dataset/moons.yaml").write_text(
        "_target_: mine.moons\ndata_dir: null\n"
    )
    (folder / "conf/model/tiny.yaml").write_text("_target_: mine.tiny\n")
    (folder / "conf/trusting.yaml").write_text(
        "defaults: [config, _self_]\ntrust: {allow: [mine]}\n"
    )
    random = np.random.default_rng(0)
    rows = random.normal(size=(260, 3)).astype("float32")
    rows[:, 2] = rows[:, 0] > 0
    np.save(folder / "moons.npy", rows)
    (folder / "changed").mkdir()
    rows[7, 1] += 1e-6
    np.save(folder / "changed/moons.npy", rows)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder, its store, and run IDs by experiment and optimizer."""
    folder = tmp_path_factory.mktemp("made")
    own(folder)
    runs = trained(folder, {"optimizers": f"{MULTIRUN} optimizer={','.join(HERE)}"})
    assert len(runs) == len(HERE)
    return folder, Store(folder), runs


@pytest.fixture(scope="module")
def made_wider(made):
    """The same with a run on images that are shifted, and one of a user's own model and dataset."""
    folder, store, runs = made
    callback = "{_target_: keras.callbacks.CSVLogger, filename: '${hydra:runtime.output_dir}/rows.csv'}"
    shifted = "dataset=digits_shifted dataset.data_dir=data model=cnn model.filters=[8] model.dropout=0.3"
    more = trained(
        folder,
        {
            "shifted": f'train {SMALL} {shifted} tracking.experiment=shifted "+training.callbacks.rows={callback}"',
            "own": f"train --config-dir conf {SMALL} tracking.experiment=own dataset=moons model=tiny",
        },
    )
    assert len(more) == 2
    return folder, store, runs | more


def trained(folder: Path, lines: dict[str, str]) -> dict[tuple[str, str], str]:
    """Run command lines, by experiment; return the IDs of their runs by experiment and optimizer."""
    place_store(folder)
    answers = one_process(lines, folder)
    for name, answer in answers.items():
        assert answer["status"] == 0, (name, answer["err"])
    return {
        (
            experiment,
            run.data.params["optimizer._target_"].split(".")[-1],
        ): run.info.run_id
        for experiment in answers
        for run in Store(folder).runs(experiment)
        if "optimizer._target_" in run.data.params  # the parent of a sweep has none
    }


@pytest.fixture(scope="module")
def again(made, tmp_path_factory):
    """What each rerun did, in another folder."""
    _, store, runs = made
    there = tmp_path_factory.mktemp("again")
    own(there)
    uri = f"tracking.uri={store.client.tracking_uri}"
    adamw = runs["optimizers", "AdamW"]
    lines = {
        f"optimizer {optimizer}": f"rerun {run} {uri}"
        for (_, optimizer), run in runs.items()
    }
    lines |= {
        "dry": f"rerun {adamw[:12]} --dry {uri} optimizer.beta_1=0.5",
        "beta": f"rerun {adamw} {uri} optimizer.beta_1=0.5 'hydra.run.dir=my runs'",
        "metric deleted": f"rerun {adamw} --dry {uri} '~training.metrics.accuracy'",
        "nothing deleted": f"rerun {adamw} --dry {uri} '~training.metrics.nonsense'",
    }
    return there, one_process(lines, there)


@pytest.fixture(scope="module")
def again_wider(made_wider, again):
    """What the reruns of the other runs did, in the same folder, and the ID of the run with the old record."""
    folder, store, runs = made_wider
    there, answers = again
    shutil.copytree(folder / "data", there / "data")
    shutil.copytree(folder / "data", there / "flipped")
    (flipped,) = (there / "flipped").rglob("digits-train.tfrecord*")
    content = bytearray(flipped.read_bytes())
    content[len(content) // 2] ^= 1
    flipped.write_bytes(content)
    old = record_0(store)
    uri = f"tracking.uri={store.client.tracking_uri}"
    adamw, mine, shifted = (
        runs[name, "AdamW"] for name in ("optimizers", "own", "shifted")
    )
    lines = {
        "lion": f"rerun {adamw} {uri} optimizer=lion optimizer.learning_rate=0.02 training.updates=2",
        "shifted": f"rerun {shifted} {uri} dataset.data_dir=data --allow keras.callbacks.CSVLogger",
        "flipped": f"rerun {shifted} {uri} dataset.data_dir=flipped",
        "flipped, streamed": f"rerun {shifted} {uri} dataset.data_dir=flipped dataset.in_memory=false",
        "flipped, other shifts": f"rerun {shifted} {uri} dataset.data_dir=flipped dataset.augment.pixels=2",
        "flipped dry": f"rerun {shifted} --dry {uri} dataset.data_dir=flipped",
        "other place": f"rerun {shifted} --dry {uri}",
        "not prepared": f"rerun {shifted} --dry {uri} dataset.data_dir=nowhere",
        "own refused": f"rerun {mine} {uri}",
        "own allowed": f"rerun {mine} {uri} --allow mine",
        "own trusting": f"rerun {mine} {uri} --config-dir conf --config-name trusting --dry",
        "own changed": f"rerun {mine} {uri} --allow mine dataset.data_dir=changed",
        "old": f"rerun {old} {uri}",
        "old rate": f"rerun {old} {uri} optimizer.learning_rate=0.02",
    }
    return there, answers | one_process(lines, there), old


def record_0(store: Store) -> str:
    """A run with the record that commit 9795822 made."""
    client = store.client
    experiment = client.create_experiment(
        "old", (store.folder / "mlruns/artifacts").as_uri()
    )
    run_id = client.create_run(experiment, run_name="old").info.run_id
    params = json.loads((OLD / "params.json").read_text())
    client.log_batch(
        run_id, params=[Param(key, value) for key, value in params.items()]
    )
    histories = json.loads((OLD / "histories.json").read_text())
    points = [
        Metric(key, value, 0, int(step))
        for key, h in histories.items()
        for step, value in h.items()
    ]
    client.log_batch(run_id, metrics=points)
    for name in ("config.yaml", "overrides.yaml", "environment.json"):
        client.log_artifact(run_id, str(OLD / name))
    client.set_terminated(run_id)
    return run_id


def reruns(store: Store, run_id: str) -> list:
    """The runs that a run was run again by, oldest first."""
    tags = store.client.get_run(run_id).data.tags
    return [
        store.client.get_run(each)
        for each in tags.get("rerun.by", "").split(", ")
        if each
    ]


def equal(store: Store, old: str, new: str) -> int:
    """How many points two runs have, all of which are equal to the bit."""
    one, two = (store.histories(store.client.get_run(run_id)) for run_id in (old, new))
    assert one == two
    return sum(map(len, one.values()))


def test_a_run_runs_again_to_the_bit(made, again):
    _, store, runs = made
    done = 0
    for (experiment, target), run_id in runs.items():
        if experiment == "optimizers":
            answer = again[1][f"optimizer {target}"]
            assert answer["status"] == 0, answer["err"]
            points = equal(store, run_id, reruns(store, run_id)[0].info.run_id)
            assert points >= 9 * UPDATES
            assert f"bit-equal: {points} points of " in answer["err"]
            done += 1
    assert done == len(HERE)


def test_a_rerun_says_where_it_comes_from_and_what_came_of_it(made, again):
    _, store, _ = made
    old = made[2]["optimizers", "AdamW"]
    new = reruns(store, old)[0]
    assert new.data.tags["rerun.of"] == old
    assert new.data.tags["rerun.verdict"] == "bit-equal"
    assert new.data.tags["mlflow.source.name"].startswith(f"pipeline rerun {old}")
    assert (
        new.data.tags["config.hash"]
        == store.client.get_run(old).data.tags["config.hash"]
    )
    assert new.info.run_name == f"rerun of {store.client.get_run(old).info.run_name}"
    assert "sweep" not in new.data.tags  # the job of a sweep runs alone
    (page,) = store.client.list_artifacts(new.info.run_id, "rerun")
    text = Path(store.client.download_artifacts(new.info.run_id, page.path)).read_text(
        encoding="utf-8"
    )
    assert text.startswith("<!doctype html>")
    assert old in text
    assert new.info.run_id in text


@pytest.mark.slow
def test_dropout_augmentation_and_a_callback_in_the_run_directory(
    made_wider, again_wider
):
    there, answers, _ = again_wider
    answer = answers["shifted"]
    assert answer["status"] == 0, answer["err"]
    assert "bit-equal" in answer["err"]
    old = made_wider[2]["shifted", "AdamW"]
    new = reruns(made_wider[1], old)[0]
    assert equal(made_wider[1], old, new.info.run_id) >= 9 * UPDATES
    written = new.data.params["training.callbacks.rows.filename"]
    assert Path(written).is_relative_to(there / "outputs")
    assert Path(written).exists()


@pytest.mark.slow
def test_a_users_model_and_dataset_once_they_are_allowed(made_wider, again_wider):
    _, store, _ = made_wider
    answers = again_wider[1]
    assert answers["own refused"]["status"] == 2
    assert "mine.moons" in answers["own refused"]["err"]
    assert answers["own refused"]["changed"] == []
    for how in ("own allowed", "own trusting"):
        assert answers[how]["status"] == 0, answers[how]["err"]
    assert "bit-equal" in answers["own allowed"]["err"]
    old = made_wider[2]["own", "AdamW"]
    (new,) = reruns(store, old)
    assert (
        equal(store, old, new.info.run_id) >= 20
    )  # two updates of nine metrics, one evaluation of two


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "named"),
    [
        ("flipped", "the file digits-train.tfrecord-00000-of-00001 differs"),
        ("flipped, streamed", "the file digits-train.tfrecord-00000-of-00001 differs"),
        (
            "flipped, other shifts",
            "the file digits-train.tfrecord-00000-of-00001 differs",
        ),
        ("own changed", "the split train differs"),
    ],
)
def test_other_data_are_refused_before_training(made_wider, again_wider, case, named):
    answer = again_wider[1][case]
    assert answer["status"] == 2
    last = answer["err"].splitlines()[-1]
    assert last.startswith("pipeline: dataset must be that of run ")
    assert named in last
    assert answer["changed"] == []
    assert "update 1/" not in answer["err"]
    assert (
        len(reruns(made_wider[1], made_wider[2]["shifted", "AdamW"])) == 1
    )  # what was refused has no run


@pytest.mark.slow
def test_dry_shows_the_plan_and_the_differences_and_makes_nothing(
    made_wider, again_wider
):
    _, answers, _ = again_wider
    for case in ("dry", "flipped dry", "not prepared"):
        assert answers[case]["status"] == 0
        assert answers[case]["changed"] == []
        assert answers[case]["err"].startswith("rerun of ")
        assert "MLflow run" not in answers[case]["err"]
    assert "changed: optimizer.beta_1=0.5" in answers["dry"]["err"]
    assert "differs: dataset" not in answers["dry"]["err"]
    assert re.search(
        "differs: dataset .* the file digits-train", answers["flipped dry"]["err"]
    )
    assert re.search(
        "differs: dataset.data_dir must hold digits.*, prepared",
        answers["not prepared"]["err"],
    )


@pytest.mark.slow
def test_a_callback_that_writes_is_left_out_unless_it_is_allowed(again_wider):
    said = "  left out: training.callbacks.rows, a keras.callbacks.CSVLogger: it writes files, which --allow "
    said += "keras.callbacks.CSVLogger allows"
    assert said in again_wider[1]["other place"]["err"].splitlines()
    assert "left out" not in again_wider[1]["shifted"]["err"]


def test_an_override_takes_a_key_of_the_record_away(again):
    answers = again[1]
    assert answers["metric deleted"]["status"] == 0, answers["metric deleted"]["err"]
    assert answers["nothing deleted"]["status"] == 2
    said = "pipeline: training.metrics.nonsense must be in the config to be deleted"
    assert answers["nothing deleted"]["err"].splitlines()[-1].startswith(said)


@pytest.mark.slow
def test_data_are_read_where_the_record_says_if_that_is_below_this_folder(again_wider):
    for case in ("other place", "shifted"):
        assert "dataset.data_dir: " not in again_wider[1][case]["err"]


def test_another_beta_differs_where_adam_first_uses_it(made, again):
    """Adam's first update is free of beta: m/(1−β) = g, whatever β. So the weights part with update 2, and the loss
    that is computed on them is that of update 3."""
    answer = again[1]["beta"]
    assert answer["status"] == 3
    assert "changed: optimizer.beta_1=0.5" in answer["err"]
    assert "different from update 3 on: train/loss at update 3: " in answer["err"]
    _, store, _ = made
    old = made[2]["optimizers", "AdamW"]
    new = next(
        run
        for run in reruns(store, old)
        if run.data.params["optimizer.beta_1"] == "0.5"
    )
    assert new.data.tags["rerun.verdict"] == "different"
    one, two = (
        store.history(run, "train/loss") for run in (store.client.get_run(old), new)
    )
    assert one[1] == two[1]
    assert one[2] == pytest.approx(two[2], rel=1e-6)
    assert one[3] != pytest.approx(two[3], rel=1e-4)
    assert (again[0] / "my runs" / "config.yaml").exists()


@pytest.mark.slow
def test_what_follows_a_changed_key_follows_it_again(made_wider, again_wider):
    """The record holds the schedule's rates as numbers; an override of the rate must still reach them."""
    _, store, _ = made_wider
    answer = again_wider[1]["lion"]
    assert answer["status"] == 3
    assert (
        "different from update 1 on: train/learning_rate at update 1" in answer["err"]
    )
    lion = next(
        run
        for run in reruns(store, made_wider[2]["optimizers", "AdamW"])
        if "Lion" in str(run.data.params)
    ).data.params
    assert lion["optimizer.learning_rate"] == lion["schedule.warmup_target"] == "0.02"
    assert lion["schedule.initial_learning_rate"] == "0.002"
    assert "optimizer.epsilon" not in lion  # nothing of AdamW is left


@pytest.mark.slow
def test_a_record_of_an_older_schema_runs_again(made_wider, again_wider):
    _, store, _ = made_wider
    _, answers, old = again_wider
    answer = answers["old"]
    assert answer["status"] == 0, answer["err"]
    assert f"the record of {old} is of schema 0: brought to schema 3" in answer["err"]
    assert "without train/gradient_noise_scale" in answer["err"]
    (new,) = reruns(store, old)
    assert (
        new.data.params["schedule.initial_learning_rate"] == "0.0"
    )  # which the default has not been since
    histories = json.loads((OLD / "histories.json").read_text())
    for key, history in histories.items():
        assert store.history(new, key) == pytest.approx(
            {int(s): v for s, v in history.items()}, rel=1e-5
        ), key
    assert answers["old rate"]["status"] == 2
    assert (
        "optimizer.learning_rate must come with an override of the schedule"
        in answers["old rate"]["err"]
    )


@pytest.mark.slow
def test_the_recorded_value_counts_although_a_default_has_changed_since(made, tmp_path):
    for name in ("pipeline", "hydra_plugins", "conf", "sweeps"):
        shutil.copytree(
            ROOT / name,
            tmp_path / "code" / name,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    changed = tmp_path / "code/conf/optimizer/adamw.yaml"
    changed.write_text(changed.read_text().replace("beta_1: 0.9", "beta_1: 0.1"))
    (tmp_path / "there").mkdir()
    here = {
        "cwd": tmp_path / "there",
        "PYTHONPATH": str(tmp_path / "code"),
        "warm": False,
    }
    uri = f"tracking.uri={made[1].client.tracking_uri}"
    assert (
        "beta_1: 0.1" in pipeline("train", "--cfg", "job", **here).stdout
    )  # it is the changed copy that runs
    done = pipeline("rerun", made[2]["optimizers", "AdamW"], uri, **here)
    assert (
        f"rerun {reruns(made[1], made[2]['optimizers', 'AdamW'])[-1].info.run_id} of "
        in done.stderr
    )
    assert ": bit-equal: " in done.stderr
    assert "differs: code: other files of the package" in done.stderr


@pytest.mark.parametrize("count", mostly_slow([2, len(OPTIMIZERS)], [], [2]))
def test_a_whole_sweep_runs_again_each_job_in_a_process(tmp_path, count):
    """A sweep over optimizers that the other tests leave out."""
    folder, there = tmp_path / "made", tmp_path / "there"
    folder.mkdir()
    there.mkdir()
    others = sorted(set(OPTIMIZERS) - set(HERE))[-count:]
    pipeline(*shlex.split(MULTIRUN), f"optimizer={','.join(others)}", cwd=folder)
    store = Store(folder)
    parent = next(
        run for run in store.runs("optimizers") if "sweep.name" in run.data.tags
    ).info.run_id
    uri = f"tracking.uri={store.client.tracking_uri}"
    refused = pipeline("rerun", parent, uri, cwd=there, status=2)
    assert refused.stderr == (
        f"pipeline: RUN_ID is a sweep: rerun it with --sweep, or one of its runs. Received: '{parent}'.\n"
    )
    for name in ("random.py", "socket.py"):
        (there / name).write_text("raise RuntimeError('this is the file of the user')")
    done = pipeline("rerun", parent, "--sweep", uri, "hydra.run.dir=runs", cwd=there)
    assert (
        f"rerun of sweep {parent}: {len(others)} of {len(others)} runs agree"
        in done.stderr
    )
    assert done.stderr.count(": bit-equal: ") == len(others)
    assert sorted(path.name for path in (there / "runs").iterdir()) == [
        str(number) for number in range(len(others))
    ]


def test_no_record_opens_a_port(tmp_path):
    """Whether ports may be open, where a secret is, and which GPU is used, says the user's own config alone."""
    hardware = {
        "workers": 2,
        "open_ports": True,
        "secret_file": "/etc/shadow",
        "gpu": 7,
    }
    recorded = SimpleNamespace(
        moved=lambda _: {"hardware": hardware},
        run=SimpleNamespace(info=SimpleNamespace(run_name="r")),
    )
    for own in ([], ["hardware=multi_worker", "hardware.secret_file=mine"]):
        again = Rerun(
            SimpleNamespace(values={}), composed(own), None, recorded, Gate(tmp_path)
        )
        found = again._placed("e")["hardware"]
        assert found == {
            "workers": 2,
            "open_ports": bool(own),
            "secret_file": "mine" if own else None,
            "gpu": None,
        }

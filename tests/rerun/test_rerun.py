"""`pipeline rerun`: runs in one folder, rerun from their records in another.

Few processes do most of it, since each loads TensorFlow: one makes the runs, and others
rerun them.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from mlflow.entities import Metric, Param

from pipeline.config.compose import composed
from pipeline.rerun import adapted_config
from pipeline.rerun.recorded_run import RecordedRun
from pipeline.trust.gate import Gate
from tests.parameters import mostly_slow
from tests.running import ROOT, Store, one_process, pipeline
from tests.shared import place_store

QUIET = "tracking.log_model=false tracking.system_metrics=false"
SMALL = f"training.epochs=1 hardware.deterministic=true {QUIET}"
OPTIMIZERS = sorted(path.stem for path in (ROOT / "conf" / "optimizer").glob("*.yaml"))
# The others are of a sweep that `--sweep` reruns, each job in a process of its own.
HERE = ("adamw",)
MULTIRUN = (
    f"train -m hydra/launcher=basic model=mlp {SMALL} tracking.experiment=optimizers"
)
UPDATES = 12  # in an epoch
OLD = Path(__file__).parents[1] / "fixtures" / "record_0"
FLIPPED_FILE = "the file digits-train.tfrecord-00000-of-00001 differs"

MINE = """
from pathlib import Path
import keras, numpy as np, tensorflow as tf
from pipeline.dataset import Data

def moons(data_dir):
    rows = np.load(Path(data_dir or ".") / "moons.npy")
    labels = rows[:, 2].astype("int64")
    examples = tf.data.Dataset.from_tensor_slices((rows[:, :2], labels))
    return Data(examples.take(200), examples.skip(200), classes=2)

def tiny(input_shape, classes, units=8):
    hidden = keras.layers.Dense(units, "relu")
    dropout = keras.layers.Dropout(0.2)
    output = keras.layers.Dense(classes)
    return keras.Sequential([keras.Input(input_shape), hidden, dropout, output])
"""


@dataclass(frozen=True)
class PlantedSweep:
    """Runs that were made in a folder.

    Attributes:
        folder: where they were made.
        store: where they are recorded.
        runs: their IDs by experiment and optimizer.
    """

    folder: Path
    store: Store
    runs: dict[tuple[str, str], str]

    @property
    def adamw(self) -> str:
        return self.runs["optimizers", "AdamW"]

    @property
    def shifted(self) -> str:
        return self.runs["shifted", "AdamW"]

    @property
    def own(self) -> str:
        return self.runs["own", "AdamW"]


@dataclass(frozen=True)
class Again:
    """Reruns of these runs.

    Attributes:
        folder: where they were rerun.
        answers: what each command line did.
        old: the ID of the run with the record of an old version.
    """

    folder: Path
    answers: dict[str, dict]
    old: str = ""


def write_own_code(folder: Path) -> None:
    """Write a user's own code, config and data."""
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
    folder = tmp_path_factory.mktemp("made")
    write_own_code(folder)
    runs = trained(folder, {"optimizers": f"{MULTIRUN} optimizer={','.join(HERE)}"})
    assert len(runs) == len(HERE)
    return PlantedSweep(folder, Store(folder), runs)


@pytest.fixture(scope="module")
def made_wider(made):
    """Return more runs: on images that are shifted, and of a user's model and data."""
    callback = (
        "{_target_: keras.callbacks.CSVLogger, "
        "filename: '${hydra:runtime.output_dir}/rows.csv'}"
    )
    shifted = (
        f"train {SMALL} dataset=digits_shifted dataset.data_dir=data model=cnn "
        "model.filters=[8] model.dropout=0.3 tracking.experiment=shifted "
        f'"+training.callbacks.rows={callback}"'
    )
    own = (
        f"train --config-dir conf {SMALL} tracking.experiment=own "
        "dataset=moons model=tiny"
    )
    runs = trained(made.folder, {"shifted": shifted, "own": own})
    assert len(runs) == 2
    return PlantedSweep(made.folder, made.store, made.runs | runs)


def trained(folder: Path, lines: dict[str, str]) -> dict[tuple[str, str], str]:
    """Run command lines, by experiment.

    Return the IDs of their runs by experiment and optimizer.
    """
    place_store(folder)
    answers = one_process(lines, folder)
    for name, answer in answers.items():
        assert answer["status"] == 0, (name, answer["err"])
    runs = {}
    for experiment in answers:
        for run in Store(folder).runs(experiment):
            target = run.data.params.get("optimizer._target_")
            if target is not None:  # the parent of a sweep has none
                runs[experiment, target.split(".")[-1]] = run.info.run_id
    return runs


@pytest.fixture(scope="module")
def again(made, tmp_path_factory):
    there = tmp_path_factory.mktemp("again")
    write_own_code(there)
    uri = store_of(made)
    adamw = made.adamw
    lines = {}
    for (_, optimizer), run_id in made.runs.items():
        lines[f"optimizer {optimizer}"] = f"rerun {run_id} {uri}"
    lines |= {
        "dry": f"rerun {adamw[:12]} --dry {uri} optimizer.beta_1=0.5",
        "beta": f"rerun {adamw} {uri} optimizer.beta_1=0.5 'hydra.run.dir=my runs'",
        "metric deleted": f"rerun {adamw} --dry {uri} '~training.metrics.accuracy'",
        "nothing deleted": f"rerun {adamw} --dry {uri} '~training.metrics.nonsense'",
    }
    return Again(there, one_process(lines, there))


@pytest.fixture(scope="module")
def again_wider(made_wider, again):
    """Return the reruns of the other runs, in the same folder."""
    there = again.folder
    shutil.copytree(made_wider.folder / "data", there / "data")
    shutil.copytree(made_wider.folder / "data", there / "flipped")
    (flipped,) = (there / "flipped").rglob("digits-train.tfrecord*")
    content = bytearray(flipped.read_bytes())
    content[len(content) // 2] ^= 1
    flipped.write_bytes(content)

    old = record_0(made_wider.store)
    uri = store_of(made_wider)
    adamw = made_wider.adamw
    own = made_wider.own
    shifted = f"rerun {made_wider.shifted} {uri}"
    trusting = "--config-dir conf --config-name trusting"
    lines = {
        "lion": f"rerun {adamw} {uri} optimizer=lion optimizer.learning_rate=0.02 "
        "training.updates=2",
        "shifted": f"{shifted} dataset.data_dir=data --allow keras.callbacks.CSVLogger",
        "flipped": f"{shifted} dataset.data_dir=flipped",
        "flipped, streamed": f"{shifted} dataset.data_dir=flipped "
        "dataset.in_memory=false",
        "flipped, other shifts": f"{shifted} dataset.data_dir=flipped "
        "dataset.augment.pixels=2",
        "flipped dry": f"{shifted} --dry dataset.data_dir=flipped",
        "other place": f"{shifted} --dry",
        "not prepared": f"{shifted} --dry dataset.data_dir=nowhere",
        "own refused": f"rerun {own} {uri}",
        "own allowed": f"rerun {own} {uri} --allow mine",
        "own trusting": f"rerun {own} {uri} {trusting} --dry",
        "own changed": f"rerun {own} {uri} --allow mine dataset.data_dir=changed",
        "old": f"rerun {old} {uri}",
        "old rate": f"rerun {old} {uri} optimizer.learning_rate=0.02",
    }
    return Again(there, again.answers | one_process(lines, there), old)


def store_of(made: PlantedSweep) -> str:
    """Return the override that names the store of some runs."""
    return f"tracking.uri={made.store.client.tracking_uri}"


def record_0(store: Store) -> str:
    """Return a run with the record that commit 9795822 made."""
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
    points = []
    for key, history in histories.items():
        for step, value in history.items():
            points.append(Metric(key, value, 0, int(step)))
    client.log_batch(run_id, metrics=points)
    for name in ("config.yaml", "overrides.yaml", "environment.json"):
        client.log_artifact(run_id, str(OLD / name))
    client.set_terminated(run_id)
    return run_id


def reruns(store: Store, run_id: str) -> list:
    """Return the reruns of a run, oldest first."""
    rerun_ids = store.client.get_run(run_id).data.tags.get("rerun.by", "").split(", ")
    return [store.client.get_run(rerun_id) for rerun_id in rerun_ids if rerun_id]


def equal(store: Store, old: str, new: str) -> int:
    """Check that two runs are bit-identical; return how many points they have."""
    old_histories = store.histories(store.client.get_run(old))
    new_histories = store.histories(store.client.get_run(new))
    assert old_histories == new_histories
    return sum(len(history) for history in old_histories.values())


@pytest.mark.slow
def test_a_run_runs_again_to_the_bit(made, again):
    done = 0
    for (experiment, target), run_id in made.runs.items():
        if experiment != "optimizers":
            continue
        answer = again.answers[f"optimizer {target}"]
        assert answer["status"] == 0, answer["err"]
        new = reruns(made.store, run_id)[0]
        points = equal(made.store, run_id, new.info.run_id)
        assert points >= 9 * UPDATES
        assert f"bit-equal: {points} points of " in answer["err"]
        done += 1
    assert done == len(HERE)


@pytest.mark.slow
def test_a_rerun_says_where_it_comes_from_and_what_came_of_it(made, again):
    client = made.store.client
    old = client.get_run(made.adamw)
    new = reruns(made.store, made.adamw)[0]
    assert new.data.tags["rerun.of"] == made.adamw
    assert new.data.tags["rerun.verdict"] == "bit-equal"
    assert new.data.tags["mlflow.source.name"].startswith(
        f"pipeline rerun {made.adamw}"
    )
    assert new.data.tags["config.hash"] == old.data.tags["config.hash"]
    assert new.info.run_name == f"rerun of {old.info.run_name}"
    for run in (old, new):  # what became of `auto`
        assert run.data.params["hardware.fused_attention"] == "false"
    assert "sweep" not in new.data.tags  # the job of a sweep runs alone
    (page,) = client.list_artifacts(new.info.run_id, "rerun")
    file = Path(client.download_artifacts(new.info.run_id, page.path))
    text = file.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>")
    assert made.adamw in text
    assert new.info.run_id in text


@pytest.mark.slow
def test_dropout_augmentation_and_a_callback_in_the_run_directory(
    made_wider, again_wider
):
    answer = again_wider.answers["shifted"]
    assert answer["status"] == 0, answer["err"]
    assert "bit-equal" in answer["err"]
    old = made_wider.shifted
    new = reruns(made_wider.store, old)[0]
    assert equal(made_wider.store, old, new.info.run_id) >= 9 * UPDATES
    written = Path(new.data.params["training.callbacks.rows.filename"])
    assert written.is_relative_to(again_wider.folder / "outputs")
    assert written.exists()


@pytest.mark.slow
def test_two_runs_are_compared_without_a_rerun(made, again):
    adamw = made.adamw
    uri = store_of(made)
    # The rerun with another beta_1 is the last one.
    *_, other = reruns(made.store, adamw)
    before = len(made.store.runs())
    lines = {
        "same": f"rerun {adamw} --with {adamw[:12]} {uri}",
        "other": f"rerun {adamw} --with {other.info.run_id} {uri}",
        "dry": f"rerun {adamw} --with {adamw} --dry {uri}",
        "changed": f"rerun {adamw} --with {adamw} {uri} seed=3",
    }
    answers = one_process(lines, again.folder)
    assert answers["same"]["status"] == 0
    said = f"run {adamw} compared with {adamw}: bit-equal: "
    assert said in answers["same"]["err"]
    assert answers["other"]["status"] == 3
    assert f"compared with {adamw}: different from update " in answers["other"]["err"]
    assert answers["dry"]["status"] == answers["changed"]["status"] == 2
    assert "--with must come without overrides" in answers["changed"]["err"]
    assert len(made.store.runs()) == before


@pytest.mark.slow
def test_a_users_model_and_dataset_once_they_are_allowed(made_wider, again_wider):
    answers = again_wider.answers
    assert answers["own refused"]["status"] == 2
    assert "mine.moons" in answers["own refused"]["err"]
    assert answers["own refused"]["changed"] == []
    for case in ("own allowed", "own trusting"):
        assert answers[case]["status"] == 0, answers[case]["err"]
    assert "bit-equal" in answers["own allowed"]["err"]
    old = made_wider.own
    (new,) = reruns(made_wider.store, old)
    # Two updates of nine metrics, one evaluation of two.
    assert equal(made_wider.store, old, new.info.run_id) >= 20


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "named"),
    [
        ("flipped", FLIPPED_FILE),
        ("flipped, streamed", FLIPPED_FILE),
        ("flipped, other shifts", FLIPPED_FILE),
        ("own changed", "the split train differs"),
    ],
)
def test_other_data_are_refused_before_training(made_wider, again_wider, case, named):
    answer = again_wider.answers[case]
    assert answer["status"] == 2
    last = answer["err"].splitlines()[-1]
    assert last.startswith("pipeline: dataset must be that of run ")
    assert named in last
    assert answer["changed"] == []
    assert "update 1/" not in answer["err"]
    # What was rejected has no run.
    assert len(reruns(made_wider.store, made_wider.shifted)) == 1


@pytest.mark.slow
def test_dry_shows_the_plan_and_the_differences_and_makes_nothing(
    made_wider, again_wider
):
    answers = again_wider.answers
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
        "differs: dataset.data_dir must contain digits.*, already prepared",
        answers["not prepared"]["err"],
    )


@pytest.mark.slow
def test_a_callback_that_writes_is_left_out_unless_it_is_allowed(again_wider):
    line = (
        "  left out: training.callbacks.rows: keras.callbacks.CSVLogger writes files; "
        "--allow keras.callbacks.CSVLogger permits this"
    )
    assert line in again_wider.answers["other place"]["err"].splitlines()
    assert "left out" not in again_wider.answers["shifted"]["err"]


@pytest.mark.slow
def test_an_override_takes_a_key_of_the_record_away(again):
    deleted = again.answers["metric deleted"]
    assert deleted["status"] == 0, deleted["err"]
    nothing = again.answers["nothing deleted"]
    assert nothing["status"] == 2
    error = "training.metrics.nonsense must be in the config to be deleted"
    assert nothing["err"].splitlines()[-1].startswith(f"pipeline: {error}")


@pytest.mark.slow
def test_data_are_read_where_the_record_says_if_that_is_below_this_folder(again_wider):
    for case in ("other place", "shifted"):
        assert "dataset.data_dir: " not in again_wider.answers[case]["err"]


@pytest.mark.slow
def test_another_beta_differs_where_adam_first_uses_it(made, again):
    """The first update of Adam does not depend on beta: m/(1−β) = g, whatever β.

    So the weights part with update 2, and the loss that is computed on them is that of
    update 3.
    """
    answer = again.answers["beta"]
    assert answer["status"] == 3
    assert "changed: optimizer.beta_1=0.5" in answer["err"]
    assert "different from update 3 on: train/loss at update 3: " in answer["err"]
    changed = [
        run
        for run in reruns(made.store, made.adamw)
        if run.data.params["optimizer.beta_1"] == "0.5"
    ]
    new = changed[0]
    assert new.data.tags["rerun.verdict"] == "different"
    old_losses = made.store.history(made.store.client.get_run(made.adamw), "train/loss")
    new_losses = made.store.history(new, "train/loss")
    assert old_losses[1] == new_losses[1]
    assert old_losses[2] == pytest.approx(new_losses[2], rel=1e-6)
    assert old_losses[3] != pytest.approx(new_losses[3], rel=1e-4)
    assert (again.folder / "my runs" / "config.yaml").exists()


@pytest.mark.slow
def test_what_follows_a_changed_key_follows_it_again(made_wider, again_wider):
    """The record holds the schedule's rates as numbers.

    An override of the rate must still reach them.
    """
    answer = again_wider.answers["lion"]
    assert answer["status"] == 3
    assert (
        "different from update 1 on: train/learning_rate at update 1" in answer["err"]
    )
    runs = reruns(made_wider.store, made_wider.adamw)
    lion = next(run.data.params for run in runs if "Lion" in str(run.data.params))
    assert lion["optimizer.learning_rate"] == lion["schedule.warmup_target"] == "0.02"
    assert lion["schedule.initial_learning_rate"] == "0.002"
    assert "optimizer.epsilon" not in lion  # nothing of AdamW is left


@pytest.mark.slow
def test_a_record_of_an_older_schema_runs_again(made_wider, again_wider):
    store = made_wider.store
    old = again_wider.old
    answer = again_wider.answers["old"]
    assert answer["status"] == 0, answer["err"]
    assert (
        f"the record of {old} has schema 0 and is converted to schema 3"
        in answer["err"]
    )
    assert "without train/gradient_noise_scale" in answer["err"]
    (new,) = reruns(store, old)
    # The defaults have not been these since.
    assert new.data.params["hardware.fused_attention"] == "false"
    assert new.data.params["schedule.initial_learning_rate"] == "0.0"
    assert new.data.params["hardware.xla_scope"] == "step"
    histories = json.loads((OLD / "histories.json").read_text())
    for key, history in histories.items():
        recorded = {int(step): value for step, value in history.items()}
        assert store.history(new, key) == pytest.approx(recorded, rel=1e-5), key
    old_rate = again_wider.answers["old rate"]
    assert old_rate["status"] == 2
    assert (
        "optimizer.learning_rate must come with an override of the schedule"
        in old_rate["err"]
    )


@pytest.mark.slow
def test_the_recorded_value_counts_although_a_default_has_changed_since(made, tmp_path):
    code = tmp_path / "code"
    for name in ("pipeline", "hydra_plugins", "conf", "sweeps"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, code / name, ignore=ignored)
    changed = code / "conf/optimizer/adamw.yaml"
    changed.write_text(changed.read_text().replace("beta_1: 0.9", "beta_1: 0.1"))
    there = tmp_path / "there"
    there.mkdir()
    here = {"cwd": there, "PYTHONPATH": str(code), "warm": False}

    # It is the changed copy that runs.
    composed_config = pipeline("train", "--cfg", "job", **here).stdout
    assert "beta_1: 0.1" in composed_config
    done = pipeline("rerun", made.adamw, store_of(made), **here)
    new = reruns(made.store, made.adamw)[-1]
    assert f"rerun {new.info.run_id} of " in done.stderr
    assert ": bit-equal: " in done.stderr
    assert "differs: code: the files of the package differ" in done.stderr


@pytest.mark.parametrize("count", mostly_slow([2, len(OPTIMIZERS)], [], [2]))
def test_a_whole_sweep_runs_again_each_job_in_a_process(tmp_path, count):
    """A sweep over optimizers that the other tests leave out."""
    folder = tmp_path / "made"
    there = tmp_path / "there"
    folder.mkdir()
    there.mkdir()
    others = sorted(set(OPTIMIZERS) - set(HERE))[-count:]
    pipeline(*shlex.split(MULTIRUN), f"optimizer={','.join(others)}", cwd=folder)
    store = Store(folder)
    runs = store.runs("optimizers")
    parents = [run for run in runs if "sweep.name" in run.data.tags]
    parent = parents[0].info.run_id
    uri = f"tracking.uri={store.client.tracking_uri}"
    rejected = pipeline("rerun", parent, uri, cwd=there, status=2)
    assert rejected.stderr == (
        "pipeline: RUN_ID is a sweep: rerun it with --sweep, or rerun one of its runs. "
        f"Received: '{parent}'.\n"
    )
    for name in ("random.py", "socket.py"):
        (there / name).write_text("raise RuntimeError('this is the file of the user')")
    done = pipeline("rerun", parent, "--sweep", uri, "hydra.run.dir=runs", cwd=there)
    agree = f"{len(others)} of {len(others)} runs agree"
    assert f"rerun of sweep {parent}: {agree}" in done.stderr
    assert done.stderr.count(": bit-equal: ") == len(others)
    run_dirs = sorted(path.name for path in (there / "runs").iterdir())
    assert run_dirs == [str(number) for number in range(len(others))]


@pytest.mark.parametrize(
    ("own_overrides", "open_ports", "secret_file"),
    [
        ([], False, None),
        (["hardware=multi_worker", "hardware.secret_file=mine"], True, "mine"),
    ],
)
def test_no_record_opens_a_port(tmp_path, own_overrides, open_ports, secret_file):
    """The user's own config alone says what of a machine a run uses.

    That is whether ports are opened, where a secret is, and which GPU is used.
    """
    hardware = {
        "workers": 2,
        "open_ports": True,
        "secret_file": "/etc/shadow",
        "gpu": 7,
    }
    run = SimpleNamespace(info=SimpleNamespace(run_name="r"))
    recorded = RecordedRun(run, {"hardware": hardware}, {}, {}, {})
    config = adapted_config.placed(
        recorded, composed(own_overrides), Gate(tmp_path), "e"
    )
    assert config["hardware"] == {
        "workers": 2,
        "open_ports": open_ports,
        "secret_file": secret_file,
        "gpu": None,
    }

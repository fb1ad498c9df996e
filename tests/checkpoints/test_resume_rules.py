"""A run that was interrupted goes on to the same result.

By `pipeline resume`, and by `training.resume=auto`.
"""

from __future__ import annotations

import importlib
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.checkpoints import files, recorded_config, resume_rules, snapshot
from pipeline.checkpoints.resume_rules import Continuation
from pipeline.common.errors import ConfigError
from pipeline.config import compose
from pipeline.config.resolve import resolve
from pipeline.tracking import journal_file, provenance
from pipeline.tracking.journal_file import Past
from pipeline.tracking.journal_lines import RunStart
from tests.checkpoints.test_files import PLAN, saved, small
from tests.parameters import mostly_slow
from tests.running import Store, one_process, pipeline

MINE = """
import os, signal
import keras

class Interrupt(keras.callbacks.Callback):
    "Ends the process in the middle of the update that the environment names."
    def on_train_batch_end(self, batch, logs=None):
        if str(int(self.model.optimizer.iterations.numpy())) == os.environ.get("AT"):
            os.kill(os.getpid(), int(os.environ["BY"]))

    def get_state(self):
        return {}

    def set_state(self, state):
        pass
"""
UPDATES = 40
RUN = (
    "model=mlp",
    "model.dropout=0.2",
    "optimizer=momentum",
    "hardware.deterministic=true",
    f"training.updates={UPDATES}",
    "training.checkpoint_every=7",
    "training.evaluate_every=5",
    "tracking.log_model=false",
    "tracking.system_metrics=false",
    "+training.callbacks.it={_target_: mine.Interrupt}",
    "hydra.run.dir=run",
)
AUTO = (*RUN, "training.resume=auto")


def folder_of(tmp_path: Path) -> Path:
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = folder_of(tmp_path_factory.mktemp("undisturbed"))
    pipeline("train", *RUN, cwd=folder)
    return folder


def interrupted(folder, at, by, *arguments, **more):
    """Train, and end the process in the update `at` by the signal `by`."""
    status = {2: 130, 15: 143, 12: 143, 9: -9}[by]
    return pipeline(
        "train", *arguments, cwd=folder, status=status, AT=str(at), BY=str(by), **more
    )


def histories(folder):
    store = Store(folder)
    curves = store.histories(store.run())
    return {key: curve for key, curve in curves.items() if not key.startswith("perf/")}


def weights(folder):
    last = files.at(folder / "run" / "checkpoints", UPDATES)
    return snapshot.read(last).arrays


def check_equal(folder, undisturbed):
    """Check that two folders have the same run, bit for bit."""
    run = Store(folder).run()
    assert (run.info.status, run.data.tags.get("failure")) == ("FINISHED", None)
    assert histories(folder) == histories(undisturbed)
    arrays = weights(folder)
    expected = weights(undisturbed)
    assert arrays.keys() == expected.keys()
    for name, array in arrays.items():
        assert array.tobytes() == expected[name].tobytes(), name


# `make test` has a command that goes on after a power cut, in test_power_cuts.py.
@pytest.mark.parametrize("by", mostly_slow([2, 9, 12, 15], [], [9]))
def test_the_same_command_goes_on_to_the_same_result(tmp_path, undisturbed, by):
    folder = folder_of(tmp_path)
    interrupted(folder, 17, by, *AUTO)
    resumed = pipeline("train", *AUTO, cwd=folder)
    # A signal that can be waited for leaves a checkpoint of the update that it came in.
    # One that cannot may come while a thread still writes the latest.
    update = update_before(resumed)
    if by == 9:
        assert update in (7, 14)
    else:
        assert update == 17
    check_equal(folder, undisturbed)
    segments = json.loads((folder / "run" / "segments.json").read_text())
    assert [segment["after"] for segment in segments] == [0, update]
    assert Store(folder).run().data.tags["segments"] == "2"


def update_before(resumed):
    """Return the update after which a command says that it goes on."""
    line = re.compile(r"^continues after update (\d+)$", re.MULTILINE)
    (update,) = line.findall(resumed.stderr)
    return int(update)


@pytest.mark.slow
def test_a_run_resumes_from_its_best_checkpoint_if_the_others_are_damaged(
    tmp_path, undisturbed
):
    folder = folder_of(tmp_path)
    best = "training.keep_best={metric: val/loss, mode: min}"
    interrupted(folder, 17, 15, *RUN, best)
    for meta in (folder / "run" / "checkpoints").glob("[0-9]*/meta.json"):
        meta.write_text("{}")
    said = pipeline("resume", "run", cwd=folder).stderr
    assert "the checkpoint of the best evaluation is used" in said
    assert "continues after update 15" in said
    expected = histories(undisturbed)
    assert expected.items() <= histories(folder).items()
    # The weights are those of the undisturbed run, bit for bit.
    arrays = weights(undisturbed)
    for name, array in weights(folder).items():
        assert array.tobytes() == arrays[name].tobytes(), name


@pytest.mark.slow
def test_resume_by_the_id_of_the_run(tmp_path, undisturbed):
    folder = folder_of(tmp_path)
    interrupted(folder, 3, 9, *RUN)
    run = Store(folder).run()
    refused = pipeline("resume", run.info.run_id[:8], cwd=folder, status=2)
    command = f"pipeline resume {folder}/run training.resume=auto"
    assert f"to train the run from the start: {command}. Received" in refused.stderr
    # From the start, in the same run.
    (_, *arguments) = command.split(" ")
    pipeline(*arguments, cwd=folder, status=-9, AT="23", BY="9")
    pipeline("resume", run.info.run_id[:8], cwd=folder)
    check_equal(folder, undisturbed)
    assert Store(folder).run().info.run_id == run.info.run_id


@pytest.mark.slow
def test_another_cut_agrees_within_rounding(tmp_path):
    """The negative control is in test_files.py.

    There, other runs follow without the state of dropout or momentum.
    """
    exact = (*RUN, "hardware.precision=float64", "model.dropout=0")
    undisturbed = folder_of(tmp_path / "undisturbed")
    pipeline("train", *exact, "accumulation.factor=2", cwd=undisturbed)
    folder = folder_of(tmp_path / "cut")
    interrupted(folder, 17, 9, *exact, "accumulation.factor=2")
    another_cut = ("accumulation.factor=4", "hardware.replicas=2")
    err = pipeline("resume", "run", *another_cut, cwd=folder).stderr
    assert "accumulation.factor 4 (was 2)" in err
    assert "hardware.replicas 2 (was 1)" in err

    curves = histories(folder)
    expected = histories(undisturbed)
    for key in (
        "train/loss",
        "val/loss",
        "train/gradient_norm",
        "train/accuracy",
        "train/learning_rate",
    ):
        assert curves[key].keys() == expected[key].keys()
        # Rounding is amplified a hundredfold over these updates, from 1e-16 of a number
        # of order 1.
        for step, value in expected[key].items():
            assert abs(curves[key][step] - value) < 1e-12, key
    assert list(curves["train/micro_steps"]) == list(range(1, UPDATES + 1))

    # A rerun, which has only the first cut, does not compare what depends on the cut.
    run_id = Store(folder).run().info.run_id
    said = pipeline("rerun", run_id, "--allow", "mine", cwd=folder).stderr
    assert f"of {run_id}: equal within rounding" in said
    assert re.search(r"\(without .*train/micro_steps\)", said)


@pytest.mark.slow
@pytest.mark.parametrize("at", [5, 17])
def test_another_horizon_does_not_mix_with_the_rows_of_this_one(tmp_path, at):
    """Updates after the checkpoint have rows, of which MLflow replaces none."""
    folder = folder_of(tmp_path)
    interrupted(folder, at, 9, *AUTO)
    before = histories(folder)
    other = ("training.epochs=null", "training.updates=19")
    rejected = pipeline("train", *AUTO, *other, cwd=folder, status=2)
    assert re.search(
        r"hydra\.run\.dir must be resumed with its own horizon, since \d+ updates? "
        r"after update \d+ will be trained again and already have rows; for another "
        r"horizon, (train into another folder|"
        r"begin a new run there, with start.run=\S+/run@\d+)",
        rejected.stderr,
    )
    assert rejected.stderr.endswith("Received: {updates: 19}.\n")
    assert histories(folder) == before


@pytest.mark.slow
def test_a_longer_horizon(tmp_path):
    folder = folder_of(tmp_path)
    pipeline("train", *AUTO, cwd=folder)
    assert "has finished: there" in pipeline("train", *AUTO, cwd=folder).stderr
    pipeline("resume", "run", "training.updates=50", cwd=folder)
    assert list(histories(folder)["train/loss"]) == list(range(1, 51))
    assert Store(folder).run().info.status == "FINISHED"


@pytest.mark.slow
def test_changed_settings_are_recorded_with_their_segment(tmp_path):
    folder = folder_of(tmp_path)
    interrupted(folder, 9, 15, *RUN)
    every = "training.evaluate_every=3"
    said = pipeline("resume", "run", every, cwd=folder, status=143, AT="17", BY="15")
    assert "training.evaluate_every 3 (was 5)" in said.stderr
    (_, segment) = json.loads((folder / "run" / "segments.json").read_text())
    assert segment["settings"] == {"training.evaluate_every": 3}

    # Without the override, the run has its first value again, and says so.
    said = pipeline("resume", "run", cwd=folder).stderr
    assert "training.evaluate_every 5 (was 3)" in said
    (*_, segment) = json.loads((folder / "run" / "segments.json").read_text())
    assert "settings" not in segment
    run_id = Store(folder).run().info.run_id
    rerun = pipeline("rerun", "--dry", run_id, "--allow", "mine", cwd=folder)
    assert (
        "the run was resumed after update 9 with other values of "
        "training.evaluate_every; the rerun uses the first values" in rerun.stderr
    )


@pytest.mark.slow
def test_what_a_callback_has_ended_does_not_go_on(tmp_path):
    folder = folder_of(tmp_path)
    # A loss that would have to fall by 100.
    early = (
        "{_target_: keras.callbacks.EarlyStopping, monitor: loss, min_delta: 100, "
        "patience: 1}"
    )
    pipeline("train", *RUN, f"+training.callbacks.early={early}", cwd=folder)
    last = int(Store(folder).run().data.tags["updates"])
    rejected = pipeline("resume", "run", "training.updates=50", cwd=folder, status=2)
    rule = (
        f"RUN was ended by training.callbacks.early after update {last}: begin a "
        f"new run there, with start.run={folder}/run@{last}. Received: "
    )
    assert rejected.stderr.splitlines()[-1].startswith(f"pipeline: {rule}")
    fork = ("training.updates=30", f"start.run=run@{last}", "hydra.run.dir=on")
    pipeline("train", *RUN[:-1], *fork, cwd=folder)


OWN = """
import numpy as np, tensorflow as tf
def data():
    x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
    split = tf.data.Dataset.from_tensor_slices((x, (x.sum(1) > 0).astype("int64")))
    return split, split.take(8), split.skip(56)
def unlabeled():
    split, validation, test = data()
    return split, validation, test.map(lambda x, y: x)
"""


@pytest.mark.parametrize("name", mostly_slow(["own", "plain"], [], ["own"]))
def test_data_of_ones_own_go_on_as_they_were(tmp_path, name):
    """They have the order that the first run settled.

    A third split is the test split; it has to have labels as the others do.
    """
    folder = folder_of(tmp_path)
    (folder / "own.py").write_text(OWN)
    configs = folder / "conf" / "dataset"
    configs.mkdir(parents=True)
    config = "_target_: own.data\n"
    if name == "own":
        config += "in_memory: auto\n"
    (configs / f"{name}.yaml").write_text(config)
    (configs / "unlabeled.yaml").write_text("_target_: own.unlabeled\n")
    common = (
        "--config-dir",
        "conf",
        "model=mlp",
        "accumulation.effective_batch_size=8",
        "tracking.log_model=false",
        "+model.classes=2",
    )
    own = (
        *common,
        f"dataset={name}",
        f"hydra.run.dir={name}",
        "training.resume=auto",
    )
    pipeline("train", *own, "training.updates=6", cwd=folder)
    err = pipeline("train", *own, "training.updates=9", cwd=folder).stderr
    assert "continues after update 6" in err
    assert "test/accuracy" in err
    rejected = pipeline("train", *common, "dataset=unlabeled", cwd=folder, status=2)
    rule = "dataset._target_ must return its test split with labels, like its training split."
    assert rule in rejected.stderr


@pytest.mark.slow
def test_a_sweep_goes_on_inside_its_interrupted_jobs(tmp_path, undisturbed):
    folder = folder_of(tmp_path)
    sweep = ("train", "-m", *RUN[:-1], "seed=0,1")
    killed = "hydra.sweep.dir=jobs"
    pipeline(*sweep, killed, cwd=folder, status=1, AT="17", BY="9")
    store = Store(folder)
    (parent,) = [run for run in store.runs() if "sweep.name" in run.data.tags]
    assert [run.info.status for run in store.trained()] == ["KILLED", "KILLED"]
    more = ("hydra.sweep.dir=more", f"tracking.sweep={parent.info.run_id}")
    pipeline(*sweep, *more, cwd=folder)

    first, second = sorted(
        store.trained(), key=lambda run: int(run.data.params["seed"])
    )
    for run in (first, second):
        assert (run.info.status, run.data.tags["segments"]) == ("FINISHED", "2")
        assert list(store.history(run, "train/loss")) == list(range(1, UPDATES + 1))
    expected = Store(undisturbed).history(Store(undisturbed).run(), "train/loss")
    assert store.history(first, "train/loss") == expected
    assert store.client.get_run(parent.info.run_id).info.status == "FINISHED"


def test_a_run_that_goes_on_keeps_its_own_store_unless_another_is_named(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://exported:80")

    def resumed(store: str, *overrides: str) -> str:
        composed = compose.composed(overrides)
        past = Past(Path("journal.jsonl"), start=RunStart(store=store))
        spec = resume_rules.with_own_store(resolve(composed, overrides), past)
        return spec.config.tracking.uri

    own = "sqlite:////runs/mlflow.db"
    assert resumed(own) == own
    assert resumed(own, "tracking.uri=http://named:80") == "http://named:80"
    # It is rejected later, as the store of another run.
    assert resumed("http://me:***@host") == "http://exported:80"


START = {"format": 1, "store": "sqlite:///x", "tags": {"journal": "1"}}


# In all of them, the checkpoint is further from the last row than the current
# `log_every` allows a run from update 0.
@pytest.mark.parametrize(
    ("tags", "rows", "log_every"),
    [
        ({"start.update": "25"}, [], 20),  # a fork that has no row yet
        ({}, [10, 20, 30], 1),  # as written with log_every=10
        ({}, [10, 20, 30], 10),  # the same one, resumed as it was
    ],
)
def test_what_the_journal_has_of_a_checkpoint_is_not_guessed_from_log_every(
    tmp_path, tags, rows, log_every
):
    run = tmp_path / "run"
    run.mkdir()
    writer = journal_file.create(run / journal_file.JOURNAL_NAME)
    writer.write({"start": {**START, "tags": {**START["tags"], **tags}}})
    for update in rows:
        writer.write({"step": update, "metrics": {"train/loss": 1.0}})
    written = writer.position
    journal = SimpleNamespace(position=lambda: written, sync=writer.sync)
    with files.Checkpoints(run / "checkpoints", 1, PLAN, journal=journal) as saving:
        saving.save(35, lambda: small(35))
    writer.close()

    spec = resolve(compose.composed([f"tracking.log_every={log_every}"]), [])
    continuation = resume_rules.find_continuation(run, spec, required=True)
    continuation.past.close()
    assert continuation.updates_done == 35

    # Without its last line, the journal lacks a row of the checkpoint.
    path = run / journal_file.JOURNAL_NAME
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]) + b"{\n")
    rule = "RUN must have a journal of format 1"
    if rows:
        rule = (
            "RUN must have an intact checkpoint with all of its rows in journal.jsonl "
            f"(line {len(lines)} is not as it was written)"
        )
    with pytest.raises(ConfigError, match=re.escape(rule)):
        resume_rules.find_continuation(run, spec, required=True, key="RUN")


def test_a_checkpoint_without_a_position_is_at_most_log_every_after_a_row(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    writer = journal_file.create(run / journal_file.JOURNAL_NAME)
    writer.write({"start": START})
    writer.write({"step": 10, "metrics": {"train/loss": 1.0}})
    writer.close()
    saved(run / "checkpoints", 14, 19, 20, keep=3)

    for log_every, updates_done in ((10, 19), (5, 14)):
        spec = resolve(compose.composed([f"tracking.log_every={log_every}"]), [])
        continuation = resume_rules.find_continuation(run, spec, required=True)
        continuation.past.close()
        assert continuation.updates_done == updates_done


@pytest.mark.slow
def test_what_would_be_another_run_is_rejected(tmp_path, undisturbed):
    folder = folder_of(tmp_path)
    interrupted(folder, 17, 9, *RUN)
    no_checkpoint = ("hydra.run.dir=none", "training.checkpoint_every=null")
    pipeline("train", *RUN[:-1], *no_checkpoint, cwd=folder)
    shutil.copytree(undisturbed / "run", folder / "done")
    shutil.copytree(undisturbed / "run", folder / "lost")
    shutil.rmtree(folder / "lost" / "checkpoints" / str(UPDATES))
    (saved,) = (path.name for path in (folder / "lost" / "checkpoints").iterdir())
    lost_weights = (
        f"RUN cannot be continued: it has finished, with rows up to update {UPDATES}, "
        f"but its last checkpoint is that of update {saved}. To train on from there, "
        f"begin a new run with the same overrides and start.run={folder}/lost@{saved}."
    )
    shutil.copytree(folder / "run", folder / "old")
    old_start = '{"time":1,"start":{"experiment":"e"}}\n'
    (folder / "old" / "journal.jsonl").write_text(old_start)
    shutil.copytree(undisturbed / "run", folder / "torn")
    torn = folder / "torn" / "journal.jsonl"
    torn.write_text(torn.read_text().replace('"step":3,', '"step":4,', 1))
    shutil.copytree(folder / "run", folder / "other")
    shutil.copytree(folder / "run", folder / "edited")
    config = folder / "edited" / "config.yaml"
    config.write_text(config.read_text().replace("\nseed: 0\n", "\nseed: 3\n"))
    edited = (
        "RUN must have the config.yaml with which the run began; undo your edits of it, "
        "and give what a resumed run may change as overrides (KEY=VALUE). Edited: seed "
        "3 (was 0). Received: "
    )

    rule_by_run = {
        "edited": edited,
        "nowhere": "RUN must be one run directory, or the start of the ID of one run "
        f"whose directory lies below {folder}. Received: 'nowhere'.",
        "run seed=1": "seed must be that of the run, 0. Received: 1.",
        "run model.hidden=[8]": "model.hidden must be that of the run, [128, 128]. "
        "Received: [8].",
        "run optimizer.learning_rate=1": "optimizer.learning_rate must be that of the "
        "run, 0.05. Received: 1.",
        "run accumulation.effective_batch_size=64": "accumulation.effective_batch_size "
        "must be that of the run, 128. Received: 64.",
        "run hardware.precision=float64": "hardware.precision must be that of the run, "
        "'float32'. Received: 'float64'.",
        "run tracking.uri=sqlite:///elsewhere.db": "tracking.uri must be the store of "
        "the run, sqlite:",
        "run hydra.run.dir=x": "arguments must not set keys of Hydra: a run continues in "
        "its own directory.",
        # 14 updates, or 7 where that was not written yet.
        "run training.updates=5": "RUN must be resumed with its own horizon, since ",
        "": "RUN must be given: see pipeline resume --help.",
        "none training.updates=50": "RUN must have a checkpoint from which to "
        "train to a longer horizon.",
        "torn": "RUN must have an intact checkpoint with all of its rows in "
        "journal.jsonl (line ",
        # The user names the run directory by an argument, also with `auto`.
        "run training.resume=auto training.updates=5": "RUN must be resumed with its "
        "own horizon, since ",
        "done": "RUN has finished: a longer horizon continues it, and pipeline sync uploads what "
        "its store lacks.",
        "lost": lost_weights,
        "lost training.updates=50": lost_weights,
        "none": "RUN has finished: it has no checkpoint from which a longer horizon could "
        "continue it, and pipeline sync uploads what its store lacks.",
        "old": "RUN must have a journal of format 1 (it was written by an earlier "
        "version).",
    }
    rule_by_line = {
        "train model=mlp hydra.run.dir=run": "hydra.run.dir must be a folder without a "
        "run in it; training.resume=auto continues that run.",
        "train model=cnn training.resume=auto hydra.run.dir=run": "model._target_ must "
        "be that of the run,",
    }
    for run, rule in rule_by_run.items():
        rule_by_line[f"resume {run}"] = rule

    answers = one_process({line: line for line in rule_by_line}, folder)
    for line, rule in rule_by_line.items():
        answer = answers[line]
        assert answer["status"] == 2, (line, answer)
        last = answer["err"].splitlines()[-1]
        assert last.startswith(f"pipeline: {rule}"), (line, answer["err"])
        for path in answer["changed"]:
            assert path.startswith("mlruns"), line


GROUPS = "".join(f"{key}: {{}}\n" for key in recorded_config.FORM)
# The content of config.yaml, and the end of the message.
CONFIGS = {
    "empty": (b"{}\n", "line 1: dataset is missing"),
    "cut": (
        b"dataset: {}\nmodel: [\n",
        "line 3: expected the node content, but found '<stream end>'",
    ),
    "endless": (b"dataset: &a\n  b: *a\n", "line 2: an alias is not expected"),
    "number": (
        GROUPS.replace("tracking: {}", "tracking: 5").encode(),
        "line 9: tracking must be a mapping, but is an integer",
    ),
    "binary": (
        b"dataset: {}\n\xff\n",
        "line 2: 'utf-8' codec can't decode byte 0xff in position 12",
    ),
    "signs": (b"dataset: {}\n\x00\n", "line 2: unacceptable character #x0000"),
}


def test_a_damaged_config_is_rejected_by_its_line(tmp_path):
    for name, (content, _) in CONFIGS.items():
        (tmp_path / name).mkdir()
        writer = journal_file.create(tmp_path / name / journal_file.JOURNAL_NAME)
        writer.write({"start": START})
        writer.close()
        (tmp_path / name / "config.yaml").write_bytes(content)

    answers = one_process({name: f"resume {name}" for name in CONFIGS}, tmp_path)
    for name, (_, reason) in CONFIGS.items():
        answer = answers[name]
        rule = f"RUN must have a config.yaml that can be read (config.yaml, {reason}"
        assert answer["status"] == 2, answer
        last = answer["err"].splitlines()[-1]
        assert last.startswith(f"pipeline: {rule}"), answer["err"]
        assert answer["changed"] == []


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "line 1: Expecting property name enclosed in double quotes"),
        ("[]", "line 1: the content must be a mapping, but is a list"),
        (
            '{"name": "a", "version": "1", "examples": {},\n "files":\n 5}',
            "line 2: files must be a mapping, but is an",
        ),
        (
            '{"name": "a", "version": "1",\n "examples": {"train": null}}',
            "line 2: train must be an integer, but is null",
        ),
        ("[" * 100_000, "line 1: maximum recursion depth exceeded"),
    ],
)
def test_a_damaged_record_of_the_data_is_rejected_by_its_line(tmp_path, text, reason):
    (tmp_path / journal_file.DATASET_RECORD).write_text(text)
    past = SimpleNamespace(described=True, run_id="")
    for key in ("RUN", "hydra.run.dir"):
        continuation = Continuation(tmp_path, key, None, past, None)
        rule = (
            f"{key} must have a dataset.json that can be read (dataset.json, {reason}"
        )
        with pytest.raises(ConfigError, match=re.escape(rule)):
            continuation.check_dataset({})


@pytest.mark.parametrize(
    "precision", mostly_slow(["float64", "mixed_bfloat16"], ["float64"])
)
def test_in_another_precision_it_is_another_run(precision):
    recorded = resolve(compose.composed([]), []).recorded
    spec = resolve(compose.composed([f"hardware.precision={precision}"]), [])
    segment = {"cut": {"effective_batch_size": 128}}
    start = RunStart(store=spec.config.tracking.uri, segment=segment)
    past = Past(Path("journal.jsonl"), start=start)
    rule = "hardware.precision must be that of the run, 'float32'"
    with pytest.raises(ConfigError, match=rule):
        resume_rules.changes(recorded, spec, past)


def test_changed_code_of_ones_own_is_rejected_by_its_file(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("own_code", "own_removed", "own_same"):
        (tmp_path / f"{name}.py").write_text("ACTIVATION = 'relu'")
        importlib.import_module(name)
    segment = {"code": provenance.hashes_of_own_code()}
    (tmp_path / "own_code.py").write_text("ACTIVATION = 'tanh'")
    (tmp_path / "own_removed.py").unlink()
    specs = {}
    for accepts in ("false", "true"):
        config = compose.composed([f"training.accept_changed_code={accepts}"])
        specs[accepts] = resolve(config, [])

    def check(accepts, start, resumed):
        past = Past(tmp_path, start=RunStart(segment=start), resumed=resumed)
        continuation = Continuation(tmp_path, "RUN", specs[accepts], past, None)
        continuation.check(None, None)
        return continuation.messages({})

    rule = (
        "RUN must be resumed with its own code, which has changed since: own_code.py; "
        "training.accept_changed_code=true continues the run with the changed code"
    )
    with pytest.raises(ConfigError, match=re.escape(rule)):
        check("false", segment, [])
    assert "code that has changed: own_code.py" in check("true", segment, [])
    # The code must be that of the last segment. Older versions have recorded none.
    now = {"code": provenance.hashes_of_own_code()}
    begins = "starts from the beginning, as there is no checkpoint"
    assert check("false", segment, [now]) == [begins]
    assert check("false", {}, []) == [begins]
    with pytest.raises(ConfigError, match=re.escape(rule)):
        check("false", {}, [segment])


@pytest.mark.slow
def test_a_run_that_continued_with_changed_code_says_so(tmp_path):
    folder = folder_of(tmp_path)
    interrupted(folder, 17, 15, *RUN)
    (folder / "mine.py").write_text(f"{MINE}\n# changed")
    said = pipeline("resume", "run", cwd=folder, status=2).stderr
    assert "which has changed since: mine.py; training.accept_changed_code=true" in said
    assert Store(folder).run().info.status == "KILLED"
    accepted = "training.accept_changed_code=true"
    said = pipeline("resume", "run", accepted, cwd=folder).stderr
    assert "code that has changed: mine.py" in said

    # As when the run began: only its record tells that it had other code later.
    (folder / "mine.py").write_text(MINE)
    command = ("rerun", Store(folder).run().info.run_id, "--allow", "mine", "--dry")
    said = pipeline(*command, cwd=folder).stderr
    assert "differs: code: mine.py changed after update 17 of the run" in said

"""A run that was interrupted goes on to the same result: `pipeline resume`, and `training.resume=auto`."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from pipeline.checkpoints import files, resume_rules, run_dirs, snapshot
from pipeline.checkpoints.resume_rules import Continuation
from pipeline.common.errors import ConfigError
from pipeline.config import compose
from pipeline.config.resolve import resolve
from pipeline.tracking import journal_file
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
    *(
        "model=mlp",
        "model.dropout=0.2",
        "optimizer=momentum",
        "hardware.deterministic=true",
        f"training.updates={UPDATES}",
    ),
    *(
        "training.checkpoint_every=7",
        "training.evaluate_every=5",
        "tracking.log_model=false",
    ),
    *(
        "tracking.system_metrics=false",
        "+training.callbacks.it={_target_: mine.Interrupt}",
        "hydra.run.dir=run",
    ),
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
    status = {2: 130, 15: 143, 12: 143, 9: -9}[by]
    return pipeline(
        "train", *arguments, cwd=folder, status=status, AT=str(at), BY=str(by), **more
    )


def histories(folder):
    store = Store(folder)
    found = store.histories(store.run())
    return {key: points for key, points in found.items() if not key.startswith("perf/")}


def weights(folder):
    last = files.at(folder / "run" / "checkpoints", UPDATES)
    return snapshot.read(last.folder, last.meta).arrays


def check_equal(folder, undisturbed):
    run = Store(folder).run()
    assert (run.info.status, run.data.tags.get("failure")) == ("FINISHED", None)
    assert histories(folder) == histories(undisturbed)
    now, then = weights(folder), weights(undisturbed)
    assert {name: array.tobytes() for name, array in now.items()} == {
        n: a.tobytes() for n, a in then.items()
    }


# `make test` has `resume` after SIGTERM, in test_fork.py.
@pytest.mark.parametrize("by", mostly_slow([2, 9, 12, 15], [], [9]))
def test_the_same_command_goes_on_to_the_same_result(tmp_path, undisturbed, by):
    folder = folder_of(tmp_path)
    interrupted(folder, 17, by, *AUTO)
    # A signal that can be waited for leaves a checkpoint of the update that it came in.
    # One that cannot may come while a thread still writes the latest.
    first = after(pipeline("train", *AUTO, cwd=folder), [7, 14] if by == 9 else [17])
    check_equal(folder, undisturbed)
    segments = json.loads((folder / "run" / "segments.json").read_text())
    assert [segment["after"] for segment in segments] == [0, first]
    assert Store(folder).run().data.tags["segments"] == "2"


def after(said, expected):
    (update,) = re.findall(r"^goes on after update (\d+)$", said.stderr, re.MULTILINE)
    assert int(update) in expected
    return int(update)


@pytest.mark.slow
def test_resume_by_the_id_of_the_run(tmp_path, undisturbed):
    folder = folder_of(tmp_path)
    interrupted(folder, 3, 9, *RUN)
    run = Store(folder).run()
    interrupted(folder, 23, 9, *AUTO)  # from the start, in the same run
    pipeline("resume", run.info.run_id[:8], cwd=folder)
    check_equal(folder, undisturbed)
    assert Store(folder).run().info.run_id == run.info.run_id


@pytest.mark.slow
def test_another_cut_agrees_within_rounding(tmp_path):
    """Negative control: without dropout's and momentum's state it would not, see test_files.py."""
    exact = (*RUN, "hardware.precision=float64", "model.dropout=0")
    pipeline(
        "train", *exact, "accumulation.factor=2", cwd=folder_of(tmp_path / "whole")
    )
    whole = histories(tmp_path / "whole")
    folder = folder_of(tmp_path / "cut")
    interrupted(folder, 17, 9, *exact, "accumulation.factor=2")
    said = pipeline(
        "resume", "run", "accumulation.factor=4", "hardware.replicas=2", cwd=folder
    )
    assert "accumulation.factor 4 (was 2)" in said.stderr
    assert "hardware.replicas 2 (was 1)" in said.stderr
    found = histories(folder)
    for key in (
        "train/loss",
        "val/loss",
        "train/gradient_norm",
        "train/accuracy",
        "train/learning_rate",
    ):
        assert found[key].keys() == whole[key].keys()
        # Rounding is amplified a hundredfold over these updates, from 1e-16 of a number of order 1.
        assert (
            max(abs(found[key][step] - value) for step, value in whole[key].items())
            < 1e-12
        ), key
    assert list(found["train/micro_steps"]) == list(range(1, UPDATES + 1))


@pytest.mark.slow
def test_a_longer_horizon(tmp_path):
    folder = folder_of(tmp_path)
    pipeline("train", *AUTO, cwd=folder)
    assert "has finished in" in pipeline("train", *AUTO, cwd=folder).stderr
    pipeline("resume", "run", "training.updates=50", cwd=folder)
    found = histories(folder)
    assert list(found["train/loss"]) == list(range(1, 51))
    assert Store(folder).run().info.status == "FINISHED"


@pytest.mark.slow
def test_what_a_callback_has_ended_does_not_go_on(tmp_path):
    folder = folder_of(tmp_path)
    # A loss that would have to fall by 100.
    early = "{_target_: keras.callbacks.EarlyStopping, monitor: loss, min_delta: 100, patience: 1}"
    pipeline("train", *RUN, f"+training.callbacks.early={early}", cwd=folder)
    last = int(Store(folder).run().data.tags["updates"])
    refused = pipeline("resume", "run", "training.updates=50", cwd=folder, status=2)
    rule = f"RUN was ended by training.callbacks.early after update {last}: begin another one there, with start.run="
    assert refused.stderr.splitlines()[-1].startswith(
        f"pipeline: {rule}RUN@{last}. Received: "
    )
    begun = (
        "train",
        *RUN[:-1],
        "training.updates=30",
        f"start.run=run@{last}",
        "hydra.run.dir=on",
    )
    pipeline(*begun, cwd=folder)


OWN = """
import numpy as np, tensorflow as tf
def data():
    x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
    split = tf.data.Dataset.from_tensor_slices((x, (x.sum(1) > 0).astype("int64")))
    return split, split.take(8), split.skip(56)
def unlabelled():
    split, validation, test = data()
    return split, validation, test.map(lambda x, y: x)
"""


@pytest.mark.parametrize("name", mostly_slow(["own", "plain"], [], ["own"]))
def test_data_of_ones_own_go_on_as_they_were(tmp_path, name):
    """With the order that the first run had settled; a third split is the test's, and has labels as the others have."""
    folder = folder_of(tmp_path)
    (folder / "own.py").write_text(OWN)
    (folder / "conf" / "dataset").mkdir(parents=True)
    more = "in_memory: auto\n" if name == "own" else ""
    (folder / "conf" / "dataset" / f"{name}.yaml").write_text(
        f"_target_: own.data\n{more}"
    )
    (folder / "conf" / "dataset" / "unlabelled.yaml").write_text(
        "_target_: own.unlabelled\n"
    )
    short = (
        "--config-dir",
        "conf",
        "model=mlp",
        "accumulation.effective_batch_size=8",
        "tracking.log_model=false",
    )
    own = (
        *short,
        f"dataset={name}",
        "+model.classes=2",
        f"hydra.run.dir={name}",
        "training.resume=auto",
    )
    pipeline("train", *own, "training.updates=6", cwd=folder)
    said = pipeline("train", *own, "training.updates=9", cwd=folder).stderr
    assert "goes on after update 6" in said
    assert "test/accuracy" in said
    refused = pipeline(
        "train", *short, "dataset=unlabelled", "+model.classes=2", cwd=folder, status=2
    )
    assert (
        "dataset._target_ must give its test split with labels, as its training split."
        in refused.stderr
    )


@pytest.mark.slow
def test_a_sweep_goes_on_inside_its_interrupted_jobs(tmp_path, undisturbed):
    folder = folder_of(tmp_path)
    sweep = ("train", "-m", *RUN[:-1], "seed=0,1", "hydra.sweep.dir=jobs")
    pipeline(*sweep, cwd=folder, status=1, AT="17", BY="9")
    store = Store(folder)
    (parent,) = (run for run in store.runs() if "sweep.name" in run.data.tags)
    assert [run.info.status for run in store.trained()] == ["KILLED", "KILLED"]
    pipeline(
        *sweep[:-1],
        "hydra.sweep.dir=more",
        f"tracking.sweep={parent.info.run_id}",
        cwd=folder,
    )
    first, second = store.trained()
    for run in (first, second):
        assert (run.info.status, run.data.tags["segments"]) == ("FINISHED", "2")
        assert list(store.history(run, "train/loss")) == list(range(1, UPDATES + 1))
    loss = Store(undisturbed).history(Store(undisturbed).run(), "train/loss")
    assert (
        store.history(
            min(first, second, key=lambda run: int(run.data.params["seed"])),
            "train/loss",
        )
        == loss
    )
    assert store.client.get_run(parent.info.run_id).info.status == "FINISHED"


def test_a_run_that_goes_on_keeps_its_own_store_unless_another_is_named(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://exported:80")

    def resumed(store: str, *overrides: str) -> str:
        composed = compose.composed(overrides)
        past = SimpleNamespace(start={"store": store})
        return resume_rules.with_own_store(
            resolve(composed, overrides), past
        ).config.tracking.uri

    assert resumed("sqlite:////runs/mlflow.db") == "sqlite:////runs/mlflow.db"
    assert (
        resumed("sqlite:////runs/mlflow.db", "tracking.uri=http://named:80")
        == "http://named:80"
    )
    assert (
        resumed("http://me:***@host") == "http://exported:80"
    )  # then it is refused, as the store of another run


@pytest.mark.slow
def test_what_would_be_another_run_is_refused(tmp_path, undisturbed):
    folder = folder_of(tmp_path)
    interrupted(folder, 17, 9, *RUN)
    pipeline(
        "train",
        *RUN[:-1],
        "hydra.run.dir=none",
        "training.checkpoint_every=null",
        cwd=folder,
    )
    shutil.copytree(undisturbed / "run", folder / "done")
    shutil.copytree(folder / "run", folder / "old")
    (folder / "old" / "journal.jsonl").write_text(
        '{"time":1,"start":{"experiment":"e"}}\n'
    )
    shutil.copytree(undisturbed / "run", folder / "torn")
    torn = (folder / "torn" / "journal.jsonl").read_text()
    (folder / "torn" / "journal.jsonl").write_text(
        torn.replace('"step":3,', '"step":4,', 1)
    )
    shutil.copytree(folder / "run", folder / "other")
    expected = {
        "resume nowhere": "RUN must be one run directory, or the start of the ID of one run whose directory lies below "
        "this one. Received: 'nowhere'.",
        "resume run seed=1": "seed must be that of the run, 0. Received: 1.",
        "resume run model.hidden=[8]": "model.hidden must be that of the run, [128, 128]. Received: [8].",
        "resume run optimizer.learning_rate=1": "optimizer.learning_rate must be that of the run, 0.05. Received: 1.",
        "resume run accumulation.effective_batch_size=64": "accumulation.effective_batch_size must be that of the run, "
        "128. Received: 64.",
        "resume run hardware.precision=float64": "hardware.precision must be that of the run, 'float32'. Received: "
        "'float64'.",
        "resume run tracking.uri=sqlite:///elsewhere.db": "tracking.uri must be the store of the run, sqlite:",
        "resume run hydra.run.dir=x": "arguments must set nothing of Hydra: a run goes on in its own directory.",
        # 14 updates, or 7 where that was not written yet.
        "resume run training.updates=5": "training must have a horizon beyond the ",
        "resume": "arguments must be as pipeline resume --help says (the following arguments are required: RUN).",
        "resume none training.updates=50": "RUN must have a checkpoint: see training.checkpoint_every.",
        "resume torn": "RUN must have an intact checkpoint after at most 2 updates, of which journal.jsonl has the "
        "rows (line ",
        "resume done": "RUN has finished: a longer horizon goes on with it, and pipeline sync ships what its store "
        "lacks.",
        "resume old": "RUN must have a journal of format 1 (it is of a version before this one).",
        "train model=mlp hydra.run.dir=run": "hydra.run.dir must be a folder without a run in it.",
        "train model=cnn training.resume=auto hydra.run.dir=run": "model._target_ must be that of the run,",
    }
    answers = one_process({line: line for line in expected}, folder)
    for line, rule in expected.items():
        answer = answers[line]
        assert answer["status"] == 2, (line, answer)
        assert answer["err"].splitlines()[-1].startswith(f"pipeline: {rule}"), (
            line,
            answer["err"],
        )
        assert [
            path for path in answer["changed"] if not path.startswith("mlruns")
        ] == [], line


GROUPS = "".join(f"{key}: {{}}\n" for key in run_dirs.CONFIG)
CONFIGS = {  # what stands in config.yaml, and what is said of it
    "empty": ("{}\n", "line 1: dataset is missing"),
    "cut": (
        "dataset: {}\nmodel: [\n",
        "line 3: expected the node content, but found '<stream end>'",
    ),
    "endless": ("dataset: &a\n  b: *a\n", "line 2: an alias is not expected"),
    "number": (
        GROUPS.replace("tracking: {}", "tracking: 5"),
        "line 9: tracking must be a mapping, and is an integer",
    ),
    "binary": (
        b"dataset: {}\n\xff\n",
        "line 2: 'utf-8' codec can't decode byte 0xff in position 12",
    ),
    "signs": (b"dataset: {}\n\x00\n", "line 2: unacceptable character #x0000"),
}


def test_a_damaged_config_is_refused_by_its_line(tmp_path):
    for name, (text, _) in CONFIGS.items():
        (tmp_path / name).mkdir()
        writer = journal_file.create(tmp_path / name / journal_file.NAME)
        writer.write(
            {"start": {"format": 1, "store": "sqlite:///x", "tags": {"journal": "1"}}}
        )
        writer.close()
        (tmp_path / name / "config.yaml").write_bytes(
            text if isinstance(text, bytes) else text.encode()
        )
    answers = one_process({name: f"resume {name}" for name in CONFIGS}, tmp_path)
    for name, (_, said) in CONFIGS.items():
        rule = f"pipeline: RUN must have a config.yaml that can be read (config.yaml, {said}"
        assert answers[name]["status"] == 2, answers[name]
        assert answers[name]["err"].splitlines()[-1].startswith(rule), answers[name][
            "err"
        ]
        assert answers[name]["changed"] == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "line 1: Expecting property name enclosed in double quotes"),
        ("[]", "line 1: all of it must be a mapping, and is a list"),
        (
            '{"name": "a", "version": "1", "examples": {},\n "files":\n 5}',
            "line 2: files must be a mapping, and is an",
        ),
        (
            '{"name": "a", "version": "1",\n "examples": {"train": null}}',
            "line 2: train must be an integer, and is null",
        ),
        ("[" * 100_000, "line 1: maximum recursion depth exceeded"),
    ],
)
def test_a_damaged_record_of_the_data_is_refused_by_its_line(tmp_path, text, said):
    (tmp_path / journal_file.DESCRIBED).write_text(text)
    past = SimpleNamespace(described=True, run={})
    with pytest.raises(
        ConfigError,
        match=re.escape(
            f"must have a dataset.json that can be read (dataset.json, {said}"
        ),
    ):
        Continuation(tmp_path, None, past, None).check_dataset({})


@pytest.mark.parametrize("text", ["a b", "it's", "a\\b", "a\\", "a\\'b"])
def test_a_quoted_value_is_read_as_it_was(text):
    assert (
        OverridesParser.create().parse_override(f"key={run_dirs.quoted(text)}").value()
        == text
    )


@pytest.mark.parametrize("precision", ["float64", "mixed_bfloat16"])
def test_in_another_precision_it_is_another_run(precision):
    recorded = resolve(compose.composed([]), []).recorded
    spec = resolve(compose.composed([f"hardware.precision={precision}"]), [])
    past = SimpleNamespace(
        run={},
        start={
            "store": spec.config.tracking.uri,
            "segment": {"cut": {"effective_batch_size": 128}},
        },
    )
    rule = "hardware.precision must be that of the run, 'float32'"
    with pytest.raises(ConfigError, match=rule):
        resume_rules.changes(recorded, spec, past)

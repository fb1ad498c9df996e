"""Several workers, real processes that TensorFlow joins.

They are one run, that of one device, whatever becomes of a worker.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from pipeline.checkpoints.files import saved_updates
from pipeline.config import metric_names
from pipeline.distributed import heartbeats
from tests.parameters import mostly_slow
from tests.run.fitted import fit
from tests.running import Store, pipeline, python, wait
from tests.shared import place_store
from tests.warm import Python

UPDATES = 15
# 1437 examples in effective batches of 359: the tail is one example, and most workers
# have none of it.
RUN = (
    "model=mlp",
    "model.hidden=[16]",
    "model.dropout=0.3",
    "accumulation.same_noise=true",
    "hardware.open_ports=true",
    "hardware.precision=float64",
    "accumulation.effective_batch_size=359",
    "accumulation.micro_batch_size=50",
    f"training.updates={UPDATES}",
    "training.evaluate_every=4",
    "training.evaluate_at_start=true",
    "dataset.validations={late: {split: 'validation[50%:]', every: 5}}",
    "training.keep_best.metric=val/loss",
    "training.keep_best.mode=min",
    "hydra.run.dir=run",
    "tracking.log_model=false",
    "tracking.system_metrics=false",
    "schedule=constant",
)
# Every process of the run trains slowly. With `worker`, the one that the chief has
# started stops in the middle.
MINE = """
import sys, time
import keras

class Slow(keras.callbacks.Callback):
    def __init__(self, worker=None, raises=False):
        super().__init__()
        self.stops = worker is not None and sys.argv[0].endswith("worker.py")
        self.raises = raises

    def on_train_batch_begin(self, batch, logs=None):
        time.sleep(0.1)
        if batch == 3 and self.stops:
            if self.raises:
                raise RuntimeError("no more of this")
            time.sleep(10000)
"""
# The digits, each noted by the process that makes it.
NOTED = """
import os
import tensorflow as tf

def noted(features):
    def note(label):
        with open(f"made-{os.getpid()}", "a") as file:
            file.write("x")
        return label
    label = tf.numpy_function(note, [features["label"]], tf.int64)
    return tf.cast(features["image"], tf.float32) / 16, tf.ensure_shape(label, [])
"""
# The digits, of which one cannot be made: the last one of the validation split, which
# only its pixels tell.
BROKEN = """
import tensorflow as tf

def broken(features):
    pixels = tf.cast(tf.reshape(features["image"], [-1]), tf.int64)
    checksum = tf.reduce_sum(pixels * tf.range(64, dtype=tf.int64))
    good = tf.debugging.assert_none_equal(checksum, tf.constant(11097, tf.int64))
    with tf.control_dependencies([good]):
        return tf.cast(features["image"], tf.float32) / 16, features["label"]
"""
OTHER = """
import json, os
import numpy as np
import tensorflow as tf
from pipeline.dataset import Data

def data(data_dir):
    index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    x = np.full([64, 3], 1 + index, "float32")
    training = tf.data.Dataset.from_tensor_slices((x, np.arange(64) % 2))
    return Data(training, None, classes=2)
"""
OF_OTHER_VERSION = """
import sys
from importlib import metadata
from pipeline.__main__ import main

def version(name, installed=metadata.version):
    return "9.9.9" if name == "scikit-learn" else installed(name)

metadata.version = version
sys.exit(main(sys.argv[1:]))
"""
# The command, with a chief that waits for 15 s in place of 90.
IMPATIENT = """
import sys
from pipeline.__main__ import main
from pipeline.distributed import heartbeats, rendezvous

heartbeats.TIMEOUT = rendezvous.TIMEOUT = 15.0
sys.exit(main(sys.argv[1:]))
"""
NORMALISED = """
import keras
from keras import layers

def build(input_shape, classes):
    inner = [layers.Dense(16), layers.BatchNormalization(), layers.ReLU()]
    parts = [layers.Flatten(), *inner, layers.Dense(classes)]
    return keras.Sequential([keras.Input(input_shape), *parts])
"""
SLOW = ("+training.callbacks.slow._target_=mine.Slow", "training.updates=2000")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Return the points of the run of one device."""
    folder = tmp_path_factory.mktemp("alone")
    pipeline("train", *RUN, cwd=folder)
    return left_in(folder)


def left_in(folder: Path) -> dict[str, dict[int, float]]:
    """Return all points of the only run, which has finished.

    Those that follow from how a batch was cut are left out.
    """
    store = Store(folder)
    run = store.run()
    assert run.info.status == "FINISHED"
    histories = store.histories(run, "train/", "val/", "best/")
    compared = {}
    for name, history in histories.items():
        is_of_the_cut = metric_names.treatment_of(name).of_the_cut
        if name != "train/micro_steps" and not is_of_the_cut:
            compared[name] = history
    return compared


def workers_in(folder: Path) -> list[psutil.Process]:
    """Return the workers of a run in `folder`, without its chief.

    tests.warm has named them by their module.
    """
    workers = []
    for process in psutil.process_iter(["name"]):
        with suppress(psutil.Error):
            is_worker = process.info["name"] == "pipeline.distributed.worker"[-15:]
            if is_worker and Path(process.cwd()) == folder:
                workers.append(process)
    return workers


def last_word(stderr: str) -> str:
    """Return the last line of the command itself.

    TensorFlow's own may come after it.
    """
    return [line for line in stderr.splitlines() if line.startswith("pipeline: ")][-1]


def ended_tasks(tasks: list[Python], timeout: int = 120) -> list[str]:
    """Wait for the tasks of a cluster; return what each has written to stderr."""
    return [started.communicate(timeout=timeout)[1] for started in tasks]


def slow_run(
    folder: Path, *more: str, program: tuple[str, ...] = ("-m", "pipeline")
) -> Python:
    """Start a run of two workers that lasts; return when it trains."""
    (folder / "mine.py").write_text(MINE)
    place_store(folder)
    process = python(
        *program, "train", *RUN, "hardware.workers=2", *SLOW, *more, cwd=folder
    )
    journal = folder / "run" / "journal.jsonl"

    def trains_or_ended():
        if process.poll() is not None:
            return True
        return journal.exists() and journal.read_text().count("train/loss") > 1

    wait(trains_or_ended)
    return process


def test_workers_train_the_run_of_one_device(tmp_path):
    """One device trains it in this process."""
    one = fit(tmp_path / "one", *RUN)
    pipeline("train", *RUN, "hardware.workers=2", cwd=tmp_path)
    here = left_in(tmp_path)
    names = set()
    for kind, rows in (("train", one.rows.updates), ("val", one.rows.validations)):
        for update, row in rows:
            for key, value in row.items():
                name = f"{kind}/{key}"
                if not metric_names.treatment_of(name).of_the_cut:
                    assert here[name][update] == pytest.approx(value, rel=1e-12), name
                    names.add(name)
    assert {"train/loss", "val/loss", "val/late/loss"} <= names
    wait(lambda: workers_in(tmp_path) == [], 10)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 3])
def test_a_run_of_workers_has_the_rows_of_the_run_of_one_device(
    tmp_path, alone, workers
):
    done = pipeline("train", *RUN, f"hardware.workers={workers}", cwd=tmp_path)
    banner = f"^{workers} workers, each with"
    assert len(re.findall(banner, done.stderr, re.MULTILINE)) == 1
    assert len(re.findall(f"update {UPDATES}/{UPDATES}  loss", done.stderr)) == 1
    assert Store(tmp_path).run().data.params["derived.replicas"] == str(workers)
    here = left_in(tmp_path)
    assert set(here) == set(alone)
    for name, history in alone.items():
        assert here[name] == pytest.approx(history, rel=1e-12), name
    wait(lambda: workers_in(tmp_path) == [], 10)


@pytest.mark.slow
def test_nothing_is_said_after_the_result_however_long_the_process_lives(tmp_path):
    """TensorFlow misses a worker after 10 s, and reports a crash.

    So the workers end with the chief's process.
    """
    program = (
        "import sys, time; from pipeline.__main__ import main; "
        "main(sys.argv[1:]); time.sleep(25)"
    )
    place_store(tmp_path)
    process = python("-c", program, "train", *RUN, "hardware.workers=2", cwd=tmp_path)
    stderr = process.communicate(timeout=300)[1]
    assert stderr.splitlines()[-1].startswith("open it with: pipeline ui; repeat it")
    wait(lambda: workers_in(tmp_path) == [], 10)


@pytest.mark.soak
def test_workers_make_the_examples_of_their_share_alone(tmp_path):
    """What two workers have made is what one has made, and the runs are equal.

    The examples are streamed, shifted and weighted.
    """
    data = {
        "_target_": "pipeline.dataset.from_tfds",
        "builder": "pipeline.dataset.builtin.digits.Digits",
        "validation_split": "validation",
        "test_split": "test",
        "in_memory": False,
        "shuffle_buffer": 300,
        "preprocess": {"_target_": "mine.noted", "_partial_": True},
        "augment": {"_target_": "pipeline.dataset.augmentation.Shift", "pixels": 1},
    }
    (tmp_path / "conf" / "dataset").mkdir(parents=True)
    (tmp_path / "conf" / "dataset" / "noted.yaml").write_text(json.dumps(data))
    weighted = ("training.class_weight={3: 2.0, 5: 0.5}", "model.l2=0.001")
    made = []  # by run, how many examples each worker has made
    curves = []
    for workers in (1, 2):
        folder = tmp_path / str(workers)
        folder.mkdir()
        (folder / "mine.py").write_text(NOTED)
        of_run = (
            "--config-dir",
            "../conf",
            "dataset=noted",
            *weighted,
            f"hardware.workers={workers}",
        )
        pipeline("train", *RUN, *of_run, cwd=folder)
        made.append([len(file.read_text()) for file in folder.glob("made-*")])
        curves.append(left_in(folder))
    assert set(curves[0]) == set(curves[1])
    for name, history in curves[0].items():
        assert curves[1][name] == pytest.approx(history, rel=1e-12), name
    # Three epochs, four evaluations and a test, and before them the few examples that
    # show their form.
    examples = 3 * 1437 + 4 * 180 + 180
    by_one, by_two = made
    assert len(by_one) == 1
    assert examples <= by_one[0] < examples + 100
    assert len(by_two) == 2
    assert max(by_two) < examples / 2 + 100


@pytest.mark.slow
def test_an_example_that_only_another_worker_makes_is_found(tmp_path):
    """Each worker evaluates 90 of 180 examples."""
    (tmp_path / "mine.py").write_text(BROKEN)
    data = [
        "dataset=tfds",
        "dataset.name=null",
        "+dataset.builder=pipeline.dataset.builtin.digits.Digits",
        "dataset.validation_split=validation",
        "+dataset.preprocess._target_=mine.broken",
        "+dataset.preprocess._partial_=true",
    ]
    done = pipeline("train", *RUN, *data, "hardware.workers=2", cwd=tmp_path, status=1)
    why = (
        "worker 1 no longer takes part: DataError: the data cannot be read: "
        "example 179 of the validation split"
    )
    assert why in last_word(done.stderr)
    assert Store(tmp_path).run().info.status == "FAILED"


@pytest.mark.slow
def test_two_tasks_of_a_cluster_are_one_run(tmp_path, alone):
    cluster = cluster_of_two()
    place_store(tmp_path)
    losses = pytest.approx(alone["train/loss"], rel=1e-12)
    tasks = [task(cluster, index, RUN, tmp_path) for index in (0, 1)]
    stderrs = ended_tasks(tasks, timeout=300)
    assert [started.returncode for started in tasks] == [0, 0], stderrs
    assert "update" not in stderrs[1]
    assert left_in(tmp_path)["train/loss"] == losses
    # A cluster that starts the job again, as it does with one that was preempted, is
    # told that it has finished.
    resumed = (*RUN, "training.resume=auto")
    tasks = [task(cluster, index, resumed, tmp_path) for index in (0, 1)]
    stderrs = ended_tasks(tasks)
    assert [started.returncode for started in tasks] == [0, 0], stderrs
    assert "there is nothing left to train" in stderrs[0]
    assert left_in(tmp_path)["train/loss"] == losses


@pytest.mark.slow
def test_a_normalised_run_is_another_one_on_two_workers(tmp_path):
    """They see other micro-batches.

    Of one cut all is the same, the moving statistics as well.
    """
    (tmp_path / "mine.py").write_text(NORMALISED)
    left_out = ("model", "accumulation", "hydra")
    run = [text for text in RUN if not text.startswith(left_out)]
    run.append("training.updates=12")  # before the tail, which is cut otherwise
    model = [
        "model._target_=mine.build",
        "accumulation.effective_batch_size=96",
        "~model.hidden",
        "~model.dropout",
    ]
    curves = {}
    for workers, micro_batch_size in ((1, 48), (2, 48), (2, 24)):
        name = f"{workers}x{micro_batch_size}"
        cut = [
            f"hardware.workers={workers}",
            f"accumulation.micro_batch_size={micro_batch_size}",
        ]
        pipeline(
            "train",
            *run,
            "model=mlp",
            "~model.l2",
            *model,
            *cut,
            f"hydra.run.dir={name}",
            cwd=tmp_path,
        )
        (newest, *_) = reversed(Store(tmp_path).runs())
        curves[name] = Store(tmp_path).histories(newest, "train/loss", "val/loss")
    for name, curve in curves["1x48"].items():
        assert curves["2x48"][name] == pytest.approx(curve, rel=1e-12)
        assert curves["2x24"][name] != pytest.approx(curve, rel=1e-6)


@pytest.mark.slow
def test_workers_verify_together(tmp_path):
    verify = ("verify", "--all", *RUN[:-1])
    by_one = pipeline(*verify, "hardware.workers=1", cwd=tmp_path).stdout
    by_two = pipeline(*verify, "hardware.workers=2", cwd=tmp_path).stdout
    assert by_two.splitlines()[0].startswith("2 workers, each with")
    assert by_two.splitlines()[1].endswith("are equal within rounding")
    assert rows_in_float64(by_one) == rows_in_float64(by_two)


def rows_in_float64(printed: str) -> set[str]:
    """Return the beginnings of the rows in float64; one worker does float32, too."""
    rows = [line for line in printed.splitlines() if "(float64)" in line]
    return {row.split(")")[0] for row in rows}


# How a worker is known to be lost, by whatever it does, is in test_rendezvous.py.
@pytest.mark.parametrize(
    "number", mostly_slow([signal.SIGKILL, signal.SIGSTOP], [], [signal.SIGKILL])
)
def test_without_a_worker_the_run_fails_and_goes_on_on_one(tmp_path, number):
    """Nothing is lost: the checkpoint is of the last update that all took part in."""
    process = slow_run(tmp_path, "training.checkpoint_every=1000")
    (worker,) = workers_in(tmp_path)
    worker.send_signal(number)
    stderr = process.communicate(timeout=300)[1]
    assert process.returncode == 1
    lost = "worker 1 no longer takes part: it was killed, hangs, or is cut off"
    assert lost in last_word(stderr)
    store = Store(tmp_path)
    run = store.run()
    assert run.info.status == "FAILED"
    assert lost in run.data.tags["failure"]
    (last,) = saved_updates(tmp_path / "run" / "checkpoints")
    assert last == max(store.history(run, "train/loss"))
    assert not worker.is_running()
    if number == signal.SIGKILL:  # the other one goes on
        return
    more = last + 5
    pipeline(
        "resume", "run", "hardware.workers=1", f"training.updates={more}", cwd=tmp_path
    )
    undisturbed = tmp_path / "undisturbed"
    undisturbed.mkdir()
    (undisturbed / "mine.py").write_text(MINE)
    pipeline("train", *RUN, *SLOW, f"training.updates={more}", cwd=undisturbed)
    losses = left_in(undisturbed)["train/loss"]
    assert left_in(tmp_path)["train/loss"] == pytest.approx(losses, rel=1e-12)


@pytest.mark.slow
def test_a_worker_that_raises_says_why(tmp_path):
    process = slow_run(
        tmp_path,
        "+training.callbacks.slow.worker=1",
        "+training.callbacks.slow.raises=true",
    )
    stderr = process.communicate(timeout=120)[1]
    assert process.returncode == 1
    why = "worker 1 no longer takes part: RuntimeError: no more of this"
    assert why in last_word(stderr)
    assert "no more of this" in (tmp_path / "run" / "workers" / "1.log").read_text()
    assert Store(tmp_path).run().info.status == "FAILED"


@pytest.mark.slow
def test_a_worker_that_hangs_is_ended(tmp_path):
    process = slow_run(
        tmp_path, "+training.callbacks.slow.worker=1", program=("-c", IMPATIENT)
    )
    stderr = process.communicate(timeout=300)[1]
    assert process.returncode == 1
    why = "worker 1 no longer takes part: it has kept the others waiting for 15 s"
    assert why in last_word(stderr)
    assert Store(tmp_path).run().info.status == "FAILED"
    assert workers_in(tmp_path) == []


@pytest.mark.slow
def test_an_interrupted_chief_takes_the_others_with_it(tmp_path):
    process = slow_run(tmp_path, "training.checkpoint_every=1000")
    (worker,) = workers_in(tmp_path)
    # A closed terminal sends it to all. The chief still needs the worker.
    os.kill(worker.pid, signal.SIGHUP)
    os.kill(process.pid, signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 143
    store = Store(tmp_path)
    assert store.run().info.status == "KILLED"
    last = max(store.history(store.run(), "train/loss"))
    assert saved_updates(tmp_path / "run" / "checkpoints") == [last]
    wait(lambda: workers_in(tmp_path) == [], 30)


@pytest.mark.slow
def test_workers_end_with_a_chief_that_is_killed(tmp_path):
    process = slow_run(tmp_path)
    (worker,) = workers_in(tmp_path)
    os.kill(process.pid, signal.SIGKILL)
    wait(lambda: not worker.is_running(), 60)
    process.communicate(timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chief", "other", "line"),
    [
        (
            "seed=0",
            "seed=3",
            "seed must be the same for all workers, but is 3 on worker 1. Received: 0.",
        ),
        (
            "seed=0",
            "seed=-1",
            "worker 1 refuses to train: seed must be from 0 to 4294967295. "
            "Received: -1.",
        ),
        ("seed=-1", "seed=0", "seed must be from 0 to 4294967295. Received: -1."),
        (
            "seed=0",
            "dataset.data_dir=/proc/nothing",
            "worker 1 refuses to train: dataset could not be downloaded and prepared "
            "in /proc/nothing (",
        ),
    ],
)
def test_one_worker_that_refuses_ends_all_with_one_line(tmp_path, chief, other, line):
    cluster = cluster_of_two()
    run = [text for text in RUN if not text.startswith("hydra.")]
    tasks = [
        task(cluster, 0, [*run, chief], tmp_path),
        task(cluster, 1, [*run, other], tmp_path),
    ]
    first, second = ended_tasks(tasks)
    assert [started.returncode for started in tasks] == [2, 2], (first, second)
    assert last_word(first).startswith(f"pipeline: {line}")
    assert "pipeline: " not in second
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {file.relative_to(tmp_path).parts[0] for file in files} <= {"mlruns", "data"}
    if (tmp_path / "mlruns" / "mlflow.db").exists():
        assert not Store(tmp_path).runs()


@pytest.mark.slow
def test_workers_of_other_versions_are_refused(tmp_path):
    cluster = cluster_of_two()
    tasks = [
        task(cluster, 0, RUN, tmp_path),
        task(cluster, 1, RUN, tmp_path, "-c", OF_OTHER_VERSION),
    ]
    first, second = ended_tasks(tasks)
    assert [started.returncode for started in tasks] == [2, 2], (first, second)
    line = (
        "scikit-learn must be the same for all workers, but is '9.9.9' on worker 1. "
        "Received: "
    )
    assert last_word(first).startswith(f"pipeline: {line}")
    assert "pipeline: " not in second


@pytest.mark.slow
def test_workers_with_other_data_are_refused(tmp_path):
    (tmp_path / "mine.py").write_text(OTHER)
    cluster = cluster_of_two()
    kept = ("training.updates", "tracking", "hardware", "schedule")
    own = [
        "dataset._target_=mine.data",
        "model=mlp",
        "accumulation.effective_batch_size=8",
    ]
    run = [text for text in RUN if text.startswith(kept)] + own
    tasks = [task(cluster, index, run, tmp_path) for index in (0, 1)]
    first, second = ended_tasks(tasks)
    assert [started.returncode for started in tasks] == [2, 2], (first, second)
    assert last_word(first).startswith(
        "pipeline: dataset must be the same for all workers"
    )


def test_a_port_that_is_taken_is_refused(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        cluster = {"worker": [f"127.0.0.1:{taken.getsockname()[1]}", "127.0.0.1:1"]}
        process = task(cluster, 0, RUN, tmp_path)
        stderr = process.communicate(timeout=60)[1]
    assert process.returncode == 2
    assert last_word(stderr).startswith(
        "pipeline: worker 0 must have a free address of its own ("
    )


def test_who_lets_the_others_wait(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(heartbeats.time, "monotonic", lambda: now[0])
    counts = heartbeats.ReductionCounts(3)
    now[0] = 1000.0
    assert counts.straggler() is None  # nobody is waited for
    for worker in (0, 1):
        counts.note(worker, 1)
    counts.note(1, 2)
    now[0] += 2 * heartbeats.TIMEOUT
    # The first update takes two sums, and is waited for longer.
    assert counts.straggler() is None
    for worker in (0, 1, 2):
        counts.note(worker, 2)
    now[0] += 1000
    assert counts.straggler() is None
    for worker in (0, 2):
        counts.note(worker, 3)
    assert counts.straggler() is None
    now[0] += heartbeats.TIMEOUT - 1
    counts.note(0, 4)
    assert counts.straggler() is None
    now[0] += 2
    assert counts.straggler() == 1
    counts.note(1, 4)  # it has come on
    assert counts.straggler() is None
    counts.note(2, 4)
    counts.note(1, 5)
    now[0] += heartbeats.TIMEOUT + 1
    assert counts.straggler() == 0


def cluster_of_two() -> dict:
    """Return the cluster of two workers on free ports of this machine."""
    with (
        socket.create_server(("127.0.0.1", 0)) as first,
        socket.create_server(("127.0.0.1", 0)) as second,
    ):
        ports = (first.getsockname()[1], second.getsockname()[1])
    return {"worker": [f"127.0.0.1:{port}" for port in ports]}


def task(cluster: dict, index: int, overrides, cwd: Path, *program: str) -> Python:
    """Start one task of a cluster, with a run directory of its own.

    It is `pipeline`, or another `program`.
    """
    own = []
    for text in overrides:
        if text.startswith("hydra.run.dir="):
            text = f"hydra.run.dir=run{index}"
        own.append(text)
    config = json.dumps(
        {"cluster": cluster, "task": {"type": "worker", "index": index}}
    )
    return python(
        *(program or ("-m", "pipeline")),
        "train",
        "hardware=multi_worker",
        *own,
        cwd=cwd,
        TF_CONFIG=config,
    )

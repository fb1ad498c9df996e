"""The micro-batch that is found: the largest that fits under a real limit.

The run is the same as with the number by hand, and the number is looked for once.
"""

from __future__ import annotations

import json
import os
import resource
import shlex
import signal
import subprocess
import sys
from contextlib import nullcontext, suppress
from types import SimpleNamespace

import keras
import numpy as np
import psutil
import pytest
import tensorflow as tf
from omegaconf import OmegaConf

from pipeline.accumulation import Update
from pipeline.common import disk_cache, memory_budget
from pipeline.common.errors import ConfigError
from pipeline.config.sizes import Batching
from pipeline.dataset import Data, longest_batch
from pipeline.run import batch_size_search, batch_size_trial, measured_once
from tests.parameters import mostly_slow
from tests.running import ROOT, Store, environment, one_process, pipeline, start, wait

LIMITED = """
import keras
import numpy as np
import tensorflow as tf


def examples(count=256):
    x = np.random.default_rng(0).normal(size=(count, 100, 32)).astype("float32")
    split = tf.data.Dataset.from_tensor_slices((x, x[:, 0, :1]))
    return split, split


def uneven():
    def sequences():
        for length in (3, 9, 5, 1):
            yield np.ones((length, 32), "float32"), np.ones(1, "float32")

    spec = tf.TensorSpec((None, 32), tf.float32), tf.TensorSpec((1,), tf.float32)
    split = tf.data.Dataset.from_generator(sequences, output_signature=spec)
    return split.apply(tf.data.experimental.assert_cardinality(4)), None


def model(input_shape):
    "13 MB of activations an example, and few weights."
    flat = keras.layers.GlobalAveragePooling1D()
    if input_shape[0]:
        flat = keras.layers.Flatten()
    parts = [keras.layers.Dense(8192, activation="tanh"), keras.layers.Dense(8), flat]
    return keras.Sequential([keras.Input(input_shape), *parts, keras.layers.Dense(1)])


def broken(input_shape):
    @keras.saving.register_keras_serializable()
    class Broken(keras.layers.Layer):
        def call(self, x, training=False):
            if training:
                largest = tf.reduce_max(x)
                tf.debugging.assert_less(largest, -1.0, message="no such number")
            return x

    parts = [Broken(), keras.layers.Flatten(), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input(input_shape), *parts])


def large(input_shape, kind, most):
    from tests.run.test_batch_size_search import FAILS

    @keras.saving.register_keras_serializable()
    class Large(keras.layers.Layer):
        def call(self, x, training=False):
            fails = tf.logical_and(tf.shape(x)[0] > most, training)
            zero = tf.reshape(tf.cond(fails, FAILS[kind], lambda: 0), ())
            return x + tf.cast(zero, x.dtype)

    parts = [Large(), keras.layers.Flatten(), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input(input_shape), *parts])
"""
OWN = (
    "~dataset",
    "+dataset={_target_: limited.examples, in_memory: true}",
    "~model",
    "+model={_target_: limited.model}",
    "objective=regression",
    "training.updates=3",
    "tracking.log_model=false",
    "tracking.system_metrics=false",
)


def _raise(error):
    raise error


# Operations whose kernels raise the error, as those of a GPU do. The messages with
# "No algorithm" and "BiasGrad" are TensorFlow's.
FAILS = {
    "InternalError": lambda: tf.numpy_function(
        lambda: np.array([object()]), [], tf.int32
    ),
    "NotFoundError": lambda: tf.strings.length(
        tf.io.read_file(tf.identity("No algorithm worked!"))
    ),
    "UnknownError": lambda: tf.numpy_function(
        lambda: _raise(RuntimeError("CUDNN_STATUS_EXECUTION_FAILED")), [], tf.int32
    ),
    "InvalidArgumentError": lambda: tf.numpy_function(
        lambda: _raise(ValueError("BiasGrad requires tensor size <= int32 max")),
        [],
        tf.int32,
    ),
}
AUTO = "accumulation.micro_batch_size=auto"
SIZE = "accumulation.effective_batch_size=64"
# A run takes 0.7 GiB with micro-batches of one example, and 1.07 with 64.
MEMORY = "hardware.memory=1.1GiB"
# oneDNN takes more, and TensorFlow uses it on some processors only.
KERNELS = {"TF_ENABLE_ONEDNN_OPTS": "0", "warm": False}


@pytest.fixture
def project(tmp_path):
    (tmp_path / "limited.py").write_text(LIMITED)
    return tmp_path


def table(folder):
    content = json.loads((folder / batch_size_search.TABLE).read_text())
    return [dict(zip(content["columns"], row, strict=True)) for row in content["data"]]


def micro_batch_size_in(run_dir):
    """Return the micro-batch size in the recorded config of a run."""
    return OmegaConf.load(run_dir / "config.yaml").accumulation.micro_batch_size


def test_the_search_finds_what_trying_all_would():
    for share in (*range(1, 40), 64, 100, 128, 1000):
        all_sizes = sorted({-(-share // factor) for factor in range(1, share + 1)})
        for capacity in (0, *all_sizes[:: max(1, len(all_sizes) // 40)], share):
            tried = []

            def fits(size, capacity=capacity, tried=tried):
                tried.append(size)
                return size <= capacity

            fitting = [size for size in all_sizes if size <= capacity]
            expected = max(fitting, default=None)
            assert batch_size_search.largest(share, fits) == expected, share
            assert len(tried) == len(set(tried)) <= 2 + 2 * np.log2(share)


def test_the_fastest_is_the_smallest_of_those_that_are_about_as_fast():
    rates = {128: 100.0, 64: 104.0, 32: 103.0, 16: 80.0, 8: 70.0, 4: 200.0}
    tried = []

    def rate_of(size):
        tried.append(size)
        return rates[size]

    assert batch_size_search.fastest(128, 512, rate_of) == 32
    assert tried == [128, 64, 32, 16, 8]  # twice a tenth slower: it ends


def test_sizes_that_do_not_fit_once_they_are_timed_are_not_the_fastest():
    rates = {16: 80.0, 8: 70.0, 4: 200.0, 2: 1.0, 1: 1.0}
    assert batch_size_search.fastest(128, 512, rates.get) == 4
    assert batch_size_search.fastest(3, 7, lambda size: None) == 3


@pytest.mark.parametrize("kind", mostly_slow(FAILS, [], [next(iter(FAILS))]))
def test_what_a_gpu_raises_for_want_of_memory_means_that_a_size_does_not_fit(
    monkeypatch, kind
):
    """If the smallest size fails too, it is no matter of memory: the error is shown."""
    most = tf.Variable(5)

    class Large(keras.layers.Layer):
        def call(self, x):
            fails = tf.shape(x)[0] > most
            zero = tf.reshape(tf.cond(fails, FAILS[kind], lambda: 0), ())
            return x + tf.cast(zero, x.dtype)

    model = keras.Sequential([keras.Input((2,)), Large(), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD()
    optimizer.build(model.trainable_variables)
    x = np.ones((16, 2), "float32")

    def trial(size, timed):
        update = Update(model, keras.losses.MeanSquaredError(), optimizer, size)
        try:
            tf.function(update, autograph=False)((x, x[:, :1]))
        except tf.errors.OpError as error:
            failure = batch_size_trial._failure(error)
            return {"kind": type(error).__name__, **failure, "took": 0.0}
        return {"peak": 1, "took": 0.0}

    monkeypatch.setattr(batch_size_search, "_trials", lambda *_: nullcontext(trial))
    config = OmegaConf.create(
        {"accumulation": {"micro_batch_size": "auto"}, "hardware": {"memory": None}}
    )
    spec = SimpleNamespace(config=config, batching=Batching(16, 16, 1))
    result = batch_size_search._search(spec, {"resident": 2**30})
    assert result.micro_batch_size == 4  # 16 in four pieces; 6 in three
    assert result.tries[0][-1].startswith(f"{kind}: ")
    most.assign(0)
    with pytest.raises(
        ConfigError,
        match=f"must be a number, since the update that was tried fails \\({kind}: ",
    ):
        batch_size_search._search(spec, {"resident": 2**30})


def test_what_is_wrong_at_every_size_is_not_tried_at_each():
    for error in (
        tf.errors.InvalidArgumentError(None, None, "no such label"),
        tf.errors.NotFoundError(None, None, "a"),
    ):
        failure = batch_size_trial._failure(error)
        assert "update that was tried fails" in failure["refused"]["rule"]
    cause = tf.errors.ResourceExhaustedError(None, None, "OOM when allocating")
    short = tf.errors.InternalError(None, None, "CUDA")
    short.__context__ = cause
    assert batch_size_trial._failure(short) == {"why": "OOM when allocating"}


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["InternalError", "NotFoundError"])
def test_the_largest_size_below_such_an_error_is_trained_with(project, kind):
    model = f"+model={{_target_: limited.large, kind: {kind}, most: 20}}"
    own = [text for text in OWN if not text.startswith("+model=")]
    own.append(model)
    line = (
        "train",
        *own,
        SIZE,
        AUTO,
        "dataset._target_=limited.examples",
        "hydra.run.dir=run",
    )
    done = pipeline(*line, cwd=project, XDG_CACHE_HOME=str(project / "cache"))
    assert f"micro-batch of 64 does not fit: {kind}: " in done.stderr
    assert micro_batch_size_in(project / "run") == 16  # 22 is the next
    rejected = pipeline(
        *line[:-1], "model.most=0", "hydra.run.dir=none", cwd=project, status=2
    )
    rule = (
        "micro_batch_size must be a number, since the update that was tried fails "
        f"({kind}: "
    )
    assert rule in rejected.stderr.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.skipif(
    bool(tf.config.list_physical_devices("GPU")),
    reason="the tries do not lose this machine's GPU",
)
def test_a_try_on_the_cpu_is_refused_where_tensorflow_lists_a_gpu_elsewhere(project):
    """The tries are forks, which lose the GPU if a library has opened it before."""
    (project / "asked").mkdir()
    (project / "asked" / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if 'list_physical_devices' in sys.orig_argv[-1]:\n"
        "    print(1)\n"
        "    sys.stdout.flush()\n"
        "    os._exit(0)\n"
    )
    (project / "nvidia-smi").write_text("#!/bin/sh\necho GPU 0: A\n")
    (project / "nvidia-smi").chmod(0o755)
    shown = {
        "PYTHONPATH": f"{ROOT}:{project / 'asked'}",
        "PATH": f"{project}:{os.environ['PATH']}",
    }
    rejected = pipeline(
        *RUN, cwd=project, status=2, XDG_CACHE_HOME=str(project / "cache"), **shown
    ).stderr
    line = (
        "pipeline: hardware.device asks for a GPU, but this run can use none "
        "(TensorFlow lists 1 GPU in a new process and none in this one). Received: 'gpu'."
    )
    assert rejected.splitlines()[-1].startswith(line)
    assert "micro-batch of" not in rejected


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ("8GiB", 8 * 2**30),
        ("1.5 MB", 1500000),
        (1024, 1024),
        ("12B", 12),
        ("1GB", 10**9),
        ("8 apples", None),
        ("-1GiB", None),
        (0, None),
        (True, None),
        (1.5, None),
        (None, None),
        ("0GiB", None),
    ],
)
def test_a_size_of_memory_is_read(size, expected):
    assert memory_budget.parsed(size) == expected


def spec_of(values):
    config = OmegaConf.create(values)
    return SimpleNamespace(config=config, dataset=config.dataset)


def test_the_longest_batch_is_as_long_as_each_part_can_be():
    lengths = [(2, 3), (7, 1), (4, 5), (1, 1)]

    def examples():
        for first, second in lengths:
            x = {"a": np.ones(first, "float32"), "b": np.ones(second, "float32")}
            yield x, np.int64(0)

    spec = (
        {name: tf.TensorSpec((None,), tf.float32) for name in "ab"},
        tf.TensorSpec((), tf.int64),
    )
    split = tf.data.Dataset.from_generator(examples, output_signature=spec)
    split = split.apply(tf.data.experimental.assert_cardinality(len(lengths)))
    node = {"in_memory": True, "pad": {"multiple": 4, "value": 0}}
    spec = spec_of(
        {"dataset": node, "seed": 0, "training": {"class_weight": None, "loss": None}}
    )
    x, *_ = next(iter(longest_batch.for_update(spec, Data(split, None), 3)))
    assert x["a"].shape == (3, 8)
    assert x["b"].shape == (3, 8)
    x, *_ = next(iter(longest_batch.for_evaluation(spec, split, 2)))
    assert x["a"].shape == (2, 8)
    assert x["b"].shape == (2, 8)


def test_the_longest_batch_is_padded_along_each_axis_or_has_most_elements():
    def examples():
        for height, width in [(1, 100), (20, 20), (100, 1)]:
            yield np.ones((height, width), "float32"), np.int64(0)

    spec = tf.TensorSpec((None, None), tf.float32), tf.TensorSpec((), tf.int64)
    split = tf.data.Dataset.from_generator(examples, output_signature=spec)
    split = split.apply(tf.data.experimental.assert_cardinality(3))
    config = {
        "dataset": {"in_memory": True, "pad": {"multiple": 1, "value": 0}},
        "seed": 0,
    }
    x, *_ = next(iter(longest_batch.for_evaluation(spec_of(config), split, 3)))
    assert x.shape == (3, 100, 100)
    not_padded = spec_of({"dataset": {"in_memory": True}})
    x, *_ = next(iter(longest_batch.for_evaluation(not_padded, split, 3)))
    assert x.flat_values.shape == (3 * 400,)


@pytest.mark.slow
def test_the_run_is_that_of_the_number_by_hand_and_is_looked_for_once(project):
    cache = {"XDG_CACHE_HOME": str(project / "cache"), **KERNELS}
    done = pipeline(
        "train", *OWN, SIZE, AUTO, MEMORY, "hydra.run.dir=auto", cwd=project, **cache
    )
    tries = table(project / "auto")
    fitting = [row for row in tries if row["fits"]]
    size = max(row["micro_batch_size"] for row in fitting)
    assert 1 < size < 64
    assert tries[0]["micro_batch_size"] == 64
    for row in fitting:
        assert row["peak_memory_bytes"] < 0.9 * 1.1 * 2**30
    assert f"micro-batch of {size} fits: " in done.stderr

    # The record has the number, wherever one looks.
    assert micro_batch_size_in(project / "auto") == size
    run = Store(project).run()
    assert run.data.params["accumulation.micro_batch_size"] == str(size)
    assert run.data.params["derived.micro_batch_size"] == str(size)
    why = run.data.tags["micro_batch_size.found"]
    assert why == "the largest of at most 64 that fits"
    peak = run.data.metrics["perf/peak_memory_bytes"]
    (chosen,) = [row for row in tries if row["micro_batch_size"] == size]
    assert peak < 1.1 * 2**30
    assert peak == pytest.approx(chosen["peak_memory_bytes"], rel=0.1)

    # The same by hand, and again as a sweep, which looks no more.
    pipeline(
        "train",
        *OWN,
        SIZE,
        f"accumulation.micro_batch_size={size}",
        "hydra.run.dir=hand",
        cwd=project,
        **cache,
    )
    again = ("-m", "optimizer.learning_rate=0.01,0.001", "hydra.sweep.dir=sweep")
    pipeline("train", *OWN, SIZE, AUTO, MEMORY, *again, cwd=project, **cache)
    for job in ("0", "1"):
        folder = project / "sweep" / job
        assert micro_batch_size_in(folder) == size
        assert "as found before" in (folder / "job.log").read_text()
        assert table(folder) == tries
    store = Store(project)
    curves = []
    for run in store.runs():
        if run.data.params.get("optimizer.learning_rate") == "0.01":
            curves.append(store.histories(run))
    assert len(curves) == 3
    assert curves[0] == curves[1] == curves[2]


@pytest.mark.slow
def test_a_run_that_goes_on_keeps_its_micro_batch(project):
    line = ("train", *OWN, SIZE, "hydra.run.dir=run", "training.resume=auto")
    pipeline(*line, "accumulation.micro_batch_size=48", cwd=project)
    resumed = pipeline(*line, AUTO, "training.updates=5", cwd=project)
    assert "64 = 48 × 2" in resumed.stderr
    assert "trying" not in resumed.stderr
    on_two = (AUTO, "training.updates=6", "hardware.replicas=2")
    resumed = pipeline(*line, *on_two, cwd=project)
    assert "64 = 32 × 1 × 2 replicas" in resumed.stderr


@pytest.mark.slow
def test_the_number_is_recorded(project):
    line = (
        "train",
        *OWN,
        AUTO,
        "accumulation.effective_batch_size=4",
        "training.updates=1",
    )
    cache = {"XDG_CACHE_HOME": str(project / "cache")}
    done = pipeline(*line, "hydra.run.dir=one", cwd=project, **cache)
    assert "micro-batch of 4 fits" in done.stderr
    assert micro_batch_size_in(project / "one") == 4
    assert Store(project).run().data.params["derived.micro_batch_size"] == "4"


@pytest.mark.slow
def test_what_is_remembered_is_of_the_users_code_and_of_the_devices(
    project, monkeypatch
):
    """So it is in a package without __init__.py.

    If there is no room for a cache, the number is found again.
    """
    (project / "own").mkdir()
    code = (project / "limited.py").rename(project / "own" / "limited.py")
    own = [part.replace("limited.", "own.limited.") for part in OWN]
    line = (
        "train",
        *own,
        AUTO,
        "accumulation.effective_batch_size=4",
        "training.updates=1",
    )

    def found_before(**more):
        cache = str(project / "cache")
        stderr = pipeline(*line, cwd=project, XDG_CACHE_HOME=cache, **more).stderr
        was_found = "as found before" in stderr
        assert was_found != ("micro-batch of 4 fits" in stderr)
        return was_found

    assert not found_before()
    assert found_before(CUDA_VISIBLE_DEVICES="1")
    code.write_text(code.read_text().replace("8192", "4096"))
    assert not found_before()
    done = pipeline(*line, cwd=project, XDG_CACHE_HOME="/proc/nowhere")
    assert "micro-batch of 4 fits" in done.stderr
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0,GPU-7")
    assert measured_once._gpus(["small", "large"]) == ["large", "small", "GPU-7"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,-1,0")
    assert measured_once._gpus(["small", "large"]) == ["large"]


@pytest.mark.slow
def test_the_fastest_is_found(project):
    fastest = "accumulation.micro_batch_size=auto_fastest"
    pipeline(
        "train",
        *OWN,
        fastest,
        "accumulation.effective_batch_size=16",
        "hydra.run.dir=run",
        cwd=project,
        XDG_CACHE_HOME=str(project / "cache"),
    )
    run_dir = project / "run"
    rates = {}
    for row in table(run_dir):
        rates[row["micro_batch_size"]] = row["examples_per_second"]
    assert list(rates)[:3] == [16, 8, 4]
    taken = micro_batch_size_in(run_dir)
    assert rates[taken] >= batch_size_search.ALIKE * max(rates.values())
    assert fastest not in (run_dir / "overrides.yaml").read_text()


@pytest.mark.slow
def test_an_interrupted_search_leaves_nothing(project):
    # Not warm: the processes that try are known by their command line.
    process = start(
        *RUN, cwd=project, warm=False, XDG_CACHE_HOME=str(project / "cache")
    )
    trials = []

    def searching():
        trials.clear()
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.Error):  # one of git's, that has ended
                if "pipeline.run.batch_size_trial" in " ".join(child.cmdline()):
                    trials.append(child)
        return len(trials) > 1  # it, and its fork

    wait(searching)
    os.kill(process.pid, signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert not (project / "run").exists()
    for trial in trials:
        wait(lambda trial=trial: is_gone(trial))


def is_gone(process):
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


RUN = ("train", *OWN, SIZE, AUTO, "hydra.run.dir=run")
REFUSED = {
    "hardware.memory must be enough for a micro-batch of one example, "
    "which does not fit (": ("hardware.memory=300MB",),
    "accumulation.micro_batch_size must be a number if examples of unequal length "
    "are streamed, because the longest": (
        "dataset._target_=limited.uneven",
        "dataset.in_memory=false",
        "+dataset.pad={multiple: 1, value: 0}",
        "accumulation.effective_batch_size=4",
    ),
    "accumulation.micro_batch_size must be a number, since the update that was tried "
    "fails (InvalidArgumentError: ": ("model._target_=limited.broken",),
    "accumulation.effective_batch_size must be at most the 256 examples of the "
    "training split. Received: 257.": ("accumulation.effective_batch_size=257",),
}


@pytest.mark.slow
def test_what_cannot_be_found_is_refused_in_one_line(project):
    lines = {rule: shlex.join([*RUN, *more]) for rule, more in REFUSED.items()}
    answers = one_process(lines, project, XDG_CACHE_HOME=str(project / "cache"))
    for rule, answer in answers.items():
        assert answer["status"] == 2, rule
        assert answer["err"].splitlines()[-1].startswith(f"pipeline: {rule}")
        assert "Traceback" not in answer["err"]
    assert not (project / "run").exists()
    assert not list((project / "cache").rglob("micro_batch_size/*[!k]"))  # but locks


@pytest.mark.soak
def test_under_a_real_limit_it_is_what_an_exhaustive_search_finds_within_one_step(
    project,
):
    def run(size):
        line = (
            *OWN,
            "accumulation.effective_batch_size=256",
            f"accumulation.micro_batch_size={size}",
        )
        folder = f"hydra.run.dir={size}"
        done = subprocess.run(
            [sys.executable, "-m", "pipeline", "train", *line, folder],
            cwd=project,
            # Each arena of malloc takes 64 MiB of the address space, and each thread
            # would have its own.
            env=environment(
                XDG_CACHE_HOME=str(project / "cache"), MALLOC_ARENA_MAX="2"
            ),
            capture_output=True,
            text=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (3 * 2**30,) * 2),
        )
        return done.returncode == 0 and "does not fit into memory" not in done.stderr

    assert run("auto")
    chosen = micro_batch_size_in(project / "auto")
    sizes = sorted({-(-256 // factor) for factor in range(1, 257)})
    # One step is one of two: the margin of a tenth is up to 35 examples of 8.6 MB each.
    assert not run(next(size for size in sizes if size > 2 * chosen))


ENTRY = {
    "micro_batch_size": 8,
    "how": "the largest",
    "tries": [[8, 8, True, 1, None, None, ""]],
}


def without(key):
    return {name: value for name, value in ENTRY.items() if name != key}


@pytest.mark.parametrize(
    "entry",
    [
        *(without(key) for key in ENTRY),
        *(ENTRY | {"micro_batch_size": size} for size in (-5, 0, 10**9, None, "8")),
        ENTRY | {"tries": [[8]]},
        ENTRY | {"tries": None},
        [],
    ],
    ids=str,
)
def test_a_bad_entry_of_the_cache_counts_as_none(tmp_path, monkeypatch, entry):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = disk_cache.place("micro_batch_size", "{}")
    monkeypatch.setattr(batch_size_search, "_cache_file", lambda *_: file)
    result = batch_size_search.Found(**ENTRY)
    monkeypatch.setattr(batch_size_search, "_search", lambda *_: result)
    spec = SimpleNamespace(
        config=SimpleNamespace(hardware=SimpleNamespace(memory=None)),
        workers_on_machine=1,
        times_xla=False,
        batching=SimpleNamespace(share=64),
        with_micro_batch=lambda size: size,
    )
    spec.at_largest = lambda: spec
    disk_cache.remember(file, entry)
    assert batch_size_search.search(spec)[0] == 8

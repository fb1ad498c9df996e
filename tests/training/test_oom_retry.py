"""Memory that runs out in the middle of a run.

The same update is done in smaller micro-batches, and nothing is done twice.
"""

from __future__ import annotations

import re
import signal
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from pipeline.accumulation import Evaluation, Update
from pipeline.accumulation.internals import trace_forward
from pipeline.accumulation.token_cut import TokenLimit
from pipeline.common.errors import OutOfMemoryError
from pipeline.training.evaluator import SplitEvaluator
from pipeline.training.oom_retry import OomRetry, halve
from tests.parameters import mostly_slow
from tests.running import Store, pipeline

SCARCE = """
import builtins
import os
import keras
import tensorflow as tf

calls = [0]


class Scarce(keras.layers.Layer):
    "From the call number AT on it has memory for MOST examples, in evaluation too."

    def call(self, x):
        def check(count):
            calls[0] += 1
            if calls[0] >= int(os.environ["AT"]) and count > int(os.environ["MOST"]):
                # MemoryError is ResourceExhaustedError of TensorFlow, and RuntimeError
                # is UnknownError.
                error = os.environ.get("ERROR", "MemoryError")
                raise getattr(builtins, error)("no room")
            return count

        count = tf.shape(x)[0]
        with tf.control_dependencies([tf.py_function(check, [count], tf.int32)]):
            return tf.identity(x)


def model(input_shape, classes):
    hidden = keras.layers.Dense(16, activation="relu")
    parts = [keras.layers.Flatten(), Scarce(), hidden, keras.layers.Dense(classes)]
    return keras.Sequential([keras.Input(input_shape), *parts])
"""
LIMITED = r"""
import os
import re
import resource
import keras
import numpy as np
import tensorflow as tf

WIDTH = 32
# A thread takes 8 MiB of the address space.
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])


def examples():
    "200 sequences of 20 vectors, but one of 200."
    lengths = np.full(200, 20)
    lengths[77] = 200

    def sequences():
        numbers = np.random.default_rng(0)
        for length in lengths:
            x = numbers.normal(size=(length, WIDTH))
            yield x, x[:, :1].mean(0)

    spec = (tf.TensorSpec((None, WIDTH), tf.float64), tf.TensorSpec((1,), tf.float64))
    split = tf.data.Dataset.from_generator(sequences, output_signature=spec)
    return split.apply(tf.data.experimental.assert_cardinality(200)), None


def model(input_shape):
    wide = keras.layers.Dense(8192, activation="tanh")
    narrow = keras.layers.Dense(64)
    mean = keras.layers.GlobalAveragePooling1D()
    output = keras.layers.Dense(1)
    model = keras.Sequential([keras.Input((None, WIDTH)), wide, narrow, mean, output])
    room = int(os.environ["ROOM"])
    if room:
        status = open("/proc/self/status").read()
        used = int(re.search(r"VmSize:\s+(\d+) kB", status)[1]) * 1024
        resource.setrlimit(resource.RLIMIT_AS, (used + room * 2**20,) * 2)
    return model
"""
UPDATES = 24
MICRO = 16
RUN = (
    "model=mlp",
    "~model.hidden",
    "~model.dropout",
    "~model.l2",
    "model._target_=scarce.model",
    "hardware.precision=float64",
    f"accumulation.micro_batch_size={MICRO}",
    "accumulation.effective_batch_size=128",
    f"training.updates={UPDATES}",
    "training.evaluate_every=8",
    "tracking.log_model=false",
    "tracking.system_metrics=false",
    "hydra.run.dir=run",
)
LONG = (
    "~dataset",
    "+dataset={_target_: limited.examples, in_memory: true, "
    "pad: {multiple: 1, value: 0}}",
    "~model",
    "+model={_target_: limited.model}",
    "objective=regression",
    "hardware.precision=float64",
    "accumulation.micro_batch_size=16",
    "accumulation.effective_batch_size=64",
    "training.updates=5",
    "tracking.log_model=false",
    "tracking.system_metrics=false",
    "hydra.run.dir=run",
)


def trained(folder, at, most, *more, status=0, **variables):
    folder.mkdir()
    (folder / "scarce.py").write_text(SCARCE)
    done = pipeline(
        "train",
        *RUN,
        *more,
        cwd=folder,
        status=status,
        AT=str(at),
        MOST=str(most),
        **variables,
    )
    store = Store(folder)
    run = store.run()
    histories = store.histories(run, "train/", "val/", "perf/micro_batch_size")
    return histories, run, done.stderr


RAMP = (
    "accumulation.batch_schedule=[{start:{updates:0},effective_batch_size:64},"
    "{start:{updates:9},effective_batch_size:128}]",
    "accumulation.effective_batch_size=64",
)


@pytest.mark.parametrize(
    ("replicas", "more"),
    [
        pytest.param(1, (), marks=pytest.mark.slow),
        pytest.param(2, (), marks=pytest.mark.slow),
        pytest.param(1, RAMP, marks=pytest.mark.soak),
    ],
    ids=["one device", "two replicas", "a ramp"],
)
def test_a_run_goes_on_in_smaller_micro_batches_to_the_same_result(
    tmp_path, replicas, more
):
    more = (f"hardware.replicas={replicas}", *more)
    whole, _, _ = trained(tmp_path / "whole", 10**9, 1, *more)
    # In the middle of an update: after 5 micro-steps of the eleventh.
    before = 10 * 8
    if len(more) > 1:
        factors = whole["train/accumulation_factor"]
        before = int(sum(factors[step] for step in range(1, 11)))
    halved, run, printed = trained(tmp_path / "halved", before + 16 + 6, 4, *more)
    for key in ("train/loss", "val/loss", "train/gradient_norm"):
        assert halved[key].keys() == whole[key].keys()
        for step, value in whole[key].items():
            assert halved[key][step] == pytest.approx(value, rel=1e-12), (key, step)
    assert set(halved["perf/micro_batch_size"].values()) == {4.0}
    sizes = re.fullmatch(
        r"16 up to update (\d+), 4 then", run.data.tags["micro_batch_size.halved"]
    )
    assert min(halved["perf/micro_batch_size"]) == int(sizes[1]) + 1
    assert run.data.tags["micro_batch_size.validation"] == "4"
    assert "perf/micro_batch_size" not in whole
    retried = "does not fit into memory: retrying with micro-batches of 8 instead of 16"
    assert retried in printed
    steps = list(halved["train/micro_steps"].values())
    assert steps == sorted(steps)
    assert steps[:3] == list(whole["train/micro_steps"].values())[:3]
    assert steps[-2] - steps[-3] == 128 // replicas // 4


@pytest.mark.slow
def test_an_error_of_which_memory_may_be_the_cause_is_not_tried_again(tmp_path):
    """After another error of CUDA's libraries nothing on the GPU can be trusted.

    A try of `auto` is a process of its own.
    """
    rows, run, printed = trained(
        tmp_path / "run", 10 * 8 + 16 + 6, 4, status=1, ERROR="RuntimeError"
    )
    assert run.info.status == "FAILED"
    assert "UnknownError" in run.data.tags["failure"]
    assert "in micro-batches of" not in printed
    assert list(rows["train/loss"]) == list(range(1, len(rows["train/loss"]) + 1))


@pytest.mark.slow
def test_a_rerun_of_a_run_that_was_halved_is_equal_within_rounding(tmp_path):
    _, run, _ = trained(tmp_path / "halved", 10 * 8 + 16 + 6, 4)
    rerun = pipeline(
        "rerun",
        run.info.run_id,
        "--allow",
        "scarce",
        cwd=tmp_path / "halved",
        AT=str(10**9),
        MOST="1",
    )
    assert "equal within rounding: " in rerun.stdout + rerun.stderr


@pytest.mark.slow
def test_a_run_that_goes_on_tries_the_micro_batch_of_the_config_again(tmp_path):
    trained(tmp_path / "run", 10 * 8 + 16 + 6, 4, "training.updates=14")
    pipeline(
        "resume",
        "run",
        "training.updates=18",
        cwd=tmp_path / "run",
        AT=str(10**9),
        MOST="1",
    )
    store = Store(tmp_path / "run")
    run = store.run()
    sizes = run.data.tags["micro_batch_size.halved"]
    assert re.fullmatch(r"16 up to update 1\d, 4 up to update 14, 16 then", sizes)
    steps = store.history(run, "train/micro_steps")
    assert [steps[update] - steps[update - 1] for update in (14, 15, 16)] == [32, 8, 8]
    assert store.history(run, "perf/micro_batch_size")[18] == 16


@pytest.mark.slow
def test_where_one_example_does_not_fit_the_run_fails_in_one_line(tmp_path):
    rows, run, printed = trained(tmp_path / "run", 60, 0, status=1)
    assert run.info.status == "FAILED"
    assert (
        "not even a micro-batch of one example fits into memory in "
        in run.data.tags["failure"]
    )
    assert "no room" in run.data.tags["failure"]
    assert "Traceback" not in printed
    assert list(rows["train/loss"]) == list(range(1, len(rows["train/loss"]) + 1))


def test_a_limit_of_tokens_is_halved_down_to_single_examples(capsys):
    step = SimpleNamespace(token_limit=TokenLimit(100, 8, 16), micro_batch_size=8)
    error = tf.errors.ResourceExhaustedError(None, None, "no room")
    assert [halve(step, "update 3", error) for _ in range(3)] == [50, 25, 13]
    assert step.token_limit == TokenLimit(13, 8, 16)
    line = (
        "update 3 does not fit into memory: retrying with micro-batches of 50 tokens "
    )
    assert f"{line}instead of 100" in capsys.readouterr().err
    # Each example is padded to at least 16, so all are alone by now.
    with pytest.raises(OutOfMemoryError, match="not even a micro-batch of one example"):
        halve(step, "update 3", error)


HALVED = " does not fit into memory: retrying with micro-batches of 8"


def run_under_limit(folder, room):
    (folder / "limited.py").write_text(LIMITED)
    return pipeline(
        "train",
        *LONG,
        cwd=folder,
        status=None,
        warm=False,
        ROOM=str(room),
        # A few arenas of malloc: each takes 64 MiB of the address space, and each
        # thread wants its own.
        MALLOC_ARENA_MAX="2",
        # oneDNN takes more, and TensorFlow uses it on some processors only.
        TF_ENABLE_ONEDNN_OPTS="0",
    )


def curves_in(folder):
    store = Store(folder)
    return store.histories(store.run())


@pytest.mark.slow
def test_an_example_that_is_ten_times_longer_under_a_limit_of_the_address_space(
    tmp_path,
):
    """The limit is set when the model is made, some MiB above what the process has.

    A tensor of 16 such examples takes 210 MiB. Which allocation fails under which limit
    depends on the machine: if it is one of a library that knows no other way, that ends
    the process; if none fails, another limit is tried.
    """
    (tmp_path / "whole").mkdir()
    done = run_under_limit(tmp_path / "whole", 0)
    assert done.returncode == 0
    assert HALVED not in done.stderr
    whole = curves_in(tmp_path / "whole")

    for number, room in enumerate([425, 380, 340, 540, 480] * 2):
        folder = tmp_path / f"halved{number}"
        folder.mkdir()
        done = run_under_limit(folder, room)
        if done.returncode == 0 and HALVED in done.stderr:
            break
        assert done.returncode in (0, -signal.SIGABRT), done.stderr
        print(f"{room} MiB: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0
    assert HALVED in done.stderr
    halved = curves_in(folder)

    for key in ("train/loss", "train/gradient_norm"):
        assert len(whole[key]) == 5  # of which an epoch has four
        for step, value in whole[key].items():
            assert halved[key][step] == pytest.approx(value, rel=1e-12), (key, step)


def in_steps(update, changed, x, y):
    """Return a function that does the next update on these data.

    A second one does it again after it failed.
    """
    batches = tf.data.Dataset.from_tensors((x, y)).repeat()
    retry = OomRetry(update, changed, batches.element_spec)

    def loss(batch):
        return update(batch)["loss"]

    step = tf.function(lambda batch: retry.hold_batch(batch, loss), autograph=False)
    iterator = iter(batches)

    def run_next():
        return retry.run(step, iterator)

    def run_again(error):
        return retry.retry_halved(error, 2, loss)

    return run_next, run_again


def test_an_update_of_which_some_may_be_applied_is_not_tried_again():
    short = tf.Variable(0)

    class Short(keras.optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate):
            super().update_step(gradient, variable, learning_rate)
            with tf.control_dependencies([tf.identity(variable)]):
                tf.debugging.assert_none_equal(short, 1)

    model = keras.Sequential([keras.Input((3,)), layers.Dense(4), layers.Dense(1)])
    optimizer = Short(0.1)
    optimizer.build(model.trainable_variables)
    update = Update(model, keras.losses.MeanSquaredError(), optimizer, 4)
    step, again = in_steps(
        update, [], np.ones((8, 3), "float32"), np.ones((8, 1), "float32")
    )
    step()
    short.assign(1)
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        step()
    with pytest.raises(
        OutOfMemoryError,
        match="memory ran out while update 2 was applied, so it is not repeated",
    ):
        again(caught.value)
    assert update.micro_batch_size == 4


@pytest.mark.parametrize("jit_compile", mostly_slow([False, True], [False]))
def test_what_a_forward_pass_has_changed_is_put_back(jit_compile):
    """So the update is what it would have been in smaller micro-batches at once.

    It is bit-identical. Where XLA compiles the optimizer's step, the optimizer counts
    it before the gradient is complete, and that is put back too.
    """

    def steps_of_new_model(failing):
        keras.utils.set_random_seed(0)

        class Fails(layers.Layer):
            def call(self, x):
                check = tf.debugging.assert_none_equal(tf.shape(x)[0], failing)
                with tf.control_dependencies([check]):
                    return tf.identity(x)

        model = keras.Sequential(
            [
                keras.Input((3,)),
                layers.Dense(4),
                layers.BatchNormalization(),
                layers.Dropout(0.5),
                Fails(),
                layers.Dense(1),
            ]
        )
        optimizer = keras.optimizers.Adam()
        optimizer.build(model.trainable_variables)
        x, y = np.random.default_rng(0).normal(size=(2, 10, 3)).astype("float32")
        update = Update(
            model,
            keras.losses.MeanSquaredError(),
            optimizer,
            4,
            noise_every=3,
            jit_compile=jit_compile,
            xla_scope="apply",
        )
        changed = trace_forward(model, x, same_noise=False).assigned
        names = {variable.path.rsplit("/", 1)[-1] for variable in changed}
        assert names == {"moving_mean", "moving_variance", "seed_generator_state"}
        step, again = in_steps(
            update, [variable.value for variable in changed], x, y[:, :1]
        )
        variables = [*model.variables, *optimizer.variables]
        return update, step, again, variables

    failing = tf.Variable(0)
    update, step, again, variables = steps_of_new_model(failing)
    step()
    failing.assign(2)  # the last micro-batch, as the others have four
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        step()
    assert update.apply_compiled is jit_compile
    failing.assign(0)
    again(caught.value)
    assert update.micro_batch_size == 2
    assert int(update.optimizer.iterations.numpy()) == 2
    assert int(update.begun) == 2  # a try that failed does not count
    other, other_step, _, other_variables = steps_of_new_model(tf.Variable(0))
    other_step()
    other.micro_batch_size = 2
    in_halves = tf.function(lambda x, y: other((x, y)), autograph=False)
    x, y = np.random.default_rng(0).normal(size=(2, 10, 3)).astype("float32")
    in_halves(x, y[:, :1])
    for retried, halved in zip(variables, other_variables, strict=True):
        np.testing.assert_array_equal(
            retried.numpy(), halved.numpy(), err_msg=retried.path
        )


@pytest.mark.slow
def test_memory_that_runs_out_while_a_batch_is_read_is_not_of_the_update():
    def read(number):
        if number == 3:
            raise MemoryError("no room for the batch")
        return np.ones(2, "float32")

    def example(number):
        x = tf.ensure_shape(tf.numpy_function(read, [number], tf.float32), (2,))
        return x, x[:1]

    batches = tf.data.Dataset.range(5).map(example).batch(2)
    model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    optimizer = keras.optimizers.SGD()
    optimizer.build(model.trainable_variables)
    update = Update(model, keras.losses.MeanSquaredError(), optimizer, 2)
    retry = OomRetry(update, [], batches.element_spec)

    def loss(batch):
        return update(batch)["loss"]

    step = tf.function(lambda batch: retry.hold_batch(batch, loss), autograph=False)
    iterator = iter(batches)
    retry.run(step, iterator)
    with pytest.raises(tf.errors.ResourceExhaustedError) as caught:
        retry.run(step, iterator)
    with pytest.raises(tf.errors.ResourceExhaustedError, match="no room for the batch"):
        retry.retry_halved(caught.value, 2, loss)
    assert update.micro_batch_size == 2
    batches_read = SplitEvaluator(
        Evaluation(model, keras.losses.MeanSquaredError(), 2), batches
    )
    with pytest.raises(tf.errors.ResourceExhaustedError, match="no room for the batch"):
        batches_read()

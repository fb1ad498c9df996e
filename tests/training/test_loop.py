"""The loop: what is logged and evaluated if a run ends early, and callbacks' cost."""

from __future__ import annotations

import math
import time
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from pipeline.accumulation import Evaluation, Update
from pipeline.accumulation.internals import Objective
from pipeline.checkpoints import files, snapshot
from pipeline.checkpoints.files import Checkpoints
from pipeline.config.plan import Plan
from pipeline.config.sizes import Batching
from pipeline.training.evaluator import (
    OWN_SPLIT,
    EvaluatedSet,
    Evaluations,
    SplitEvaluator,
)
from pipeline.training.loop import Interrupted, Trainer
from pipeline.training.progress import Progress
from pipeline.training.recorder import NonFiniteError, Recorder, ResultLayout
from tests.parameters import mostly_slow

EXAMPLES = 40
SIZE = 8
PER_EPOCH = EXAMPLES // SIZE
# The results of an update that a recorder is given.
NAMES = ("loss", "gradient_norm", "learning_rate")


class Rows:
    """Where rows go: here, to be looked at."""

    def __init__(self) -> None:
        self.updates: list[tuple[int, dict]] = []
        self.performance: list[dict] = []
        self.validations: list[tuple[int, dict]] = []

    def update(self, update, results, performance, at) -> None:
        self.updates.append((update, dict(results)))
        self.performance.append(dict(performance))

    def validation(self, update, results) -> None:
        self.validations.append((update, dict(results)))

    def user_metric(self, update, name, value) -> bool:
        return True

    def summary(self, updates, stopped_by, best) -> None:
        best_row = None if best is None else best.row()
        self.end = (updates, stopped_by, best_row)


class StopAt(keras.callbacks.Callback):
    """Ends the run at the end of an epoch, counted from 0, as EarlyStopping does."""

    def __init__(self, epoch: int):
        super().__init__()
        self.epoch = epoch

    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = epoch >= self.epoch


class StopAtOnce(keras.callbacks.Callback):
    """Ends the run before its first update."""

    def on_train_begin(self, logs=None):
        self.model.stop_training = True


class Run:
    """A linear model on 40 examples, 5 updates an epoch; it leaves `rows`, `model`."""

    def __init__(  # noqa: PLR0913  what a test varies
        self,
        callbacks=(),
        *,
        epochs=4,
        log_every=1,
        evaluate_every="epoch",
        use_ema=False,
        validate=True,
        rows: Rows | None = None,
        through=lambda batches: batches,
        stop=lambda: None,
        fit=True,
        middle=(),
        micro_batch_size=SIZE,
        tokens=None,
        metrics=(),
        sets=(),
        best=None,
        evaluate_at_start=False,
        show=lambda update: None,
    ):
        keras.utils.set_random_seed(0)
        x = np.random.default_rng(0).normal(size=(EXAMPLES, 3)).astype("float32")
        examples = tf.data.Dataset.from_tensor_slices((x, x.sum(1, keepdims=True)))
        self.model = keras.Sequential([keras.Input((3,)), *middle, layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.1, use_ema=use_ema, ema_momentum=0.9)
        optimizer.build(self.model.trainable_variables)
        loss = keras.losses.MeanSquaredError()
        self.model.compile(optimizer, loss)
        plan = Plan(Batching(SIZE, SIZE, 1), EXAMPLES, epochs * PER_EPOCH)
        self.rows = rows or Rows()
        progress = Progress(plan.updates)
        recorder = Recorder(self.rows, plan, log_every, lambda: 0, progress)
        self.evaluate = SplitEvaluator(
            Evaluation(self.model, loss, SIZE), through(examples.batch(SIZE))
        )
        evaluate = self.evaluate if validate else None
        # Each set of `sets`, name → interval, has the first 8 examples.
        evaluated_sets = {}
        for name, every in dict(sets).items():
            evaluated = SplitEvaluator(
                Evaluation(self.model, loss, SIZE), examples.take(SIZE).batch(5), name
            )
            evaluated_sets[name] = EvaluatedSet(evaluated, every)
        objective = Objective(loss, metrics=list(metrics))
        self.trainer = Trainer(
            Update(self.model, objective, optimizer, micro_batch_size),
            through(examples.batch(SIZE)).repeat(),
            recorder,
            evaluations=Evaluations(
                evaluate,
                every=evaluate_every,
                best=best,
                sets=evaluated_sets,
                show=show,
            ),
            evaluate_at_start=evaluate_at_start,
            callbacks={str(i): callback for i, callback in enumerate(callbacks)},
            stop=stop,
            count_tokens=tokens,
        )
        self.loss = self.trainer.fit() if fit else None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("evaluate_every", "use_ema"), [("epoch", False), (100, True), (2, True)]
)
def test_a_stop_at_the_end_of_an_epoch_is_an_end_like_any_other(
    evaluate_every, use_ema, capsys
):
    stopped = Run([StopAt(1)], evaluate_every=evaluate_every, use_ema=use_ema)
    line = f"the callback 0 has ended training after update {2 * PER_EPOCH}"
    assert line in capsys.readouterr().err
    whole = Run(epochs=2, evaluate_every=evaluate_every, use_ema=use_ema)
    assert stopped.rows.updates == whole.rows.updates
    # Each step is there once, the last one of the final weights.
    assert stopped.rows.validations == whole.rows.validations
    assert stopped.rows.validations[-1] == (2 * PER_EPOCH, {"loss": stopped.loss})
    pairs = zip(stopped.model.get_weights(), whole.model.get_weights(), strict=True)
    for after_stop, of_whole in pairs:
        np.testing.assert_array_equal(after_stop, of_whole)
    assert stopped.evaluate()["loss"] == stopped.loss


@pytest.mark.parametrize("evaluate_at_start", [False, True])
def test_a_callback_that_stops_as_training_begins_leaves_a_run_of_no_updates(
    evaluate_at_start, capsys
):
    """Its weights are those that it began with, and not the averages, still zeros."""
    stop = StopAtOnce()
    run = Run([stop], use_ema=True, evaluate_at_start=evaluate_at_start, fit=False)
    before = run.model.get_weights()
    loss = run.trainer.fit()

    assert run.rows.updates == []
    assert run.rows.end == (0, "0", None)
    np.testing.assert_array_equal(run.model.get_weights()[0], before[0])
    if evaluate_at_start:
        assert run.rows.validations == [(0, {"loss": loss})]
        assert np.isfinite(loss)
    else:
        assert run.rows.validations == []
        assert loss == math.inf
    assert "the callback 0 ended training in on_train_begin" in capsys.readouterr().err


@pytest.mark.slow
def test_every_validation_is_of_the_averaged_weights():
    """Each row is what a run that ended there shows as its last one.

    The training goes on from the weights themselves.
    """
    whole = Run(use_ema=True)
    after_one = Run(epochs=1, use_ema=True)
    after_four = Run(epochs=4, use_ema=True)
    assert whole.rows.validations[0] == after_one.rows.validations[-1]
    assert whole.rows.validations[-1] == after_four.rows.validations[-1]
    of_the_weights_themselves = Run(epochs=1).rows.validations[0]
    assert whole.rows.validations[0] != of_the_weights_themselves
    assert whole.rows.updates == Run().rows.updates


@pytest.mark.slow
def test_results_are_copied_to_the_host_in_groups(monkeypatch):
    """Each copy waits for the device, so there is only one in so many updates.

    Nothing else in the loop makes any.
    """
    monkeypatch.setattr("pipeline.training.recorder.FETCH_SECONDS", math.inf)
    monkeypatch.setattr("pipeline.training.recorder.FETCH_UPDATES", 10)
    copies: list[str] = []
    kind = type(tf.constant(0))
    for name in ("numpy", "__array__", "__float__", "__int__", "__bool__", "__index__"):
        counted = _counted(getattr(kind, name), copies, name)
        monkeypatch.setattr(kind, name, counted, raising=True)

    def copied(epochs: int) -> int:
        run = Run(epochs=epochs, log_every=10, validate=False, fit=False)
        copies.clear()
        run.trainer.fit()
        return len(copies)

    once = copied(2)
    for groups in (1, 2, 5):  # of 10 updates each
        assert copied(2 + 2 * groups) - once == groups


def _counted(method, copies, name):
    def counted(self, *arguments, **options):
        copies.append(name)
        return method(self, *arguments, **options)

    return counted


@pytest.mark.parametrize(
    ("epochs", "stop"),
    [pytest.param(2, [], marks=pytest.mark.slow), (4, [StopAt(1)])],
)
def test_the_last_update_is_logged_whatever_is_left_out(epochs, stop):
    rows = Run(stop, epochs=epochs, log_every=4, validate=False).rows
    assert [update for update, _ in rows.updates] == [4, 8, 10]
    assert Run(log_every=5, epochs=2).rows.updates[-1][0] == 10  # and once


def test_a_callback_that_raises_takes_no_row_with_it():
    class Raises(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            raise RuntimeError("out of disk")

    rows = Rows()
    with pytest.raises(RuntimeError, match="out of disk"):
        Run([Raises()], rows=rows)
    assert [update for update, _ in rows.validations] == [PER_EPOCH]


def test_a_callback_that_looks_at_updates_sees_each():
    seen = []

    def look(batch, logs):
        seen.append((batch, logs["loss"]))

    looker = keras.callbacks.LambdaCallback(on_train_batch_end=look)
    rows = Run([looker, StopAt(0)]).rows
    assert seen == [
        (update - 1, pytest.approx(row["loss"])) for update, row in rows.updates
    ]


def test_a_stop_by_an_evaluation_within_an_epoch_ends_the_epoch():
    ends = []

    class StopsAfterAnEvaluation(keras.callbacks.Callback):
        def on_test_end(self, logs=None):
            self.model.stop_training = True

        def on_epoch_end(self, epoch, logs=None):
            ends.append((epoch, logs["val_loss"]))

    rows = Run([StopsAfterAnEvaluation()], evaluate_every=2).rows
    assert [update for update, _ in rows.updates] == [1, 2]
    ((update, validation),) = rows.validations
    assert update == 2
    assert ends == [(0, validation["loss"])]


def test_a_result_of_a_batch_has_the_meaning_that_it_has_for_an_epoch():
    """The estimates of the noise by one update are no averages, and not there."""
    batch_names = set()
    epoch_names = set()

    class Looks(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            batch_names.update(logs)

        def on_epoch_end(self, epoch, logs=None):
            epoch_names.update(logs)

    Run([Looks()], epochs=1, micro_batch_size=2, validate=False)
    noise = {"gradient_variance", "gradient_squared_norm", "gradient_noise_scale"}
    assert batch_names == {"loss", "gradient_norm", "learning_rate"}
    assert epoch_names - noise == batch_names


def test_a_metric_called_tokens_is_logged_where_tokens_are_counted():
    run = Run(
        epochs=1,
        metrics=[keras.metrics.MeanAbsoluteError("tokens")],
        tokens=lambda batch: tf.constant(7),
        validate=False,
    )
    for _, row in run.rows.updates:
        assert 0 < row["tokens"] < 7


@pytest.mark.slow
def test_the_steps_of_an_epoch_can_be_called_one_by_one():
    run = Run(epochs=1, fit=False)
    trainer = run.trainer
    iterator = iter(trainer.batches)
    for update in range(1, PER_EPOCH + 1):
        assert not trainer.ended
        trainer.record(trainer.update_once(iterator))
        assert trainer.done == update
        assert trainer.pending is True
        trainer.after_update()
        assert trainer.pending is False
        assert bool(trainer.validation) == (update == PER_EPOCH)
    assert trainer.ended
    assert run.rows.validations == Run(epochs=1).rows.validations


@pytest.mark.slow
def test_only_who_asks_for_it_interrupts_the_run():
    """It ends with the reason that was given.

    The same exception out of a callback is an error.
    """
    reason = KeyboardInterrupt()
    interrupted = Rows()
    failed = Rows()

    def raises(epoch, logs):
        raise reason

    with pytest.raises(KeyboardInterrupt) as raised:
        Run(rows=interrupted, stop=lambda: reason)
    with pytest.raises(KeyboardInterrupt):
        Run([keras.callbacks.LambdaCallback(on_epoch_end=raises)], rows=failed)
    assert raised.value is reason
    assert interrupted.end == (1, None, None)
    assert not hasattr(failed, "end")


def test_an_evaluation_after_the_last_callbacks_is_not_interrupted():
    trainer = Run(fit=False, stop=KeyboardInterrupt).trainer
    trainer.pending = True
    with pytest.raises(Interrupted):
        trainer.validate([OWN_SPLIT])
    trainer.pending = False
    assert trainer.validate([OWN_SPLIT])["loss"] > 0


def test_a_lost_worker_leaves_a_checkpoint_and_no_row_that_is_not_due(tmp_path):
    run = Run(log_every=2, validate=False, fit=False)
    trainer = run.trainer
    trainer.checkpoints = Checkpoints(tmp_path, 100, trainer.recorder.plan)

    def loses_a_worker():
        if trainer.done == 3:
            raise tf.errors.UnavailableError(None, None, "socket closed")

    trainer.stop = loses_a_worker
    with pytest.raises(tf.errors.UnavailableError):
        trainer.fit()
    trainer.checkpoints.wait()
    assert files.at(tmp_path, 3).updates_done == 3
    assert [update for update, _ in run.rows.updates] == [2]


class CtrlC(Rows):
    """Ctrl-C while the rows of a group are written."""

    def update(self, update, results, performance, at) -> None:
        super().update(update, results, performance, at)
        if update == 3:
            raise KeyboardInterrupt


def results(loss, *, norm=1.0, tokens=math.nan, shapes=0.0, lengths=0.0, noise=()):
    """Return packed results of `NAMES`, and of two estimates of the noise."""
    return tf.constant([loss, norm, 0.1, *noise, tokens, shapes, lengths], tf.float64)


def recorder(rows: Rows, losses: list[float]) -> Recorder:
    """Return a recorder with the results of these updates still on the device."""
    plan = Plan(Batching(SIZE, SIZE, 1), EXAMPLES, len(losses) + 1)
    layout = ResultLayout(NAMES)
    recorder = Recorder(rows, plan, 1, lambda: 0, Progress(plan.updates), layout=layout)
    recorder.add(1, results(1.0), traces=1)
    for update, loss in enumerate(losses, start=2):
        recorder.add(update, results(loss), traces=1)
    return recorder


def test_a_cut_by_tokens_is_counted_on_after_a_resume():
    names = (*NAMES, "micro_steps", "tokens", "positions")

    def results_of(micro_steps, tokens, positions):
        values = [1.0, 1.0, 0.1, micro_steps, tokens, positions, math.nan, 0.0]
        return tf.constant(values, tf.float64)

    rows = Rows()
    plan = Plan(Batching(SIZE, SIZE, 1, 1, 64), EXAMPLES, 9)
    first = Recorder(rows, plan, 1, lambda: 0, Progress(9), layout=ResultLayout(names))
    first.add(1, results_of(3, 90, 120), traces=1)
    first.add(2, results_of(2, 60, 100), traces=1)
    first.fetch()
    state = first.get_state()
    assert "tokens" not in state["last"]  # nor in the logs of callbacks

    layout = ResultLayout(names)
    resumed = Recorder(rows, plan, 1, lambda: 0, Progress(9), layout=layout)
    resumed.set_state(state)
    resumed.add(3, results_of(4, 100, 100), traces=1)
    resumed.fetch()
    logged = [(row["micro_steps"], row["tokens_seen"]) for _, row in rows.updates]
    assert logged == [(3, 90), (5, 150), (9, 250)]
    assert [row["padding_share"] for row in rows.performance] == [0.25, 0.4, 0.0]


def test_a_loss_that_has_exploded_is_said_and_tagged_once(capsys):
    tagged = []
    rows = Rows()
    rows.tag = tagged.append
    first = recorder(rows, [2.0, 3e6, 4e6])
    first.fetch()
    resumed = recorder(rows, [])
    resumed.set_state(first.get_state())
    resumed.add(2, results(5e6), traces=1)
    resumed.fetch()
    description = "3e+06 at update 3; the first loss was 1"
    assert tagged == [{"loss.exploded": description}]
    printed = capsys.readouterr().err
    assert printed.count(f"the loss has exploded: {description}\n") == 1


class SlowToTrace(layers.Layer):
    def call(self, x):
        time.sleep(tf.inside_function())  # 1 s
        return x


@pytest.mark.slow
def test_the_seconds_of_updates_are_without_those_of_tracing_them():
    performance = Run(middle=[SlowToTrace()]).rows.performance
    assert len(performance) == 4 * PER_EPOCH
    for row in performance:
        # Milliseconds, on a machine with nothing else to do.
        assert row["update_seconds"] < 1
        assert 1 <= row["compile_seconds"] == performance[0]["compile_seconds"]


@pytest.mark.slow
def test_an_update_that_is_traced_again_is_no_other_either():
    run = Run(middle=[SlowToTrace()], fit=False)
    trainer = run.trainer
    other = trainer.batches.map(lambda x, y: (tf.cast(x, tf.float64), y))
    for batches in (trainer.batches, other):
        iterator = iter(batches)
        for _ in range(3):
            trainer.record(trainer.update_once(iterator))
    trainer.recorder.finish()
    assert all(row["update_seconds"] < 1 for row in run.rows.performance)
    assert run.rows.performance[-1]["compile_seconds"] >= 2


class TimedRecorder:
    """A recorder of updates that end at given seconds."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        self.rows = Rows()
        clock = SimpleNamespace(perf_counter=lambda: self.now, time=lambda: 0.0)
        monkeypatch.setattr("pipeline.training.recorder.time", clock)
        plan = Plan(Batching(SIZE, SIZE, 1), EXAMPLES, 100)
        layout = ResultLayout(NAMES)
        self.recorder = Recorder(
            self.rows, plan, 1, lambda: 0, Progress(plan.updates), layout=layout
        )
        self.recorder.start_clock()

    def add(self, update, second, traces=1, **compiled):
        self.now = second
        self.recorder.add(update, results(1.0, **compiled), traces)

    def seconds(self):
        pairs = []
        for row in self.rows.performance:
            pairs.append((row.get("update_seconds"), row["compile_seconds"]))
        return pairs


def test_the_seconds_of_updates_are_without_those_of_compiling_new_shapes(monkeypatch):
    timed = TimedRecorder(monkeypatch)
    timed.add(2, second=10.0, shapes=7.0)
    assert timed.seconds() == []  # it is traced, and waits for the next one
    timed.add(3, second=12.0, shapes=7.0)
    assert timed.seconds() == [(2.0, 10.0)] * 2
    timed.add(4, second=17.0, shapes=8.0)
    assert timed.seconds()[2:] == [(None, 15.0)]
    monkeypatch.setattr("pipeline.training.recorder.FETCH_SECONDS", 100.0)
    timed.add(5, second=20.0, shapes=7.0)
    timed.add(6, second=60.0, shapes=9.0)
    timed.add(7, second=62.0, shapes=9.0)
    timed.add(8, second=92.0, shapes=9.0, traces=2)
    timed.add(9, second=93.0, shapes=9.0, traces=2)
    timed.recorder.fetch()
    # 3 + 2 + 1 seconds for three updates; 40 + 30 more to compile.
    assert timed.seconds()[3:] == [(2.0, 85.0)] * 5


def test_an_update_that_compiles_a_further_length_counts_as_compilation(monkeypatch):
    timed = TimedRecorder(monkeypatch)
    timed.add(1, second=10.0, lengths=0b001)
    timed.add(2, second=11.0, lengths=0b001)
    assert timed.seconds() == [(1.0, 10.0)] * 2
    timed.add(3, second=31.0, lengths=0b110)
    # All lengths are compiled now, though no update before had these.
    timed.add(4, second=33.0, lengths=0b101)
    timed.add(5, second=34.0, lengths=0b011)
    timed.add(6, second=35.0, lengths=0)
    assert timed.seconds()[2:] == [(None, 30.0), (2.0, 30.0), (1.0, 30.0), (1.0, 30.0)]


class FakeTime:
    """The clock of a recorder, which only moves when a test moves it."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        clock = SimpleNamespace(perf_counter=lambda: self.now, time=lambda: 0.0)
        monkeypatch.setattr("pipeline.training.recorder.time", clock)

    def pass_second(self) -> None:
        self.now += 1


def test_a_pause_leaves_out_its_own_time_and_nothing_before_it(monkeypatch):
    clock = FakeTime(monkeypatch)
    rows = Rows()
    recorder = recorder_of_a_short_last_batch(rows)
    clock.now = 3.0
    with recorder.paused():
        clock.now = 100.0
    clock.now = 102.0
    recorder.add(1, results(1.0), traces=1)
    with recorder.paused():
        clock.now = 200.0
    clock.now = 207.0
    recorder.add(2, results(1.0), traces=1)
    recorder.finish()
    first, second = rows.performance
    assert first["compile_seconds"] == 3 + 2
    assert second["update_seconds"] == 7


@pytest.mark.parametrize("validate", mostly_slow([True, False], [False]))
def test_the_seconds_of_updates_are_without_those_of_the_ends_of_epochs(
    monkeypatch, validate
):
    """Nor are those of tracing and compiling."""
    clock = FakeTime(monkeypatch)

    class Slow(keras.callbacks.Callback):
        def wait(self, *_, **__):
            clock.now += 100

        on_train_begin = on_epoch_begin = on_epoch_end = on_test_end = wait

    run = Run([Slow()], epochs=2, validate=validate, fit=False)
    run.trainer.stop = clock.pass_second  # called once an update, and in evaluations
    run.trainer.fit()
    seconds = [row.get("update_seconds") for row in run.rows.performance]
    assert seconds == [1.0] * 2 * PER_EPOCH
    assert run.rows.performance[-1]["compile_seconds"] == 0


@pytest.mark.slow
def test_compile_seconds_have_the_tracing_of_a_resumed_run_and_no_reading(
    monkeypatch, tmp_path
):
    clock = FakeTime(monkeypatch)

    class TakesSevenSeconds(layers.Layer):
        def call(self, x):
            if tf.inside_function():
                clock.now += 7
            return x

    def slowed(function):
        def slow(*arguments):
            clock.now += 100
            return function(*arguments)

        return slow

    def run():
        keras.utils.clear_session(free_memory=False)  # The names begin anew.
        run = Run(middle=[TakesSevenSeconds()], validate=False, fit=False)
        plan = run.trainer.recorder.plan
        run.trainer.checkpoints = Checkpoints(tmp_path, "epoch", plan)
        run.trainer.stop = clock.pass_second
        return run

    whole = run()
    whole.trainer.fit()
    whole.trainer.checkpoints.wait()
    assert whole.rows.performance[-1]["compile_seconds"] == 7

    for name in ("read", "restore_normalization", "restore"):
        function = getattr(snapshot, name)
        monkeypatch.setattr(snapshot, name, slowed(function))
    resumed = run()
    resumed.trainer.fit(files.at(tmp_path, 3 * PER_EPOCH))
    assert [update for update, _ in resumed.rows.updates] == [16, 17, 18, 19, 20]
    assert resumed.rows.performance[-1]["compile_seconds"] == 7
    assert resumed.rows.performance[-1]["update_seconds"] == 1


def test_an_interrupt_while_rows_are_written_loses_and_doubles_none():
    rows = CtrlC()
    interrupted = recorder(rows, [0.5] * 6)
    with pytest.raises(KeyboardInterrupt):
        interrupted.fetch()
    interrupted.fetch()  # as the end of the run does
    assert [update for update, _ in rows.updates] == list(range(1, 8))


def test_tokens_are_logged_by_the_second_and_not_as_a_result():
    rows = Rows()
    plan = Plan(Batching(SIZE, SIZE, 1), EXAMPLES, 4)
    layout = ResultLayout(NAMES)
    recorder = Recorder(rows, plan, 1, lambda: 0, Progress(4), layout=layout)
    for update, tokens in ((1, 5), (2, 2**24 + 1), (3, 7), (4, 1)):
        recorder.add(update, results(1.0, tokens=tokens), traces=1)
    recorder.finish()
    assert [update for update, _ in rows.updates] == [1, 2, 3, 4]
    assert all("tokens" not in results for _, results in rows.updates)
    # One division and one product. The first update is traced, and its row comes with
    # the second one's; the others are a group.
    expected = [2**24 + 1, 2**24 + 1, (7 + 1) / 2, (7 + 1) / 2]
    assert tokens_of(rows) == pytest.approx(expected, rel=1e-14)


def tokens_of(rows: Rows) -> list[float]:
    tokens = []
    for row in rows.performance:
        tokens.append(row["tokens_per_second"] * row["update_seconds"])
    return tokens


@pytest.mark.slow
@pytest.mark.parametrize("micro_batch_size", [8, 1])
def test_the_tokens_of_a_training_are_those_of_its_examples(micro_batch_size):
    rows = Run(
        micro_batch_size=micro_batch_size,
        tokens=lambda batch: tf.reduce_sum(tf.shape(batch[0])),
    ).rows
    counted = tokens_of(rows)
    assert sum(counted) == pytest.approx(len(counted) * (SIZE + 3), rel=1e-13)
    assert all("tokens" not in results for _, results in rows.updates)


@pytest.mark.slow
def test_what_is_not_finite_ends_the_rows_with_its_own():
    rows = Rows()
    diverged = recorder(rows, [0.5, float("nan"), 0.5])
    with pytest.raises(NonFiniteError, match="loss=nan at update 3"):
        diverged.fetch()
    assert [update for update, _ in rows.updates] == [1, 2, 3]


def recorder_of_a_short_last_batch(rows):
    """Return a recorder of two epochs of 20 examples: updates of 8, 8 and 4 each."""
    plan = Plan(Batching(SIZE, SIZE, 1), examples=20, updates=6)
    progress = Progress(plan.updates, shown=False)
    layout = ResultLayout(NAMES)
    recorder = Recorder(rows, plan, 1, lambda: 0, progress, layout=layout)
    recorder.start_clock()
    return recorder


def test_the_means_of_an_epoch_are_of_its_own_examples():
    recorder = recorder_of_a_short_last_batch(Rows())
    means = []
    for update, loss in enumerate([1.0, 2.0, 6.0, 10.0, 20.0, 60.0], start=1):
        recorder.add(update, results(loss), traces=1)
        if update % 3 == 0:
            recorder.fetch()
            means.append(recorder.epoch_means()["loss"])
    # (8·1 + 8·2 + 4·6) / 20, and ten times that
    assert means == [2.4, 24.0]


def test_an_epoch_has_its_own_means_though_those_before_were_not_read():
    recorder = recorder_of_a_short_last_batch(Rows())
    for update, loss in enumerate([1.0, 2.0, 6.0, 10.0, 20.0, 60.0], start=1):
        recorder.add(update, results(loss), traces=1)
    recorder.fetch()
    assert recorder.epoch_means()["loss"] == 24.0
    assert recorder.epoch_means()["loss"] == 24.0  # reading them changes nothing


def test_a_result_that_some_updates_lack_has_the_mean_of_the_others():
    """The noise scale is missing until its first measurement."""
    recorder = recorder_of_a_short_last_batch(Rows())
    recorder.layout.names = (*NAMES, "gradient_variance", "gradient_square")
    for update, variance in enumerate([math.nan, 8.0, math.nan], start=1):
        recorder.add(update, results(1.0, noise=(variance, 2.0)), traces=1)
    recorder.fetch()
    means = recorder.epoch_means()
    assert means["gradient_variance"] == 8.0
    assert means["gradient_squared_norm"] == 2.0
    assert means["gradient_noise_scale"] == 4.0
    assert means["loss"] == 1.0


def test_an_epoch_ends_with_the_number_of_skipped_updates_not_their_mean():
    recorder = recorder_of_a_short_last_batch(Rows())
    recorder.skips = True
    for update, norm in enumerate([math.inf, math.inf, 1.0], start=1):
        recorder.add(update, results(1.0, norm=norm), traces=1)
    recorder.fetch()
    assert recorder.epoch_means()["skipped_updates"] == 2


def test_the_means_of_an_epoch_go_on_from_an_older_checkpoint():
    """It has one number of examples for all results."""
    before = recorder_of_a_short_last_batch(Rows())
    before.add(1, results(1.0), traces=1)
    before.fetch()
    older = before.get_state() | {"epoch_examples": 8}

    recorder = recorder_of_a_short_last_batch(Rows())
    recorder.set_state(older)
    recorder.add(2, results(2.0), traces=1)
    recorder.add(3, results(6.0), traces=1)
    recorder.fetch()
    assert recorder.epoch_means()["loss"] == 2.4


def test_the_speed_counts_the_examples_of_a_smaller_update(monkeypatch):
    now = [0.0]
    rows = Rows()
    clock = SimpleNamespace(perf_counter=lambda: now[0], time=lambda: 0.0)
    monkeypatch.setattr("pipeline.training.recorder.time", clock)
    recorder = recorder_of_a_short_last_batch(rows)
    for update, second in [(1, 10.0), (2, 11.0), (3, 12.0)]:
        now[0] = second
        recorder.add(update, results(1.0), traces=1)
    # The first update was traced, and the second one fetched with it. The third one has
    # 4 examples, in a second.
    assert [row.get("examples_per_second") for row in rows.performance] == [8, 8, 4]

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
from pipeline.config.plan import Plan
from pipeline.config.sizes import Batching
from pipeline.training.evaluator import Evaluations, SplitEvaluator
from pipeline.training.loop import Interrupted, Trainer
from pipeline.training.progress import Progress
from pipeline.training.recorder import NonFiniteError, Recorder

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
        recorder = Recorder(
            self.rows, plan, log_every, lambda: 0, Progress(plan.updates), tokens=tokens
        )
        self.evaluate = SplitEvaluator(
            Evaluation(self.model, loss, SIZE), through(examples.batch(SIZE))
        )
        evaluate = self.evaluate if validate else None
        self.trainer = Trainer(
            Update(self.model, loss, optimizer, micro_batch_size),
            through(examples.batch(SIZE)).repeat(),
            recorder,
            evaluations=Evaluations(evaluate, every=evaluate_every),
            callbacks={str(i): callback for i, callback in enumerate(callbacks)},
            stop=stop,
        )
        self.loss = self.trainer.fit() if fit else None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("evaluate_every", "use_ema"), [("epoch", False), (100, True), (2, True)]
)
def test_a_stop_at_the_end_of_an_epoch_is_an_end_like_any_other(
    evaluate_every, use_ema
):
    stopped = Run([StopAt(1)], evaluate_every=evaluate_every, use_ema=use_ema)
    whole = Run(epochs=2, evaluate_every=evaluate_every, use_ema=use_ema)
    assert stopped.rows.updates == whole.rows.updates
    # Each step is there once, the last one of the final weights.
    assert stopped.rows.validations == whole.rows.validations
    assert stopped.rows.validations[-1] == (2 * PER_EPOCH, {"loss": stopped.loss})
    pairs = zip(stopped.model.get_weights(), whole.model.get_weights(), strict=True)
    for after_stop, of_whole in pairs:
        np.testing.assert_array_equal(after_stop, of_whole)
    assert stopped.evaluate()["loss"] == stopped.loss


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


@pytest.mark.parametrize(("epochs", "stop"), [(2, []), (4, [StopAt(1)])])
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
        trainer.evaluate()
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
    with pytest.raises(Interrupted):
        trainer.validate()
    assert trainer.validate(pending=False)["loss"] > 0


class CtrlC(Rows):
    """Ctrl-C while the rows of a group are written."""

    def update(self, update, results, performance, at) -> None:
        super().update(update, results, performance, at)
        if update == 3:
            raise KeyboardInterrupt


def results(loss):
    return tf.constant([loss, 1.0, 0.1, 0.0], tf.float64)


def recorder(rows: Rows, losses: list[float]) -> Recorder:
    """Return a recorder with the results of these updates still on the device."""
    plan = Plan(Batching(SIZE, SIZE, 1), EXAMPLES, len(losses) + 1)
    recorder = Recorder(rows, plan, 1, lambda: 0, Progress(plan.updates), names=NAMES)
    recorder.add(1, results(1.0), traces=1)
    for update, loss in enumerate(losses, start=2):
        recorder.add(update, results(loss), traces=1)
    return recorder


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


def test_the_seconds_of_updates_are_without_those_of_compiling_new_shapes(monkeypatch):
    now = [0.0]
    rows = Rows()
    clock = SimpleNamespace(perf_counter=lambda: now[0], time=lambda: 0.0)
    monkeypatch.setattr("pipeline.training.recorder.time", clock)
    plan = Plan(Batching(SIZE, SIZE, 1), EXAMPLES, 100)
    recorder = Recorder(rows, plan, 1, lambda: 0, Progress(plan.updates), names=NAMES)
    recorder.restart_clock()

    def add(update, second, shapes, traces=1):
        now[0] = second
        row = tf.constant([1.0, 1.0, 0.1, shapes], tf.float64)
        recorder.add(update, row, traces)

    def seconds():
        pairs = []
        for row in rows.performance:
            pairs.append((row.get("update_seconds"), row["compile_seconds"]))
        return pairs

    add(2, second=10.0, shapes=7.0)
    assert seconds() == []  # it is traced, and waits for the next one
    add(3, second=12.0, shapes=7.0)
    assert seconds() == [(2.0, 10.0)] * 2
    add(4, second=17.0, shapes=8.0)
    assert seconds()[2:] == [(None, 15.0)]
    monkeypatch.setattr("pipeline.training.recorder.FETCH_SECONDS", 100.0)
    add(5, second=20.0, shapes=7.0)
    add(6, second=60.0, shapes=9.0)
    add(7, second=62.0, shapes=9.0)
    add(8, second=92.0, shapes=9.0, traces=2)
    add(9, second=93.0, shapes=9.0, traces=2)
    recorder.fetch()
    # 3 + 2 + 1 seconds for three updates; 40 + 30 more to compile.
    assert seconds()[3:] == [(2.0, 85.0)] * 5


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
    names = (*NAMES, "tokens")
    recorder = Recorder(rows, plan, 1, lambda: 0, Progress(4), names=names)
    for update, tokens in ((1, 5), (2, 2**24 + 1), (3, 7), (4, 1)):
        row = tf.constant([1.0, 1.0, 0.1, tokens, 0.0], tf.float64)
        recorder.add(update, row, traces=1)
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
    recorder = Recorder(rows, plan, 1, lambda: 0, progress, names=NAMES)
    recorder.restart_clock()
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

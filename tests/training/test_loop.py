"""The loop: what is logged and evaluated where a run ends early, and what callbacks cost."""

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
from pipeline.training.evaluator import Evaluations, Evaluator
from pipeline.training.loop import Interrupted, Trainer
from pipeline.training.progress import Progress
from pipeline.training.recorder import NonFiniteError, Recorder

EXAMPLES, SIZE = 40, 8
PER_EPOCH = EXAMPLES // SIZE


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

    def trained(self, updates, stopped_by, best) -> None:
        self.end = updates, stopped_by, None if best is None else best.row()


class StopAt(keras.callbacks.Callback):
    """Ends the run where the epoch `epoch`, which counts from 0, ends: as EarlyStopping does."""

    def __init__(self, epoch: int):
        super().__init__()
        self.epoch = epoch

    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = epoch >= self.epoch


class Run:
    """A linear model on 40 examples, 5 updates an epoch; `rows` and `model` are left."""

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
        self.evaluate = Evaluator(
            Evaluation(self.model, loss, SIZE), through(examples.batch(SIZE))
        )
        self.trainer = Trainer(
            Update(self.model, loss, optimizer, micro_batch_size),
            through(examples.batch(SIZE)).repeat(),
            recorder,
            evaluations=Evaluations(
                self.evaluate if validate else None, every=evaluate_every
            ),
            callbacks={
                str(number): callback for number, callback in enumerate(callbacks)
            },
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
    assert (
        stopped.rows.validations == whole.rows.validations
    )  # each step once, the last one of the final weights
    assert stopped.rows.validations[-1] == (2 * PER_EPOCH, {"loss": stopped.loss})
    for one, two in zip(
        stopped.model.get_weights(), whole.model.get_weights(), strict=True
    ):
        np.testing.assert_array_equal(one, two)
    assert stopped.evaluate()["loss"] == stopped.loss


@pytest.mark.slow
def test_every_validation_is_of_the_averaged_weights():
    """Each row is what a run that ended there shows as its last; the training goes on from the weights themselves."""
    whole = Run(use_ema=True)
    ended = [Run(epochs=epochs, use_ema=True).rows.validations[-1] for epochs in (1, 4)]
    assert [whole.rows.validations[0], whole.rows.validations[-1]] == ended
    assert (
        whole.rows.validations[0] != Run(epochs=1).rows.validations[0]
    )  # of the weights themselves
    assert whole.rows.updates == Run().rows.updates


@pytest.mark.slow
def test_results_are_copied_to_the_host_in_groups(monkeypatch):
    """Each copy waits for the device: there is one in so many updates, and none by anything else of the loop."""
    monkeypatch.setattr("pipeline.training.recorder.FETCH_SECONDS", math.inf)
    monkeypatch.setattr("pipeline.training.recorder.FETCH_UPDATES", 10)
    copies: list[str] = []
    kind = type(tf.constant(0))
    for name in ("numpy", "__array__", "__float__", "__int__", "__bool__", "__index__"):
        monkeypatch.setattr(
            kind, name, _counted(getattr(kind, name), copies, name), raising=True
        )

    def copied(epochs: int) -> int:
        run = Run(epochs=epochs, log_every=10, validate=False, fit=False)
        copies.clear()
        run.trainer.fit()
        return len(copies)

    once = copied(2)
    assert [copied(2 + 2 * more) - once for more in (1, 2, 5)] == [
        1,
        2,
        5,
    ]  # of 10 updates each


def _counted(method, copies, name):
    def counted(self, *given, **more):
        copies.append(name)
        return method(self, *given, **more)

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
    lookers = [
        keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: seen.append((batch, logs["loss"]))
        ),
        StopAt(0),
    ]
    rows = Run(lookers).rows
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
        assert (trainer.done, trainer.pending) == (update, True)
        trainer.evaluate()
        assert (trainer.pending, bool(trainer.validation)) == (
            False,
            update == PER_EPOCH,
        )
    assert trainer.ended
    assert run.rows.validations == Run(epochs=1).rows.validations


@pytest.mark.slow
def test_only_who_asks_for_it_interrupts_the_run():
    """It ends with the reason that was given; the same exception out of a callback is an error."""
    rows, reason = [Rows(), Rows()], KeyboardInterrupt()

    def raises(epoch, logs):
        raise reason

    with pytest.raises(KeyboardInterrupt) as asked:
        Run(rows=rows[0], stop=lambda: reason)
    with pytest.raises(KeyboardInterrupt):
        Run([keras.callbacks.LambdaCallback(on_epoch_end=raises)], rows=rows[1])
    assert asked.value is reason
    assert rows[0].end == (1, None, None)
    assert not hasattr(rows[1], "end")


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


def recorder(rows: Rows, losses: list[float]) -> Recorder:
    """With the results of these updates still on the device."""
    plan = Plan(Batching(SIZE, SIZE, 1), EXAMPLES, len(losses) + 1)
    made = Recorder(
        rows,
        plan,
        1,
        lambda: 0,
        Progress(plan.updates),
        names=("loss", "gradient_norm", "learning_rate"),
    )
    made.add(1, tf.constant([1.0, 1.0, 0.1, 0.0], tf.float64), traces=1)
    for update, loss in enumerate(losses, start=2):
        made.add(update, tf.constant([loss, 1.0, 0.1, 0.0], tf.float64), traces=1)
    return made


class SlowToTrace(layers.Layer):
    def call(self, x):
        time.sleep(tf.inside_function())  # 1 s
        return x


@pytest.mark.slow
def test_the_seconds_of_updates_are_without_those_of_tracing_them():
    performance = Run(middle=[SlowToTrace()]).rows.performance
    assert len(performance) == 4 * PER_EPOCH
    assert all(
        each["update_seconds"] < 1 for each in performance
    )  # milliseconds, on a machine with nothing else to do
    assert all(
        1 <= each["compile_seconds"] == performance[0]["compile_seconds"]
        for each in performance
    )


@pytest.mark.slow
def test_an_update_that_is_traced_again_is_no_other_either():
    trainer = (run := Run(middle=[SlowToTrace()], fit=False)).trainer
    other = trainer.batches.map(lambda x, y: (tf.cast(x, tf.float64), y))
    for batches in (trainer.batches, other):
        iterator = iter(batches)
        for _ in range(3):
            trainer.record(trainer.update_once(iterator))
    trainer.recorder.finish()
    assert all(each["update_seconds"] < 1 for each in run.rows.performance)
    assert run.rows.performance[-1]["compile_seconds"] >= 2


def test_the_seconds_of_updates_are_without_those_of_compiling_new_shapes(monkeypatch):
    now, rows = [0.0], Rows()
    clock = SimpleNamespace(perf_counter=lambda: now[0], time=lambda: 0.0)
    monkeypatch.setattr("pipeline.training.recorder.time", clock)
    names, plan = (
        ("loss", "gradient_norm", "learning_rate"),
        Plan(Batching(SIZE, SIZE, 1), EXAMPLES, 100),
    )
    kept = Recorder(rows, plan, 1, lambda: 0, Progress(plan.updates), names=names)
    kept.restart_clock()

    def add(update, at, shapes, traces=1):
        now[0] = at
        kept.add(update, tf.constant([1.0, 1.0, 0.1, shapes], tf.float64), traces)

    def seconds():
        return [
            (each.get("update_seconds"), each["compile_seconds"])
            for each in rows.performance
        ]

    add(2, at=10.0, shapes=7.0)
    assert seconds() == []  # it is traced, and waits for the next one
    add(3, at=12.0, shapes=7.0)
    assert seconds() == [(2.0, 10.0)] * 2
    add(4, at=17.0, shapes=8.0)
    assert seconds()[2:] == [(None, 15.0)]
    monkeypatch.setattr("pipeline.training.recorder.FETCH_SECONDS", 100.0)
    for update, at, shapes, traces in (
        (5, 20.0, 7.0, 1),
        (6, 60.0, 9.0, 1),
        (7, 62.0, 9.0, 1),
        (8, 92.0, 9.0, 2),
    ):
        add(update, at, shapes, traces)
    add(9, at=93.0, shapes=9.0, traces=2)
    kept.fetch()
    assert (
        seconds()[3:] == [(2.0, 85.0)] * 5
    )  # 3 + 2 + 1 seconds for three updates; 40 + 30 more to compile


def test_an_interrupt_while_rows_are_written_loses_and_doubles_none():
    rows = CtrlC()
    kept = recorder(rows, [0.5] * 6)
    with pytest.raises(KeyboardInterrupt):
        kept.fetch()
    kept.fetch()  # as the end of the run does
    assert [update for update, _ in rows.updates] == list(range(1, 8))


def test_tokens_are_logged_by_the_second_and_not_as_a_result():
    rows = {}
    tracker = SimpleNamespace(
        update=lambda update, results, performance, at: rows.update(
            {update: (results, performance)}
        )
    )
    plan = Plan(Batching(SIZE, SIZE, 1), EXAMPLES, 4)
    made = Recorder(
        tracker,
        plan,
        1,
        lambda: 0,
        Progress(4),
        names=("loss", "gradient_norm", "learning_rate", "tokens"),
    )
    for update, tokens in ((1, 5), (2, 2**24 + 1), (3, 7), (4, 1)):
        made.add(
            update, tf.constant([1.0, 1.0, 0.1, tokens, 0.0], tf.float64), traces=1
        )
    made.finish()
    assert all("tokens" not in results for results, _ in rows.values())
    counted = {
        update: row["tokens_per_second"] * row["update_seconds"]
        for update, (_, row) in rows.items()
    }
    # One division and one product. The first update is traced, and told of with the second; the others are a group.
    assert [counted[update] for update in (1, 2)] == pytest.approx(
        [2**24 + 1] * 2, rel=1e-14
    )
    assert [counted[update] for update in (3, 4)] == pytest.approx(
        [(7 + 1) / 2] * 2, rel=1e-14
    )


@pytest.mark.slow
@pytest.mark.parametrize("micro_batch_size", [8, 1])
def test_the_tokens_of_a_training_are_those_of_its_examples(micro_batch_size):
    rows = Run(
        micro_batch_size=micro_batch_size,
        tokens=lambda batch: tf.reduce_sum(tf.shape(batch[0])),
    ).rows
    counted = [
        row["tokens_per_second"] * row["update_seconds"] for row in rows.performance
    ]
    assert sum(counted) == pytest.approx(len(counted) * (SIZE + 3), rel=1e-13)
    assert all("tokens" not in results for _, results in rows.updates)


@pytest.mark.slow
def test_what_is_not_finite_ends_the_rows_with_its_own():
    rows = Rows()
    kept = recorder(rows, [0.5, float("nan"), 0.5])
    with pytest.raises(NonFiniteError, match="loss=nan at update 3"):
        kept.fetch()
    assert [update for update, _ in rows.updates] == [1, 2, 3]


def recorder_of_a_short_last_batch(rows):
    """A recorder of two epochs of 20 examples: updates of 8, 8 and 4 each."""
    plan = Plan(Batching(SIZE, SIZE, 1), examples=20, updates=6)
    names = ("loss", "gradient_norm", "learning_rate")
    progress = Progress(plan.updates, shown=False)
    recorder = Recorder(rows, plan, 1, lambda: 0, progress, names=names)
    recorder.restart_clock()
    return recorder


def results(loss):
    return tf.constant([loss, 1.0, 0.1, 0.0], tf.float64)


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
    for update, at in [(1, 10.0), (2, 11.0), (3, 12.0)]:
        now[0] = at
        recorder.add(update, results(1.0), traces=1)
    # The first update was traced, and the second one fetched with it. The third one has
    # 4 examples, in a second.
    assert [row.get("examples_per_second") for row in rows.performance] == [8, 8, 4]

"""One run, from a composed config to a closed run in MLflow."""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from pipeline import config as configuration
from pipeline import imports
from pipeline.journal import Journal

if TYPE_CHECKING:
    from pipeline.tracking import Tracker


class Terminated(BaseException):
    """SIGTERM arrived. Like KeyboardInterrupt no `except Exception` swallows it."""


def run(config: DictConfig, overrides: Sequence[str], run_dir: Path) -> float:
    """Trains what `config` says and records it.

    Args:
        config: composed; not yet checked.
        overrides: of the command line.
        run_dir: of this run; exists. It stays empty when the config is refused.

    Returns:
        The last loss, of the validation split where there is one: what a sweeper that searches makes small.

    Raises:
        ConfigError: the config is wrong; nothing was created.
    """
    settings = configuration.check(config, overrides)
    configuration.plain(config)  # an interpolation that leads nowhere is a config error as well
    journal = Journal(config.tracking.uri, config.tracking.experiment)  # opens the store while TensorFlow is imported
    try:
        prepared = _prepare(config, settings, journal, run_dir)
    except BaseException:
        journal.abandon()
        raise
    return _train(config, overrides, *prepared)


def _prepare(config: DictConfig, settings: configuration.Settings, journal: Journal, run_dir: Path) -> Any:
    """Everything that can still refuse the config; creates nothing."""
    # Keras imports them for its galleries, data frames and estimators: a third of what importing it takes.
    with _without_native_chatter(), imports.without("matplotlib", "pandas", "sklearn"):
        from pipeline import batching, dataset, hardware, model, objective, optimizer
        from pipeline.tracking import Tracker

        machine = hardware.setup(config.hardware, config.seed)
    data = dataset.load(config.dataset)
    plan = batching.plan(settings.batching, data.examples, settings.horizon, settings.length)
    optimizer.check(optimizer.build(config, plan.updates, plan.batching.effective_batch_size))
    with machine.strategy.scope():
        network = model.build(config.model, data)
        goal = objective.build(config.training)
        optimizing = optimizer.build(config, plan.updates, plan.batching.effective_batch_size)
        objective.check(goal, network, data, settings.batching.micro_batch_size)
        optimizing.build(network.trainable_variables)
        network.compile(optimizing, goal.loss)  # callbacks and the saved model look for it there
    journal.ready()
    return machine, data, plan, network, goal, network.optimizer, Tracker(journal, run_dir, plan)


def _train(
    config: DictConfig,
    overrides: Sequence[str],
    machine: Any,
    data: Any,
    plan: Any,
    network: Any,
    goal: Any,
    optimizing: Any,
    tracker: Tracker,
) -> float:
    from pipeline import dataset, hardware, model, training
    from pipeline.accumulation import Evaluation, Update
    from pipeline.progress import Progress

    size, micro = plan.batching.effective_batch_size, plan.batching.micro_batch_size
    batches = dataset.effective_batches(
        config.dataset, data, seed=config.seed, effective_batch_size=size, epochs=plan.epochs
    )
    update = Update(
        network,
        goal.loss,
        optimizing,
        micro,
        metrics=goal.metrics,
        strategy=machine.strategy,
        noise_every=config.tracking.noise_every if plan.batching.factor * plan.batching.replicas > 1 else 0,
        jit_compile=config.hardware.xla,
    )
    evaluate = None
    if data.validation is not None:
        evaluation = Evaluation(network, goal.loss, micro, metrics=goal.validation_metrics, strategy=machine.strategy)
        evaluate = training.evaluator(evaluation, dataset.in_order(data.validation, size))

    dependent = model.batch_dependent_layers(network)
    tracker.start(config, overrides, data, network, {"model.batch_dependent_layers": ", ".join(dependent) or "none"})
    say(f"{machine.description}; {plan}")
    say(f"run directory {tracker.run_dir}\nMLflow run {tracker.run_id} in {configuration.mask(config.tracking.uri)}")
    progress = Progress(plan.updates)
    recorder = training.Recorder(
        tracker,
        plan,
        config.tracking.log_every,
        lambda: hardware.peak_memory(machine),
        progress,
        skips=config.hardware.precision.name == "mixed_float16",
    )
    with _closing(tracker, recorder, progress):
        loss = training.train(
            network,
            batches,
            update,
            plan,
            recorder,
            evaluate=evaluate,
            evaluate_every=config.training.evaluate_every,
            callbacks=goal.callbacks,
        )
        progress.close()
        if config.tracking.log_model:
            _log_model(config.tracking.uri, tracker, network, data)
    say("open it with: pipeline ui" + (f" tracking.uri={_shown(config)}" if _shown(config) else ""))
    return loss


@contextmanager
def _closing(tracker: Tracker, recorder: Any, progress: Any) -> Iterator[None]:
    """Closes the run as FINISHED, FAILED or KILLED, with all that it had logged."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminate)
    status, failure = "FINISHED", None
    try:
        yield
    except BaseException as error:
        killed = isinstance(error, KeyboardInterrupt | Terminated)
        status = "KILLED" if killed else "FAILED"
        failure = "".join(traceback.format_exception_only(error)).strip()
        if killed:
            recorder.fetch()
        raise
    finally:
        progress.close()
        unshipped = tracker.end(status, failure)
        if unshipped:
            say(f"MLflow did not take everything ({unshipped}); the rest is in {tracker.run_dir / 'journal.jsonl'}")


def _log_model(uri: str, tracker: Tracker, network: Any, data: Any) -> None:
    from pipeline import dataset, tracking

    split = data.train if data.validation is None else data.validation
    example = next(iter(dataset.in_order(split, 4)))[0]
    try:
        if not hasattr(example, "numpy"):
            raise TypeError("an input that is not one dense tensor has no signature")
        tracking.log_model(uri, tracker.experiment_id, tracker.run_id, network, example.numpy())
    except Exception as error:  # the training is done and recorded: a model that cannot be saved does not undo it
        first = (str(error).splitlines() or [type(error).__name__])[0]
        tracker.journal.write({"tags": {"model.not_logged": first}})
        say(f"the model was not logged: {first}")


def _shown(config: DictConfig) -> str:
    uri: str = config.tracking.uri
    return "" if uri == "sqlite:///mlruns/mlflow.db" else configuration.mask(uri)


@contextmanager
def _without_native_chatter() -> Iterator[None]:
    """Holds back the notices that TensorFlow's libraries print when they are loaded; lets all else through.

    They come before any log level is read, so that no setting stops them.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            held.seek(0)
            for line in held.read().decode(errors="replace").splitlines():
                if not re.match(r"[IWE]\d{4} |\d{4}-\d\d-\d\d .*: [IWE] |WARNING: All log messages before absl", line):
                    say(line)


def _terminate(signum: int, frame: FrameType | None) -> None:
    raise Terminated("SIGTERM")


def say(text: str) -> None:
    """One or more lines for the person who started the run."""
    print(text, file=sys.stderr, flush=True)

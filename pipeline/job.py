"""One run, from a composed config to a closed run in MLflow."""

from __future__ import annotations

import importlib
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from pipeline import config as configuration
from pipeline import imports
from pipeline.errors import ConfigError, first_line, printable
from pipeline.masking import mask
from pipeline.tracking import provenance
from pipeline.tracking.journal import Journal

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

    from pipeline.accumulation import Update
    from pipeline.dataset import Data
    from pipeline.hardware import Hardware
    from pipeline.objective import Objective
    from pipeline.recorder import Recorder
    from pipeline.sizes import Plan
    from pipeline.tracking.tracker import Tracker


class Terminated(BaseException):
    """SIGTERM arrived. Like KeyboardInterrupt no `except Exception` swallows it."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        run_id: in MLflow.
        loss: the last one, of the validation split where there is one: what a sweeper that searches makes small.
    """

    run_id: str
    loss: float


@dataclass(frozen=True)
class _Parts:
    """All that a run is made of, in the order in which it is built.

    Attributes:
        recorded_data: what `provenance.dataset` says of `data`.
    """

    machine: Hardware
    data: Data
    recorded_data: dict[str, Any]
    plan: Plan
    batches: tf.data.Dataset
    model: keras.Model
    objective: Objective


def run(
    config: DictConfig,
    overrides: Sequence[str],
    run_dir: Path,
    *,
    tags: Mapping[str, str] = MappingProxyType({}),
    check_dataset: Callable[[dict[str, Any]], None] = lambda _: None,
) -> Outcome:
    """Train what `config` says and record it.

    Args:
        config: composed; not yet checked.
        overrides: of the command line.
        run_dir: of this run; exists. It stays empty when the config is refused.
        tags: of the run, beside its own.
        check_dataset: takes what `provenance.dataset` says of the data, and may refuse it.

    Raises:
        ConfigError: the config is wrong; nothing was created.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminate)
    settings = configuration.check(config, overrides)
    _check_fresh(run_dir, config)
    configuration.plain(config)  # an interpolation that leads nowhere is a config error as well
    journal = Journal(config.tracking.uri, config.tracking.experiment)  # opens the store while TensorFlow is imported
    try:
        parts = _prepare(config, settings, check_dataset)
        journal.ready()
    except BaseException:
        journal.abandon()
        raise
    from pipeline import model
    from pipeline.tracking.tracker import Tracker

    tracker = Tracker(journal, run_dir, parts.plan)
    recorder = _recorder(config, parts, tracker)
    dependent = {"model.batch_dependent_layers": ", ".join(model.batch_dependent_layers(parts.model)) or "none"}
    with _closing(tracker, recorder):
        tracker.start(config, overrides, parts.data, parts.recorded_data, parts.model, {**dependent, **tags})
        say(f"{parts.machine.description}; {parts.plan}")
        say(f"run directory {run_dir}\nMLflow run {tracker.run_id} in {mask(config.tracking.uri)}")
        recorder.restart_clock()
        loss = _train(config, parts, recorder)
        recorder.progress.close()
        if config.tracking.log_model:
            _log_model(config.tracking.uri, tracker, parts.model, parts.data)
    say("open it with: pipeline ui" + (f" tracking.uri={_shown(config)}" if _shown(config) else ""))
    return Outcome(tracker.run_id, loss)


def import_libraries() -> None:
    """Import TensorFlow and what else a run needs; its runtime is not started, so that the process can be forked."""
    # Keras imports them for its galleries, data frames and estimators: a third of what importing it takes.
    with imports.without("matplotlib", "pandas", "sklearn"):
        for name in ("dataset", "model", "objective", "optimizer", "training", "tracking.tracker"):
            importlib.import_module(f"pipeline.{name}")


def _check_fresh(run_dir: Path, config: DictConfig) -> None:
    """Refuse a run directory that holds a run: a second run in one journal would never be shipped."""
    if (run_dir / "journal.jsonl").exists():
        key = "hydra.run.dir" if config.tracking.sweep is None else "hydra.sweep.dir"
        raise ConfigError(key, "must be a folder without a run in it", str(run_dir))


def _prepare(
    config: DictConfig, settings: configuration.Settings, check_dataset: Callable[[dict[str, Any]], None]
) -> _Parts:
    """Build everything that can still refuse the config; create nothing."""
    with imports.without_chatter():
        import_libraries()
        from pipeline import dataset, hardware, sizes

        machine = hardware.setup(config.hardware, config.seed)
    data = dataset.load(config.dataset)
    with _reading(config, "dataset"):
        recorded_data = provenance.dataset(data)
    check_dataset(recorded_data)
    plan = sizes.plan(settings.batching, data.examples, settings.horizon, settings.length)
    batches = _batches(config, data, plan)
    with machine.strategy.scope():
        network, goal = _build(config, data, plan)
    return _Parts(machine, data, recorded_data, plan, batches, network, goal)


def _batches(config: DictConfig, data: Data, plan: Plan) -> tf.data.Dataset:
    from pipeline import batching

    size = plan.batching.effective_batch_size
    with _reading(config, "dataset" if config.dataset.get("augment") is None else "dataset.augment"):
        return batching.effective_batches(
            config.dataset, data, seed=config.seed, effective_batch_size=size, epochs=plan.epochs
        )


def _build(config: DictConfig, data: Data, plan: Plan) -> tuple[keras.Model, Objective]:
    """Return the model, compiled with its built optimizer, and the objective; all of them checked."""
    import keras

    from pipeline import model, objective, optimizer

    # Once more: TFDS draws while it prepares a dataset, and the run that does would start from other weights.
    keras.utils.set_random_seed(config.seed)
    network = model.build(config.model, data)
    goal = objective.build(config.training)
    stepping = optimizer.build(config, plan.updates, plan.batching.effective_batch_size)
    network.compile(stepping, goal.loss, metrics=goal.metrics)  # callbacks and the saved model look for it there
    objective.check(goal, network, data, plan.batching.micro_batch_size)
    stepping.build(network.trainable_variables)
    optimizer.check(stepping, network.trainable_variables)
    return network, goal


@contextmanager
def _reading(config: DictConfig, key: str) -> Iterator[None]:
    """Refuse what the config has at `key` where it raises: TensorFlow traces it, and runs it to read the data."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        rule = f"must give examples ({type(error).__name__}: {first_line(error)})"
        raise ConfigError(key, rule, OmegaConf.select(config, f"{key}._target_")) from error


def _recorder(config: DictConfig, parts: _Parts, tracker: Tracker) -> Recorder:
    from pipeline import hardware
    from pipeline.progress import Progress
    from pipeline.recorder import Recorder

    return Recorder(
        tracker,
        parts.plan,
        config.tracking.log_every,
        lambda: hardware.peak_memory(parts.machine),
        Progress(parts.plan.updates),
        skips=config.hardware.precision.name == "mixed_float16",
    )


def _train(config: DictConfig, parts: _Parts, recorder: Recorder) -> float:
    """Train to the end of the plan; return the last loss."""
    from pipeline import training

    return training.train(
        parts.model,
        parts.batches,
        _update(config, parts),
        parts.plan,
        recorder,
        evaluate=_evaluate(parts),
        evaluate_every=config.training.evaluate_every,
        callbacks=parts.objective.callbacks,
    )


def _update(config: DictConfig, parts: _Parts) -> Update:
    from pipeline.accumulation import Update

    batching = parts.plan.batching
    return Update(
        parts.model,
        parts.objective.loss,
        parts.model.optimizer,
        batching.micro_batch_size,
        metrics=parts.objective.metrics,
        strategy=parts.machine.strategy,
        noise_every=config.tracking.noise_every if batching.factor * batching.replicas > 1 else 0,
        jit_compile=config.hardware.xla,
    )


def _evaluate(parts: _Parts) -> Callable[[], dict[str, float]] | None:
    """Return what evaluates the validation split; None where there is no such split."""
    if parts.data.validation is None:
        return None
    from pipeline import batching, training
    from pipeline.accumulation import Evaluation

    goal, sizes = parts.objective, parts.plan.batching
    evaluation = Evaluation(
        parts.model,
        goal.loss,
        sizes.micro_batch_size,
        metrics=goal.validation_metrics,
        strategy=parts.machine.strategy,
    )
    return training.evaluator(evaluation, batching.in_order(parts.data.validation, sizes.effective_batch_size))


@contextmanager
def _closing(tracker: Tracker, recorder: Recorder) -> Iterator[None]:
    """Close the run as FINISHED, FAILED or KILLED, with all that it had logged; one that never began needs none."""
    from pipeline.recorder import NonFiniteError

    status, failure = "FINISHED", None
    try:
        yield
    except BaseException as error:
        killed = isinstance(error, KeyboardInterrupt | Terminated)
        status = "KILLED" if killed else "FAILED"
        failure = "".join(traceback.format_exception_only(error)).strip()
        if not isinstance(error, NonFiniteError):  # with which the rows end
            with suppress(Exception):  # no second failure, such as of a device that is gone, hides the first
                recorder.fetch()
        raise
    finally:
        recorder.progress.close()
        unshipped = tracker.end(status, failure) if tracker.run_id else None
        if unshipped:
            say(f"MLflow did not take everything ({unshipped}); the rest is in {tracker.run_dir / 'journal.jsonl'}")


def _log_model(uri: str, tracker: Tracker, network: Any, data: Any) -> None:
    import tensorflow as tf

    from pipeline import batching
    from pipeline.tracking.tracker import log_model

    split = data.train if data.validation is None else data.validation
    example = next(iter(batching.in_order(split, 4)))[0]
    try:
        if not all(map(tf.is_tensor, tf.nest.flatten(example))) or not isinstance(example, tf.Tensor | dict):
            raise TypeError("an input that is neither a dense tensor nor a dict of them has no signature")
        arrays = tf.nest.map_structure(lambda leaf: leaf.numpy(), example)
        log_model(uri, tracker.experiment_id, tracker.run_id, network, arrays)
    except Exception as error:  # the training is done and recorded: a model that cannot be saved does not undo it
        first = (str(error).splitlines() or [type(error).__name__])[0]
        tracker.journal.write({"tags": {"model.not_logged": mask(first)}})
        say(f"the model was not logged: {first}")


def _shown(config: DictConfig) -> str:
    uri: str = config.tracking.uri
    return "" if uri == "sqlite:///mlruns/mlflow.db" else mask(uri)


def _terminate(signum: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # one is enough: a second would interrupt the closing of the run
    raise Terminated("SIGTERM")


def say(text: str) -> None:
    """Print one or more lines for the person who started the run."""
    print(printable(mask(text), "\n"), file=sys.stderr, flush=True)

"""Builds the parts of a run for an evaluation, and loads the weights into its model."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.common import imports
from pipeline.config import compose, hydra_errors
from pipeline.config.plain import plain
from pipeline.config.resolve import RunSpec, resolve
from pipeline.evaluate.command_line import changes_data
from pipeline.evaluate.subject import Subject
from pipeline.launch import recorded_job
from pipeline.rerun.request import Request
from pipeline.tracking.model_registry import StoredModel
from pipeline.trust.gate import check_config

if TYPE_CHECKING:  # importing these takes seconds
    from pipeline.components.assembly import Parts


def spec_of(subject: Subject, request: Request) -> RunSpec:
    """Return the spec of the run with the overrides of the command line.

    Raises:
        ConfigError: the config is rejected.
    """
    overrides = request.overrides_of_record()
    with tempfile.TemporaryDirectory() as folder:
        record = recorded_job.recorded_file(
            subject.config, Path(folder), "record", request.own_folders
        )
        composed = compose.composed([*record, *overrides])
    if subject.gate is not None:
        # The links of the record are resolved only now.
        with hydra_errors.translated():
            check_config(plain(composed), subject.gate, imports=False)
    spec = resolve(composed, request.overrides)
    # Do not load the training split into memory: no update reads it.
    return spec.changed({"dataset.in_memory": False})


@contextmanager
def loaded(
    subject: Subject,
    request: Request,
    *,
    other_data: bool = False,
    labels_needed: bool = True,
) -> Iterator["Parts"]:
    """Yield the parts of the run, whose model has the weights of the subject.

    As in the evaluations of the run, the weights are the moving averages if the
    optimizer keeps some (`use_ema`).

    Args:
        subject: the run and its weights.
        request: the command line.
        other_data: whether the data may differ from those of the run, even if no
            override selects others.
        labels_needed: whether the loss is computed. If not, the data may have no
            labels.

    Raises:
        ConfigError: the config is rejected, the data are not those of the run, or the
            weights do not fit the model.
    """
    spec = spec_of(subject, request)
    with imports.without_chatter():
        from pipeline.checkpoints import model_archive, snapshot
        from pipeline.components import assembly
        from pipeline.training import evaluator

    def check_dataset(now: dict[str, Any]) -> None:
        if not other_data and not changes_data(request):
            subject.check_dataset(now)

    parts = assembly.assemble(
        spec, check_dataset, trains=False, labels_needed=labels_needed
    )
    subject.say_changed_code()
    updater = parts.update()
    weights = subject.weights
    if isinstance(weights, StoredModel):
        with tempfile.TemporaryDirectory() as folder:
            archive = weights.download(Path(folder), "RUN")
            model_archive.load_weights(parts.model, archive, "RUN", weights.name)
        yield parts  # a logged model has the averages already
        return
    saved = snapshot.read(weights)
    snapshot.restore_normalization(saved, updater)
    snapshot.restore_variables(saved, updater, _is_restored)
    with evaluator.averaged_weights(updater.optimizer, parts.model):
        yield parts


def _is_restored(name: str) -> bool:
    """Return whether a variable is restored: all but the learning rate are."""
    return not name.endswith("/learning_rate")

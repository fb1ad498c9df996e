"""`pipeline evaluate RUN`: the loss and the metrics of a checkpoint over splits."""

import argparse
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipeline.common.errors import (
    NOT_SHIPPED,
    ConfigError,
    Parser,
    first_line,
    say,
)
from pipeline.evaluate import command_line, loading, subject
from pipeline.evaluate.command_line import SPLITS
from pipeline.evaluate.split_checksum import checksum_of
from pipeline.evaluate.subject import Subject
from pipeline.tracking import evaluation_log
from pipeline.tracking.evaluation_log import Evaluation
from pipeline.tracking.foreign_store import ForeignStore, OwnStore
from pipeline.tracking.journal_file import Past
from pipeline.tracking.sync_run import sync_run

if TYPE_CHECKING:  # importing this takes seconds
    from pipeline.components.assembly import Parts

_NAME = re.compile(r"[A-Za-z0-9_-]{1,50}", re.ASCII)


def evaluate(arguments: Sequence[str]) -> int:
    """Evaluate a checkpoint of RUN, and log the results to the run.

    A run directory is trusted like your own files. The record of a run that is named by
    its ID passes the same checks as in `pipeline rerun`.
    """
    options = _parse(arguments)
    request = command_line.request_of(options)
    logs = not options.no_log
    if logs and options.name is None and command_line.changes_data(request):
        rule = "must be given if an override of dataset selects other data"
        raise ConfigError("--name", f"{rule}, unless --no-log is given")
    if logs and request.values.get("dataset.checksum") == "none":
        rule = "must be full for evaluations to be comparable, unless --no-log is given"
        raise ConfigError("dataset.checksum", rule, "none")
    is_named = options.name is not None or options.no_log
    other_data = is_named and bool(command_line.keys_of_data(request))
    with subject.found(request) as run:
        if logs:
            _check_ended(run)
        with loading.loaded(run, request, other_data=other_data) as parts:
            evaluations = _evaluate(options, run, parts)
            _print(run, evaluations, parts)
        uri = parts.spec.config.tracking.uri
        patience = parts.spec.config.tracking.patience
        if logs:
            return _log(run, evaluations, uri, patience)
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="pipeline evaluate", description=evaluate.__doc__, allow_abbrev=False
    )
    command_line.add_arguments(parser)
    parser.add_argument(
        "--split",
        action="append",
        metavar="SPLIT",
        help="validation, test, train, or the name of a set of dataset.validations; by "
        "default validation and test, if they exist",
    )
    parser.add_argument(
        "--name",
        metavar="NAME",
        help="log the results as eval/NAME/…, or eval/NAME-SPLIT/… for several splits",
    )
    parser.add_argument("--no-log", action="store_true", help="only print the results")
    options = parser.parse_intermixed_args(list(arguments))
    if options.name is not None and not _NAME.fullmatch(options.name):
        rule = "must consist of up to 50 letters, digits, _ and -"
        raise ConfigError("--name", rule, options.name)
    if options.name in SPLITS:
        rule = "must not be the name of a split of the run"
        raise ConfigError("--name", rule, options.name)
    return options


def _check_ended(run: Subject) -> None:
    """Reject a run that another process is training.

    Only that process may write the run's journal.
    """
    if run.run_dir is None:
        return
    try:
        Past.read(run.run_dir)
    except ConfigError as error:
        rule = f"{error.rule}: with --no-log, the results are only printed"
        raise ConfigError("RUN", rule, str(run.run_dir)) from error


def _evaluate(
    options: argparse.Namespace, run: Subject, parts: "Parts"
) -> dict[str, Evaluation]:
    """Return the evaluation of each split, by the split's name."""
    from pipeline.dataset.bad_example import errors_located
    from pipeline.training.evaluator import SplitEvaluator

    existing = command_line.split_keys(parts)
    names = options.split or [name for name in SPLITS[:2] if name in existing]
    names = list(dict.fromkeys(names))
    # Reject a wrong name before the first split is evaluated.
    keys = {name: command_line.split_key(parts, name) for name in names}

    evaluations = {}
    for split, key in keys.items():
        batches = parts.evaluation_batches(key)
        with errors_located(parts.data, parts.files):
            results = SplitEvaluator(parts.evaluation(), batches, split)()
        name = split
        if options.name is not None:
            name = options.name if len(names) == 1 else f"{options.name}-{split}"
        evaluations[key] = Evaluation(
            name, run.update, checksum_of(parts, key), results
        )
    if not evaluations:
        rule = "must have a validation or a test split: see --split"
        raise ConfigError("dataset", rule, list(parts.data.splits))
    return evaluations


def _print(run: Subject, evaluations: dict[str, Evaluation], parts: "Parts") -> None:
    """Print the results as a table, one row per split."""
    columns = list(next(iter(evaluations.values())).results)
    rows = [["", *columns, "examples"]]
    for split, evaluation in evaluations.items():
        values = [f"{evaluation.results[key]:.6g}" for key in columns]
        examples = parts.data.count(split)
        rows.append([evaluation.name, *values, str(examples or "")])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    lines = [f"{run.name} after update {run.update}"]
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        for cell, width in zip(row[1:], widths[1:], strict=True):
            cells.append(cell.rjust(width))
        lines.append("  ".join(cells).rstrip())
    say(*lines, to=sys.stdout, always=True)


def _log(
    run: Subject, evaluations: dict[str, Evaluation], uri: str, patience: float
) -> int:
    """Log the evaluations that the run does not have yet; return the exit status."""
    new = []
    for evaluation in evaluations.values():
        if evaluation.is_logged(run.tags):
            say(f"eval/{evaluation.name} is already logged after update {run.update}")
        else:
            new.append(evaluation)
    if not new:
        return 0
    if run.run_dir is None:
        status = _send(run, new, uri)
    else:
        evaluation_log.append(run.run_dir, new)
        status = sync_run(str(run.run_dir), OwnStore(uri), patience, named=True)
    if status == 0:
        for evaluation in new:
            say(
                f"run {run.name} has eval/{evaluation.name}/… after update {run.update}"
            )
    return status


def _send(run: Subject, evaluations: list[Evaluation], uri: str) -> int:
    try:
        evaluation_log.send(ForeignStore(uri).client(), run.run_id, evaluations)
    except Exception as error:
        say(f"the results are not in the store: {first_line(error)}")
        return NOT_SHIPPED
    return 0

"""`pipeline predict RUN --out FILE`: the outputs, label and loss of each example."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.common.errors import Parser, as_config_error, count, say
from pipeline.evaluate import command_line, loading, part_files, subject
from pipeline.evaluate.command_line import SPLITS
from pipeline.evaluate.part_files import PartFiles
from pipeline.evaluate.split_checksum import checksum_of
from pipeline.evaluate.subject import Subject

if TYPE_CHECKING:  # importing these takes seconds
    import tensorflow as tf

    from pipeline.components.assembly import Parts


def predict(arguments: Sequence[str]) -> int:
    """Write the outputs, the label and the loss of each example of a split of RUN.

    After an interruption, the same command continues the file. RUN is trusted as in
    `pipeline evaluate`.
    """
    options = _parse(arguments)
    request = command_line.request_of(options)
    part_files.check_free(options.out)
    with (
        subject.found(request) as run,
        loading.loaded(run, request, labels_needed=False) as parts,
    ):
        key = command_line.split_key(parts, options.split)
        identity = _identity(run, parts, key)
        with part_files.opened(options.out, identity) as files:
            if files.rows_done:
                say(f"continues after {count(files.rows_done, 'row')}")
            _write(parts, key, files)
            files.finish()
    say(
        f"{count(files.rows_done, 'row')} of the {options.split} split, "
        f"by {run.name} after update {run.update}, are in {options.out}"
    )
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="pipeline predict", description=predict.__doc__, allow_abbrev=False
    )
    command_line.add_arguments(parser)
    parser.add_argument(
        "--out",
        metavar="FILE",
        type=Path,
        required=True,
        help="the Parquet file to write; until it is complete, FILE.parts has its rows",
    )
    parser.add_argument(
        "--split",
        metavar="SPLIT",
        default=SPLITS[0],
        help="validation, test, train, or the name of a set of dataset.validations; by "
        "default validation",
    )
    return parser.parse_intermixed_args(list(arguments))


def _identity(run: Subject, parts: "Parts", split: str) -> dict[str, Any]:
    """Return what the rows of the file depend on."""
    return {
        "run": run.name,
        "update": run.update,
        "split": split,
        "checksum": checksum_of(parts, split),
        # A part begins and ends with a batch.
        "batch_size": parts.plan.batching.effective_batch_size,
        "precision": parts.spec.config.hardware.precision.name,
    }


def _with_and_without_padding(parts: "Parts", split: str) -> "tf.data.Dataset":
    """Return the batches of a split, each without padding and as the model gets it.

    The two are equal if `dataset.pad` is not set.
    """
    from pipeline.dataset import padding

    batches = parts.evaluation_batches(split, padded=False)
    assert batches is not None
    pad = parts.spec.dataset.get("pad")
    if pad is None:
        return batches.map(lambda *batch: (batch, batch))
    padder = padding.padder(pad, parts.data.splits[split].element_spec)
    return batches.map(lambda *batch: (batch, padder(*batch)))


def _write(parts: "Parts", split: str, files: PartFiles) -> None:
    """Predict the batches that the parts do not have yet, one after the other.

    Raises:
        ConfigError: the model has an output that is not a dense tensor.
    """
    import tensorflow as tf

    from pipeline.dataset.bad_example import errors_located
    from pipeline.evaluate import predicted_rows

    batches = _with_and_without_padding(parts, split)
    prediction = parts.prediction()
    predict_batch = tf.function(
        lambda batch: prediction(batch), [batches.element_spec[1]], autograph=False
    )
    with as_config_error("model", "must be able to predict", parts.model.name):
        traced = predict_batch.get_concrete_function().structured_outputs
    sequences = predicted_rows.sequences_among(traced.outputs)
    first = files.rows_done
    with errors_located(parts.data, parts.files):
        for batch, padded in batches.skip(files.batches_done):
            predicted = predict_batch(padded)
            outputs = predicted_rows.without_padding(
                predicted.outputs, batch, padded, sequences
            )
            table = predicted_rows.table_of(
                batch, predicted._replace(outputs=outputs), first
            )
            files.add(table)
            first += table.num_rows

"""The command `pipeline verify`: checks that accumulation equals the large batch."""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.common import imports, nvidia, secrets
from pipeline.common.errors import (
    ConfigError,
    Parser,
    as_config_error,
    count,
    described,
    exits_as_failures,
    say,
    say_id,
)
from pipeline.config import compose, plain, sizes
from pipeline.config.objective_nodes import METRIC_GROUPS, metrics_of
from pipeline.config.resolve import XLA, RunSpec, resolve
from pipeline.distributed import chief, worker
from pipeline.run.run import resolve_for_all
from pipeline.tracking.params import param_text

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from pipeline.accumulation import Update
    from pipeline.components.assembly import Parts
    from pipeline.verify.engine import Difference

COMPARE = "pipeline.verify.command.compare"
DIFFERENT = 3  # exit status
COARSE = 1e-2  # relative bound above which a comparison shows little
IN_FLOAT32 = 1e-6  # largest relative difference that float32 rounding may explain

_DESCRIPTION = (
    "Check, for a config, that accumulation equals the large batch; "
    "the overrides are those of `pipeline train`."
)
_SEEMS_FLOAT32 = (
    "it seems to compute in float32, although the comparison is in float64 (use "
    "self.dtype in the metric); everything else is equal within rounding, including "
    "the update of the weights"
)
_LARGEST_METRIC = 1e300  # replaces infinity, which a store may not accept


@dataclass(frozen=True)
class Comparison:
    """The differences for one batch, or for the evaluation, in one precision."""

    precision: str
    subject: str  # what is compared, such as "128 examples"
    findings: list[Difference]

    @property
    def title(self) -> str:
        """The precision and the subject of the comparison."""
        return f"{self.precision}, {self.subject}"


@dataclass(frozen=True)
class Certificate:
    """The result of `pipeline verify` for a config."""

    parts: Parts  # the parts of the run, in float64
    comparisons: list[Comparison]
    fault: str  # the cause of the difference; empty if the updates are equal
    quiet: list[str]  # layers whose noise was disabled
    left_out: list[str]  # keys of metrics that do not run in float64

    @property
    def verdict(self) -> str:
        """The result in words, as the end of the sentence that is printed."""
        if self.fault:
            return f"different; the cause is {self.fault}"
        return "equal within rounding"


def verify(arguments: Sequence[str]) -> int:
    """Check that accumulation equals the large batch for a config; print the verdict.

    The arguments are those of `pipeline train`, plus `--all` and `--log`. Return the
    exit status: 0 if the updates are equal within rounding, or else `DIFFERENT`. Only
    the chief compares: another worker returns 0.
    """
    options, overrides = _parse(arguments)
    composition = compose.composition([*overrides, "hardware.precision=float64"])
    with composition.as_job():
        return _verify(composition.config, overrides, options)


def compare(parts: Parts, *_: Any) -> None:
    """Take part in the chief's comparison, on another worker, and print nothing."""
    update = parts.update()
    _compare(parts, update, _training_batches(parts), _validation_batches(parts))


def _verify(
    config: DictConfig, overrides: Sequence[str], options: argparse.Namespace
) -> int:
    """Do what `verify` does, for a config in float64; return the exit status."""
    spec = resolve_for_all(config, overrides)
    _check(spec)
    if spec.workers is not None and not spec.workers.is_chief:
        worker.run(spec, COMPARE)
        return 0

    with imports.without_chatter():
        from pipeline.components import assembly  # noqa: F401
        from pipeline.verify import engine, layers  # noqa: F401

    certificate = _certify(spec, overrides)
    _print(certificate, options.all)
    if options.log:
        _log(certificate)
    if certificate.fault:
        return DIFFERENT
    return 0


def _parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = Parser(
        prog="pipeline verify", description=_DESCRIPTION, allow_abbrev=False
    )
    parser.add_argument(
        "--all", action="store_true", help="print the differences of each variable"
    )
    parser.add_argument("--log", action="store_true", help="log the result to MLflow")
    parser.add_argument(
        "--config-dir",
        "-cd",
        metavar="DIR",
        help="a folder with config groups of your own",
    )
    parser.add_argument(
        "--config-name", "-cn", metavar="NAME", help="name of your own config"
    )
    options, overrides = parser.parse_known_args(list(arguments))
    if options.config_name:
        overrides = ["--config-name", options.config_name, *overrides]
    if options.config_dir:
        overrides = ["--config-dir", options.config_dir, *overrides]
    return options, overrides


def _check(spec: RunSpec) -> None:
    if spec.searches:
        rule = "must be a number, because verify does not search for a size"
        size = spec.config.accumulation.micro_batch_size
        raise ConfigError(sizes.MICRO, rule, size)
    if spec.times_xla:
        rule = "must be true, false or auto, because verify does not time anything"
        raise ConfigError(XLA, rule, spec.config.hardware.xla)
    if spec.dataset.get("batched"):
        rule = (
            "must be false for verify, because the comparison would have to join the "
            "loader's batches into one"
        )
        raise ConfigError(sizes.BATCHED, rule, True)


def _certify(spec: RunSpec, overrides: Sequence[str]) -> Certificate:
    """Compare in float64 and, if the updates are equal, in float32.

    With several workers, compare only in float64.
    """
    with tempfile.TemporaryDirectory() as folder, chief.Chief(spec) as workers:
        workers.start(spec, Path(folder), COMPARE)
        spec = workers.gather(spec, Path(folder), None)
        with workers.as_worker_error(), exits_as_failures():
            parts, left_out = _assemble(spec, overrides)
            workers.reductions_ready = parts.devices.reductions_ready
            update = parts.update()
            batches = _training_batches(parts)
            comparisons, quiet = _compare(
                parts, update, batches, _validation_batches(parts)
            )

    fault = ""
    differing = _differing(comparisons)
    if differing:
        fault = _fault(parts, update, batches[0], differing)
    elif spec.workers is None:
        # Compare in float32, too, since some kernels are used only there.
        in_float32 = _compare_in_float32(overrides)
        comparisons = comparisons + in_float32
        if _differing(in_float32):
            fault = "the computation in float32, as the updates in float64 are equal"
    return Certificate(parts, comparisons, fault, quiet, left_out)


def _compare_in_float32(overrides: Sequence[str]) -> list[Comparison]:
    from pipeline.components import assembly

    composed = compose.composed([*overrides, "hardware.precision=float32"])
    parts = assembly.assemble(resolve(composed, overrides))
    update = parts.update()
    comparisons, _ = _compare(parts, update, _training_batches(parts)[:1], [])
    return comparisons


def _differing(comparisons: Sequence[Comparison]) -> list[Difference]:
    differing = []
    for comparison in comparisons:
        for finding in comparison.findings:
            if not finding.holds:
                differing.append(finding)
    return differing


def _training_batches(parts: Parts) -> list[Any]:
    """Return up to three effective batches of different sizes.

    They are the first batch of the largest stage, the first batch of the run, and a
    tail, which may be cut from the second batch.
    """
    from pipeline.accumulation import internals
    from pipeline.verify import engine

    plan = parts.plan
    first_two = list(parts.effective_batches().take(2))
    first = first_two[0]
    count = engine.examples(first)

    tail = first_two[-1]
    if engine.examples(tail) == count:  # a full batch: shorten it to a tail
        size = plan.examples % plan.batching.effective_batch_size or count
        tail = internals.slice_of(tail, 0, min(size, max(count - 1, 1)))

    batches = [first, tail]
    sizes_reached = [(0, 0)]
    for after, size in plan.changes:
        if after < plan.updates:
            sizes_reached.append((after, size))
    after_largest, _ = max(sizes_reached, key=lambda change: change[1])
    if after_largest:
        batches = [*parts.effective_batches(after_largest).take(1), *batches]

    by_size = {engine.examples(batch): batch for batch in batches}
    return list(by_size.values())


def _validation_batches(parts: Parts) -> list[Any]:
    """Return a list of one validation batch; it is empty without a validation split."""
    batches = parts.evaluation_batches()
    if batches is None:
        return []
    return list(batches.take(1))


def _compare(
    parts: Parts, update: Update, batches: Sequence[Any], validation: Sequence[Any]
) -> tuple[list[Comparison], list[str]]:
    """Return the comparisons, and the names of the layers whose noise was disabled."""
    from pipeline.verify import engine, layers

    precision = parts.spec.config.hardware.precision.name
    subjects = [count(engine.examples(batch), "example") for batch in batches]
    other_weights = len(batches) > 1
    if other_weights:
        subjects.append(f"{subjects[-1]}, other weights")

    rule = f"must be able to compute an update in {precision}, which verify uses"
    for variable in parts.model.trainable_variables:
        if variable.dtype != precision:
            rule += (
                f"; {variable.path} is in {variable.dtype}, by the dtype of its layer"
            )
            break
    comparisons = []
    with (
        layers.without_noise(parts.model, parts.forward.drawing_by_position) as quiet,
        as_config_error("model", rule, parts.model.name),
    ):
        results = engine.compare(update, batches, other_weights=other_weights)
        for subject, findings in zip(subjects, results, strict=True):
            comparisons.append(Comparison(precision, subject, findings))
        for batch in validation:
            findings = engine.compare_evaluation(parts.evaluation(), batch)
            comparisons.append(Comparison(precision, "evaluation", findings))
    return comparisons, quiet


def _fault(
    parts: Parts, update: Update, batch: Any, differing: Sequence[Difference]
) -> str:
    from pipeline.verify import engine, layers

    if all(finding.what.startswith("val/") for finding in differing):
        if any(finding.kind != "metric" for finding in differing):
            return "the evaluation"
        return f"the evaluation: {_differing_results(update, differing)}"

    cut = parts.plan.batching
    micro_batch_size = cut.micro_batch_size
    if cut.micro_batch_tokens is not None:
        micro_batch_size = 1  # the smallest that a cut by tokens may have
    with layers.without_noise(parts.model):
        culprit = layers.culprit(
            parts.model,
            update.objective,
            engine.whole_parts(update, batch),
            micro_batch_size,
            engine.unit(update),
        )
    if culprit:
        return culprit
    for finding in differing:
        if finding.kind == "state":
            return f"the state {finding.what}: {layers.STATE_CHANGES}"
    if all(finding.kind == "metric" for finding in differing):
        return _differing_results(update, differing)
    return "the update itself, not a layer or a loss"


def _differing_results(update: Update, differing: Sequence[Difference]) -> str:
    """Return the names of the metrics and per-output losses that differ, each once.

    If float32 rounding in metrics may be the only reason, the text says so.
    """
    descriptions = []
    for name in sorted({finding.bare_name for finding in differing}):
        if name in update.measured:
            metric = update.measured[name]
            descriptions.append(f"the metric {name} ({type(metric).__name__})")
        else:
            descriptions.append(name)
    causes = ", ".join(descriptions)

    of_metrics = all(finding.bare_name in update.measured for finding in differing)
    if of_metrics and all(finding.error <= IN_FLOAT32 for finding in differing):
        return f"{causes}: {_SEEMS_FLOAT32}"
    return causes


def _assemble(spec: RunSpec, overrides: Sequence[str]) -> tuple[Parts, list[str]]:
    """Build the parts of the run, without metrics that do not run in float64.

    Args:
        spec: the spec, in float64.
        overrides: the overrides on the command line, with the user's precision.

    Returns:
        The parts, and the keys of the metrics that were left out.

    Raises:
        ConfigError: something other than a metric does not run in float64, or the
            config is invalid in every precision. With several workers, also if a metric
            does not run in float64.
    """
    from pipeline.components import assembly

    left_out: list[str] = []
    while True:
        try:
            return assembly.assemble(spec, lambda _: None), left_out
        except ConfigError as error:
            if spec.workers is not None:
                raise  # a retry would have to be coordinated among the workers
            # Assemble in the user's precision: raise any error that occurs there, too.
            assembly.assemble(
                resolve(compose.composed(overrides), overrides), lambda _: None
            )
            remaining = _without_metric(spec, error.key)
            if remaining is None:
                cause = error.rule
                if error.__cause__:
                    cause = described(error.__cause__)
                rule = f"must run in float64, which verify uses ({cause})"
                raise ConfigError(error.key, rule) from error
            spec = remaining
            left_out.append(error.key)


def _without_metric(spec: RunSpec, key: str) -> RunSpec | None:
    """Return the spec without the metric at `key`, or None if `key` is not a metric."""
    for group in METRIC_GROUPS:
        for metric in metrics_of(spec.config.training, group):
            if metric.key != key:
                continue
            nodes = deepcopy(spec.resolved["training"][group])
            if metric.output is None:
                del nodes[metric.name]
            else:
                del nodes[metric.output][metric.name]
            # Remove an output that has no metrics left.
            nodes = {name: node for name, node in nodes.items() if node}
            return spec.changed({f"training.{group}": nodes})
    return None


@dataclass(frozen=True)
class _Row:
    """A row of the printed table."""

    where: str
    finding: Difference

    @property
    def label(self) -> str:
        return f"{self.finding.label} ({self.where})"


def _print(certificate: Certificate, every: bool) -> None:
    """Print the verdict, and the worst difference of each kind in each precision.

    If `every` is true, print the difference of each variable in each comparison.
    """
    parts = certificate.parts
    cut = parts.spec.largest
    how = (
        f"{count(cut.factor, 'micro-batch', 'micro-batches')} of {cut.micro_batch_size}"
    )
    if cut.micro_batch_tokens is not None:
        how = f"micro-batches of at most {count(cut.micro_batch_tokens, 'token')}"
    rows = _rows(certificate.comparisons, every)
    say(
        f"{parts.devices.description}; {cut}",
        f"an update in {how} and one of the whole batch are {certificate.verdict}",
        *_table(rows),
        *_remarks(certificate.comparisons),
        to=sys.stdout,
    )
    for name in certificate.quiet:
        say(
            f"not compared: the noise of {name}, which every micro-batch draws anew",
            to=sys.stdout,
        )
    for key in certificate.left_out:
        say(f"not compared: {key}, which does not run in float64", to=sys.stdout)


def _rows(comparisons: Sequence[Comparison], every: bool) -> list[_Row]:
    """Return the worst difference of each kind in each precision.

    If `every` is true, return the difference of each variable in each comparison.
    """
    rows: dict[tuple[str, str], _Row] = {}
    for comparison in comparisons:
        # Put differences without a finite bound last, since they prove nothing.
        findings = sorted(comparison.findings, key=lambda item: item.bound == math.inf)
        for finding in findings:
            if every:
                where = comparison.title
                group = finding.label
            else:
                where = comparison.precision
                group = finding.label.partition(" ")[0]
            row = rows.setdefault((where, group), _Row(where, finding))
            if _is_worse(finding, row.finding):
                rows[where, group] = _Row(where, finding)
    return list(rows.values())


def _is_worse(finding: Difference, other: Difference) -> bool:
    """Return whether `finding` is worse than `other`, relative to their bounds.

    A difference over its bound is worse than one within its bound. If `other` is over
    its bound, `finding` does not count as worse.
    """
    if not other.holds:
        return False
    return not finding.holds or (
        finding.error * other.bound > other.error * finding.bound
    )


def _table(rows: Sequence[_Row]) -> Iterator[str]:
    width = max(len(row.label) for row in rows)
    yield f"  {'':{width}}  {'apart':>8}  {'rounding':>8}"
    for row in rows:
        finding = row.finding
        remark = ""
        if not finding.holds:
            remark = "DIFFERENT"
        elif finding.bound == math.inf:
            remark = "proves nothing for these weights"
        elif finding.bound > COARSE:
            remark = "shows little: rounding alone may reach this bound"
        line = f"  {row.label:{width}}  {finding.error:8.1e}  {finding.bound:8.1e}"
        yield f"{line}  {remark}".rstrip()


def _remarks(comparisons: Sequence[Comparison]) -> Iterator[str]:
    """Yield lines that explain why rounding bounds are large."""
    in_float32 = any(comparison.precision == "float32" for comparison in comparisons)
    if in_float32 and nvidia.computes_in_tf32():
        yield (
            "float32 products are computed in TF32 here, so its rounding sets the "
            "bounds; hardware.tf32=false turns TF32 off"
        )


def _log(certificate: Certificate) -> None:
    """Log the certificate as an MLflow run, with status FAILED if updates differ."""
    from pipeline.tracking.store import Store

    spec = certificate.parts.spec
    tracking = spec.config.tracking
    store = Store(tracking.uri)
    client = store.client()
    run = client.create_run(
        store.experiment(tracking.experiment),
        run_name="verify",
        tags={"verify": certificate.verdict},
    )
    run_id = run.info.run_id
    status = "FAILED"
    try:
        for key, value in plain.leaves(spec.resolved).items():
            text = secrets.mask(str(value))
            client.log_param(run_id, key, param_text(text))
        apart = _largest_error_in_float64(certificate.comparisons)
        client.log_metric(run_id, "verify/apart", min(apart, _LARGEST_METRIC))
        client.log_text(run_id, _as_json(certificate.comparisons), "certificate.json")
        if not certificate.fault:
            status = "FINISHED"
    finally:
        client.set_terminated(run_id, status)
    say(f"MLflow run {run_id} in {secrets.mask(tracking.uri)}", to=sys.stdout)
    say_id(run_id)


def _largest_error_in_float64(comparisons: Sequence[Comparison]) -> float:
    errors = []
    for comparison in comparisons:
        if comparison.precision == "float64":
            errors += [finding.error for finding in comparison.findings]
    return max(errors)


def _as_json(comparisons: Sequence[Comparison]) -> str:
    entries = []
    for comparison in comparisons:
        entries.append([finding.as_json() for finding in comparison.findings])
    return json.dumps(entries, indent=1)

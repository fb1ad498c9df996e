"""The verb `pipeline verify`: whether accumulating equals the large batch, for this config."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from copy import deepcopy
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.common import imports
from pipeline.common.errors import ConfigError, Parser, described, refused, say
from pipeline.common.secrets import mask
from pipeline.config import sizes
from pipeline.config.objective_nodes import METRIC_GROUPS, metrics_of
from pipeline.config.plain import leaves
from pipeline.config.resolve import RunSpec, resolve
from pipeline.distributed import chief, worker
from pipeline.run.run import resolve_for_all

if TYPE_CHECKING:
    from pipeline.accumulation import Update
    from pipeline.components.assembly import Parts
    from pipeline.verify.engine import Finding

COMPARE = "pipeline.verify.command.compare"
DIFFERENT = 3  # exit status
COARSE = 1e-2  # relative: a comparison with a larger bound shows little


def verify(arguments: Sequence[str]) -> int:
    """Check, for a config, that accumulation equals the large batch; the arguments are those of `pipeline train`."""
    from pipeline.config import compose

    parser = Parser(prog="pipeline verify", description=verify.__doc__, allow_abbrev=False)
    parser.add_argument("--log", action="store_true", help="log the result to MLflow")
    options, given = parser.parse_known_args(list(arguments))
    spec = resolve_for_all(compose.composed([*given, "hardware.precision=float64"]), given)
    if spec.searches:
        size = spec.config.accumulation.micro_batch_size
        raise ConfigError(sizes.MICRO, "must be a number: what is verified is that cut, in float64", size)
    if spec.workers is not None and not spec.workers.is_chief:
        worker.run(spec, COMPARE)
        return 0
    with imports.without_chatter():
        from pipeline.verify import engine, layers

    cut = spec.batching
    with tempfile.TemporaryDirectory() as folder, chief.Chief(spec) as workers:
        workers.start(spec, Path(folder), COMPARE)
        spec = workers.gather(spec, Path(folder), None)
        with workers.as_worker_error():
            parts, left_out = _assembled(spec, given)
            workers.reductions_ready = parts.devices.reductions_ready
            say(f"{parts.devices.description}; {cut}", to=sys.stdout)
            for key in left_out:
                say(f"not compared, as it does not run in float64: {key}", to=sys.stdout)
            update = parts.update()
            show, validation = _shown(parts)
            compared, evaluated, quiet = _compared(parts, update, show, validation)
    if quiet:
        say(f"noise off, as every micro-batch draws its own: {', '.join(quiet)}", to=sys.stdout)
    equal_updates, holds = (all(each.holds for each in chain(*made)) for made in (compared, compared + evaluated))
    looked_at = parts.model, update.objective.loss, show[0], cut.micro_batch_size, engine.unit(update)
    with layers.without_noise(parts.model):
        why = "the evaluation" if equal_updates else layers.culprit(*looked_at)
    compared += evaluated
    for batch, findings in zip([*show, *validation], compared, strict=True):
        say(*_table(findings, engine.examples(batch)), to=sys.stdout)
    coarsest = max(finding.bound for finding in chain(*compared))
    if coarsest > COARSE:
        where = "as where a loss or a layer is in half precision"
        say(f"rounding alone may be {coarsest:.0e} here, {where}", to=sys.stdout)
    one_piece = f"{cut.factor} micro-batches of {cut.micro_batch_size}"
    verdict = "equal within rounding" if holds else f"different; at fault is {why}"
    say(f"an update by {one_piece} and one of the whole batch are {verdict}", to=sys.stdout)
    if options.log:
        _log(parts.spec, [[finding.as_json() for finding in findings] for findings in compared], holds, verdict)
    return 0 if holds else DIFFERENT


def compare(parts: Parts, *_: Any) -> None:
    """Compare as the chief does, and print nothing: the task of the other workers."""
    _compared(parts, parts.update(), *_shown(parts))


def _shown(parts: Parts) -> tuple[list[Any], list[Any]]:
    """Return an effective batch and a tail; and a batch of the validation split, if there is one."""
    from pipeline.verify import engine

    batch = next(iter(parts.effective_batches()))
    tail = engine.shortened(batch, parts.plan.batch_size(parts.plan.updates_per_epoch))
    batches = parts.evaluation_batches()
    validation = [] if batches is None else list(batches.take(1))
    return [*{engine.examples(batch): batch for batch in (batch, tail)}.values()], validation


def _compared(
    parts: Parts, update: Update, show: Sequence[Any], validation: Sequence[Any]
) -> tuple[list[list[Finding]], list[list[Finding]], list[str]]:
    """Return the findings of updates and of evaluations, and the layers whose noise was turned off."""
    from pipeline.verify import engine, layers

    computing = refused("model", "must compute an update in float64, in which it is verified", parts.model.name)
    with layers.without_noise(parts.model, parts.forward.placed) as quiet, computing:
        compared = engine.compare(update, show)
        evaluated = [engine.compare_evaluation(parts.evaluation(), batch) for batch in validation]
    return compared, evaluated, quiet


def _assembled(spec: RunSpec, given: Sequence[str]) -> tuple[Parts, list[str]]:
    """Return the parts without the metrics that do not run in float64, and the keys of these metrics.

    `spec` is in float64, the command line `given` in the user's precision. ConfigError names what else does not run.
    """
    from pipeline.components import assembly
    from pipeline.config import compose

    left_out: list[str] = []
    while True:
        try:
            return assembly.assemble(spec, lambda _: None), left_out
        except ConfigError as error:
            if spec.workers is not None:
                raise  # they would have to try again together
            own = resolve(compose.composed(given), given)
            for key in left_out:
                own = _without_metric(own, key) or own
            assembly.assemble(own, lambda _: None)  # raises errors that do not depend on the precision
            if (without := _without_metric(spec, error.key)) is not None:
                spec = without
                left_out.append(error.key)
                continue
            cause = described(error.__cause__) if error.__cause__ else error.rule
            raise ConfigError(error.key, f"must run in float64, in which it is verified ({cause})") from error


def _without_metric(spec: RunSpec, key: str) -> RunSpec | None:
    """Return the spec without the metric at `key`; None if there is no metric."""
    every = ((group, metric) for group in METRIC_GROUPS for metric in metrics_of(spec.config.training, group))
    group, metric = next((found for found in every if found[1].key == key), ("", None))
    if metric is None:
        return None
    nodes = deepcopy(spec.resolved["training"][group])
    of_output = nodes if metric.output is None else nodes[metric.output]
    del of_output[metric.name]
    if not of_output and metric.output is not None:
        del nodes[metric.output]
    return spec.changed({f"training.{group}": nodes})


def _table(findings: Sequence[Any], examples: int) -> list[str]:
    rows = [("", "apart", "rounding", "")]
    for found in findings:
        what = found.what if found.kind == "loss" else f"{found.kind} {found.what}"
        rows.append((what, f"{found.error:.1e}", f"{found.bound:.1e}", "" if found.holds else "DIFFERENT"))
    width = max(len(row[0]) for row in rows)
    lines = (f"  {what:{width}}  {apart:>8}  {bound:>8}  {verdict}".rstrip() for what, apart, bound, verdict in rows)
    return [f"{examples} examples", *lines]


def _log(spec: RunSpec, certificate: list[Any], holds: bool, verdict: str) -> None:
    """Log the certificate as a run of its own."""
    from pipeline.tracking.store import Store

    tracking = spec.config.tracking
    store = Store(tracking.uri)
    client = store.client()
    run = client.create_run(store.experiment(tracking.experiment), run_name="verify", tags={"verify": verdict})
    run_id, status = run.info.run_id, "FAILED"
    try:
        for key, value in leaves(spec.resolved).items():
            client.log_param(run_id, key, mask(str(value))[:6000])  # MLflow takes no more
        client.log_metric(run_id, "verify/apart", max(found["apart"] for found in chain(*certificate)))
        client.log_text(run_id, json.dumps(certificate, indent=1), "certificate.json")
        status = "FINISHED" if holds else "FAILED"
    finally:
        client.set_terminated(run_id, status)
    say(f"MLflow run {run_id} in {mask(tracking.uri)}", to=sys.stdout)

"""The verb `pipeline verify`: whether accumulating equals the large batch, for this config."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, open_dict

from pipeline.common import imports
from pipeline.common.errors import ConfigError, Parser, described, refused, say
from pipeline.common.secrets import mask
from pipeline.config import cluster, sizes
from pipeline.config import validate as configuration
from pipeline.config.cluster import Cluster
from pipeline.config.objective_nodes import METRIC_GROUPS, metrics_of
from pipeline.config.sizes import Batching
from pipeline.distributed import chief, worker

if TYPE_CHECKING:
    from pipeline.accumulation import Update
    from pipeline.components.assembly import Parts
    from pipeline.verify.engine import Finding

COMPARE = "pipeline.verify.command.compare"
DIFFERENT = 3  # exit status
COARSE = 1e-2  # relative: a bound above it shows little


def verify(arguments: Sequence[str]) -> int:
    """Prove, for a config, that accumulating equals the large batch; all else is as for `pipeline train`."""
    from pipeline.config import compose

    parser = Parser(prog="pipeline verify", description=verify.__doc__, allow_abbrev=False)
    parser.add_argument("--log", action="store_true", help="keep the certificate in MLflow")
    options, given = parser.parse_known_args(list(arguments))
    config = compose.composed([*given, "hardware.precision=float64"])
    cut = chief.checked(config, given)
    if (size := config.accumulation.micro_batch_size) in sizes.SEARCHED:
        raise ConfigError(sizes.MICRO, "must be a number: what is verified is that cut, in float64", size)
    team = cluster.of(config, os.environ)
    if team is not None and not team.is_chief:
        worker.take_part(team, config, COMPARE)
        return 0
    with imports.without_chatter():
        from pipeline.verify import engine, layers

    with tempfile.TemporaryDirectory() as folder, chief.Others(team, config) as others:
        others.start(config, Path(folder), COMPARE)
        others.gather(config, Path(folder), None)
        with others.blamed():
            parts, left_out = _assembled(config, cut, given, team)
            others.arrived = parts.machine.arrived
            say(f"{parts.machine.description}; {cut}", to=sys.stdout)
            for key in left_out:
                say(f"not compared, as it does not run in float64: {key}", to=sys.stdout)
            update = parts.update()
            show, validation = _shown(parts)
            compared, evaluated, quiet = _compared(parts, update, show, validation)
    if quiet:
        say(f"noise off, as every micro-batch draws its own: {', '.join(quiet)}", to=sys.stdout)
    equal_updates = all(finding.holds for findings in compared for finding in findings)
    holds = equal_updates and all(finding.holds for findings in evaluated for finding in findings)
    looked_at = parts.model, update.loss, show[0], cut.micro_batch_size, engine.unit(update)
    with layers.without_noise(parts.model):
        why = "the evaluation" if equal_updates else layers.culprit(*looked_at)
    compared += evaluated
    for batch, findings in zip([*show, *validation], compared, strict=True):
        say(*_table(findings, engine.examples(batch)), to=sys.stdout)
    coarsest = max(finding.bound for findings in compared for finding in findings)
    if coarsest > COARSE:
        say(
            f"rounding alone may be {coarsest:.0e} here, as where a loss or a layer is in half precision", to=sys.stdout
        )
    one_piece = f"{cut.factor} micro-batches of {cut.micro_batch_size}"
    verdict = "equal within rounding" if holds else f"different; at fault is {why}"
    say(f"an update by {one_piece} and one of the whole batch are {verdict}", to=sys.stdout)
    if options.log:
        _log(config, [engine.certificate(findings) for findings in compared], holds, verdict)
    return 0 if holds else DIFFERENT


def compare(parts: Parts, *_: Any) -> None:
    """Compare as the chief does, and say nothing: the part of another worker."""
    _compared(parts, parts.update(), *_shown(parts))


def _shown(parts: Parts) -> tuple[list[Any], list[Any]]:
    """Return a whole effective batch and a tail, and a batch of the validation split where there is one."""
    from pipeline.verify import engine

    whole = next(iter(parts.whole_batches()))
    tail = engine.shortened(whole, parts.plan.batch_size(parts.plan.updates_per_epoch))
    batches = parts.evaluation_batches()
    validation = [] if batches is None else list(batches.take(1))
    return [*{engine.examples(batch): batch for batch in (whole, tail)}.values()], validation


def _compared(
    parts: Parts, update: Update, show: Sequence[Any], validation: Sequence[Any]
) -> tuple[list[list[Finding]], list[list[Finding]], list[str]]:
    """Return what was found of updates and of evaluations, and the layers whose noise was off."""
    from pipeline.verify import engine, layers

    computing = refused("model", "must compute an update in float64, in which it is verified", parts.model.name)
    with layers.without_noise(parts.model, parts.placed()) as quiet, computing:
        compared = engine.compare(update, show)
        evaluated = [engine.compare_evaluation(parts.evaluation(), batch) for batch in validation]
    return compared, evaluated, quiet


def _assembled(
    config: DictConfig, cut: Batching, given: Sequence[str], team: Cluster | None
) -> tuple[Parts, list[str]]:
    """Return the parts without the metrics that do not run in float64, and the keys of these.

    Args:
        config: with float64 for its precision; such metrics are removed from it.
        given: the command line, with the user's precision.

    Raises:
        ConfigError: the config is wrong, or something else of it does not run in float64.
    """
    from pipeline.components import assembly
    from pipeline.config import compose

    left_out: list[str] = []
    while True:
        try:
            return assembly.assemble(config, cut, lambda _: None, 0, team), left_out
        except ConfigError as error:
            if team is not None:
                raise  # they would have to try again together
            own = compose.composed(given)
            own_cut = configuration.check(own, given)
            for key in left_out:
                _without_metric(own, key)
            assembly.assemble(own, own_cut, lambda _: None)  # raises what is wrong in any precision
            if _without_metric(config, error.key):
                left_out.append(error.key)
                continue
            cause = described(error.__cause__) if error.__cause__ else error.rule
            raise ConfigError(error.key, f"must run in float64, in which it is verified ({cause})") from error


def _without_metric(config: DictConfig, key: str) -> bool:
    """Remove the metric that stands at `key`; return whether there was one."""
    for group in METRIC_GROUPS:
        for metric in metrics_of(config.training, group):
            if metric.key == key:
                nodes = config.training[group]
                with open_dict(nodes):
                    of_output = nodes if metric.output is None else nodes[metric.output]
                    del of_output[metric.name]
                    if not of_output and metric.output is not None:
                        del nodes[metric.output]
                return True
    return False


def _table(findings: Sequence[Any], examples: int) -> list[str]:
    rows = [("", "apart", "rounding", "")]
    for found in findings:
        what = found.what if found.kind == "loss" else f"{found.kind} {found.what}"
        rows.append((what, f"{found.error:.1e}", f"{found.bound:.1e}", "" if found.holds else "DIFFERENT"))
    width = max(len(row[0]) for row in rows)
    return [
        f"{examples} examples",
        *(f"  {row[0]:{width}}  {row[1]:>8}  {row[2]:>8}  {row[3]}".rstrip() for row in rows),
    ]


def _log(config: Any, certificate: list[Any], holds: bool, verdict: str) -> None:
    """Log the certificate as a run of its own."""
    from pipeline.tracking.store import Store

    store = Store(config.tracking.uri)
    client = store.client()
    run = client.create_run(store.experiment(config.tracking.experiment), run_name="verify", tags={"verify": verdict})
    run_id = run.info.run_id
    status = "FAILED"
    try:
        for key, value in configuration.leaves(configuration.plain(config)).items():
            client.log_param(run_id, key, mask(str(value))[:6000])  # MLflow takes no more
        apart = max(found["apart"] for findings in certificate for found in findings)
        client.log_metric(run_id, "verify/apart", apart)
        client.log_text(run_id, json.dumps(certificate, indent=1), "certificate.json")
        status = "FINISHED" if holds else "FAILED"
    finally:
        client.set_terminated(run_id, status)
    say(f"MLflow run {run_id} in {mask(config.tracking.uri)}", to=sys.stdout)

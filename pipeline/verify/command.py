"""The verb `pipeline verify`: whether accumulating equals the large batch, for this config."""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.common import imports, nvidia, secrets
from pipeline.common.errors import (
    ConfigError,
    Parser,
    described,
    exits_as_failures,
    refused,
    say,
)
from pipeline.config import compose, plain, sizes
from pipeline.config.objective_nodes import METRIC_GROUPS, metrics_of
from pipeline.config.resolve import RunSpec, resolve
from pipeline.distributed import chief, worker
from pipeline.run.run import resolve_for_all

if TYPE_CHECKING:
    from pipeline.accumulation import Update
    from pipeline.components.assembly import Parts
    from pipeline.verify.engine import Finding

Found = dict[str, "list[Finding]"]  # under their titles, which begin with the precision

COMPARE = "pipeline.verify.command.compare"
DIFFERENT = 3  # exit status
COARSE = 1e-2  # relative: a comparison with a larger bound shows little


def verify(arguments: Sequence[str]) -> int:
    """Check, for a config, that accumulation equals the large batch; the arguments are those of `pipeline train`."""
    parser = Parser(
        prog="pipeline verify", description=verify.__doc__, allow_abbrev=False
    )
    parser.add_argument(
        "--all", action="store_true", help="print each comparison, of each variable"
    )
    parser.add_argument("--log", action="store_true", help="log the result to MLflow")
    options, given = parser.parse_known_args(list(arguments))
    spec = resolve_for_all(
        compose.composed([*given, "hardware.precision=float64"]), given
    )
    if spec.searches:
        size = spec.config.accumulation.micro_batch_size
        raise ConfigError(
            sizes.MICRO,
            "must be a number: what is verified is that cut, in float64",
            size,
        )
    if spec.dataset.get("batched"):
        rule = "must be false to verify: a whole batch to compare with would join the loader's own"
        raise ConfigError(sizes.BATCHED, rule, True)
    if spec.workers is not None and not spec.workers.is_chief:
        worker.run(spec, COMPARE)
        return 0
    with imports.without_chatter():
        from pipeline.components import assembly
        from pipeline.verify import engine, layers  # noqa: F401

    left_out: list[str] = []
    with tempfile.TemporaryDirectory() as folder, chief.Chief(spec) as workers:
        workers.start(spec, Path(folder), COMPARE)
        spec = workers.gather(spec, Path(folder), None)
        with workers.as_worker_error(), exits_as_failures():
            parts = _assembled(spec, given, left_out)
            workers.reductions_ready = parts.devices.reductions_ready
            update, (show, validation) = parts.update(), _shown(parts)
            found, quiet = _compared(parts, update, show, validation)
    why = (
        _fault(parts, update, show[0], differing)
        if (differing := _differing(found))
        else ""
    )
    if not differing and spec.workers is None:
        # Some kernels are used in float32 alone.
        single = assembly.assemble(
            resolve(compose.composed([*given, "hardware.precision=float32"]), given)
        )
        found |= _compared(single, single.update(), _shown(single)[0][:1], [])[0]
        why = "the update in float32 alone" if (differing := _differing(found)) else ""
    verdict = f"different; at fault is {why}" if why else "equal within rounding"
    _print(parts, found, verdict, options.all)
    say(
        *(
            f"not compared: the noise of {name}, which every micro-batch draws anew"
            for name in quiet
        ),
        to=sys.stdout,
    )
    say(
        *(f"not compared: {key}, which does not run in float64" for key in left_out),
        to=sys.stdout,
    )
    if options.log:
        certificate = [
            [finding.as_json() for finding in findings] for findings in found.values()
        ]
        double = (
            each.error
            for title in found
            if title.startswith("float64")
            for each in found[title]
        )
        _log(parts.spec, certificate, max(double), not differing, verdict)
    return DIFFERENT if differing else 0


def _differing(found: Found) -> list[Finding]:
    return [each for findings in found.values() for each in findings if not each.holds]


def compare(parts: Parts, *_: Any) -> None:
    """Compare as the chief does, and print nothing: the task of the other workers."""
    _compared(parts, parts.update(), *_shown(parts))


def _shown(parts: Parts) -> tuple[list[Any], list[Any]]:
    """Return the largest effective batch, the first, and a tail; and a batch of the validation split, if any."""
    from pipeline.accumulation import internals
    from pipeline.verify import engine

    plan, found = parts.plan, list(parts.effective_batches().take(2))
    if engine.examples(tail := found[-1]) == (
        count := engine.examples(found[0])
    ):  # else it is one
        size = plan.examples % plan.batching.effective_batch_size or count
        tail = internals.slice_of(tail, 0, min(size, max(count - 1, 1)))
    largest = max(
        (stage for stage in plan.all_stages if stage.after < plan.updates),
        key=lambda stage: stage.size,
    )
    show = [
        *(parts.effective_batches(largest.after).take(1) if largest.after else ()),
        found[0],
        tail,
    ]
    batches = parts.evaluation_batches()
    of_sizes = {engine.examples(batch): batch for batch in show}
    return list(of_sizes.values()), [] if batches is None else list(batches.take(1))


def _compared(
    parts: Parts, update: Update, show: Sequence[Any], validation: Sequence[Any]
) -> tuple[Found, list[str]]:
    from pipeline.verify import engine, layers

    precision = parts.spec.config.hardware.precision.name
    computing = refused(
        "model",
        f"must compute an update in {precision}, in which it is verified",
        parts.model.name,
    )
    titles = [f"{precision}, {engine.examples(batch)} examples" for batch in show]
    with layers.without_noise(parts.model, parts.forward.placed) as quiet, computing:
        if len(show) > 1:
            titles.append(f"{titles[-1]}, other weights")
        found = dict(
            zip(
                titles,
                engine.compare(update, show, other_weights=len(show) > 1),
                strict=True,
            )
        )
        for batch in validation:
            found[f"{precision}, evaluation"] = engine.compare_evaluation(
                parts.evaluation(), batch
            )
    return found, quiet


def _fault(
    parts: Parts, update: Update, batch: Any, differing: Sequence[Finding]
) -> str:
    from pipeline.verify import engine, layers

    if all(each.what.startswith("val/") for each in differing):
        return "the evaluation"
    state = next(
        (f"the state {each.what}" for each in differing if each.kind == "state"), ""
    )
    looked_at = (
        update.objective,
        batch,
        parts.plan.batching.micro_batch_size,
        engine.unit(update),
    )
    with layers.without_noise(parts.model):
        return (
            layers.culprit(parts.model, *looked_at)
            or state
            or "no layer and no loss, but the update itself"
        )


def _assembled(spec: RunSpec, given: Sequence[str], left_out: list[str]) -> Parts:
    """Return the parts without the metrics that do not run in float64, whose keys are added to those `left_out`.

    `spec` is in float64, the command line `given` in the user's precision. ConfigError names what else does not run.
    """
    from pipeline.components import assembly

    while True:
        try:
            return assembly.assemble(spec, lambda _: None)
        except ConfigError as error:
            if spec.workers is not None:
                raise  # they would have to try again together
            # Raises errors that do not depend on the precision.
            assembly.assemble(resolve(compose.composed(given), given), lambda _: None)
            if (without := _without_metric(spec, error.key)) is not None:
                spec = without
                left_out.append(error.key)
                continue
            cause = described(error.__cause__) if error.__cause__ else error.rule
            raise ConfigError(
                error.key, f"must run in float64, in which it is verified ({cause})"
            ) from error


def _without_metric(spec: RunSpec, key: str) -> RunSpec | None:
    every = (
        (group, metric)
        for group in METRIC_GROUPS
        for metric in metrics_of(spec.config.training, group)
    )
    for group, metric in (found for found in every if found[1].key == key):
        nodes = deepcopy(spec.resolved["training"][group])
        del (nodes if metric.output is None else nodes[metric.output])[metric.name]
        return spec.changed(
            {f"training.{group}": {name: node for name, node in nodes.items() if node}}
        )
    return None


def _print(parts: Parts, found: Found, verdict: str, every: bool) -> None:
    """Print the verdict and what is furthest apart of each kind, or with `every` all findings."""
    cut = parts.spec.largest
    pieces = f"{cut.factor} micro-batches of {cut.micro_batch_size}"
    rows: dict[tuple[str, str], Finding] = {}
    for title, findings in found.items():
        for each in sorted(
            findings, key=lambda finding: finding.bound == math.inf
        ):  # which proves nothing
            key = (
                (title, each.label)
                if every
                else (title.partition(",")[0], each.label.partition(" ")[0])
            )
            best = rows.setdefault(key, each)
            if best.holds and (
                not each.holds or each.error * best.bound > best.error * each.bound
            ):
                rows[key] = each
    width = max(len(f"{each.label} ({where})") for (where, _), each in rows.items())
    lines = [f"  {'':{width}}  {'apart':>8}  {'rounding':>8}"]
    for (where, _), each in rows.items():
        proof = "" if each.bound < math.inf else "proves nothing for these weights"
        what, proof = f"{each.label} ({where})", proof if each.holds else "DIFFERENT"
        lines.append(
            f"  {what:{width}}  {each.error:8.1e}  {each.bound:8.1e}  {proof}".rstrip()
        )
    if (
        coarsest := max(each.bound for each in rows.values() if each.bound < math.inf)
    ) > COARSE:
        lines.append(
            f"rounding alone may be {coarsest:.0e} here, as where a loss or a layer is in half precision"
        )
    if (
        any(title.startswith("float32") for title in found)
        and nvidia.computes_in_tf32()
    ):
        lines.append(
            "products of float32 are in TF32 here, which sets the rounding; hardware.tf32=false leaves it out"
        )
    verdict = f"an update by {pieces} and one of the whole batch are {verdict}"
    say(f"{parts.devices.description}; {cut}", verdict, *lines, to=sys.stdout)


def _log(
    spec: RunSpec, certificate: list[Any], apart: float, holds: bool, verdict: str
) -> None:
    from pipeline.tracking.store import Store

    tracking = spec.config.tracking
    store = Store(tracking.uri)
    client = store.client()
    run = client.create_run(
        store.experiment(tracking.experiment),
        run_name="verify",
        tags={"verify": verdict},
    )
    run_id, status = run.info.run_id, "FAILED"
    try:
        for key, value in plain.leaves(spec.resolved).items():
            client.log_param(
                run_id, key, secrets.mask(str(value))[:6000]
            )  # MLflow takes no more
        client.log_metric(run_id, "verify/apart", min(apart, 1e300))
        client.log_text(run_id, json.dumps(certificate, indent=1), "certificate.json")
        status = "FINISHED" if holds else "FAILED"
    finally:
        client.set_terminated(run_id, status)
    say(f"MLflow run {run_id} in {secrets.mask(tracking.uri)}", to=sys.stdout)

"""Description of a sweep's parent run in MLflow's UI: a link that compares its jobs, its question, its results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pipeline.common.errors import say
from pipeline.sweep import files, mlflow_view
from pipeline.sweep.mlflow_view import LONGEST_TAG

if TYPE_CHECKING:
    from pipeline.sweep.parent_run import ParentRun


def announce(sweep: ParentRun) -> None:
    """Save the view of a new sweep and the parent's description; print the link that compares its jobs."""
    link = mlflow_view.link(sweep.uri, _describe(sweep, []))
    served = " (once `pipeline ui` runs)" if link.startswith(mlflow_view.LOCAL) else ""
    say(f"compare its runs: {link}{served}")


def complete(sweep: ParentRun) -> dict[str, Any]:
    """Color the jobs and add their results to the parent's description; return the jobs' runs by name."""
    children = sweep.children()
    mlflow_view.color(sweep.client(), {name: run.info.run_id for name, run in children.items()})
    _describe(sweep, _results(sweep.names, children))
    return children


def description(
    name: str, question: str, varied: Sequence[str], fragment: str, results: Sequence[Sequence[object]] = ()
) -> str:
    """Return the parent's description in Markdown, for the tag `mlflow.note.content`.

    `fragment` is what `saved_view` returned. `results` is a table, its header first; rows that do not fit the tag are
    counted instead.
    """
    differ = ", ".join(f"`{key}`" for key in varied) or "nothing"
    # The link comes first, since the UI folds all but three lines.
    lines = [f"[Compare the runs of this sweep]({fragment}). They differ in {differ}.", ""]
    lines += [f"**{name}**" + (f": {question}" if question else ""), ""]
    if not results:
        return "\n".join([*lines, "The results come here when the sweep has ended."])
    header, *rows = (_row(cells) for cells in results)
    lines += [header, "|" + " --- |" * len(results[0])]
    for number, row in enumerate(rows):
        rest = f"\n\nand {len(rows) - number} more"
        if len("\n".join([*lines, row])) + len(rest) > LONGEST_TAG:
            return "\n".join(lines) + rest
        lines.append(row)
    return "\n".join(lines)


def _describe(sweep: ParentRun, results: Sequence[Sequence[object]]) -> str:
    """Save the view and the parent's description; return the URL fragment that opens the view."""
    fragment = mlflow_view.saved_view(
        sweep.client(), sweep.experiment_id, sweep.run_id, sweep.varied, sweep.metrics, sweep.name
    )
    text = description(sweep.name, files.question(sweep.name), sweep.varied, fragment, results)
    sweep.client().set_tag(sweep.run_id, "mlflow.note.content", text)
    return fragment


def _results(names: Sequence[str], children: Mapping[str, Any]) -> list[list[object]]:
    """Return a header and a row for each job: its status and the last values of its metrics."""
    measured = {key for run in children.values() for key in run.data.metrics if key.startswith("val/")}
    keys = [*(sorted(measured - {"val/examples_seen"}) or ["train/loss"]), "perf/examples_per_second"]
    rows: list[list[object]] = [["job", "status", *keys]]
    for name in names:
        run = children.get(name)
        last = run.data.metrics if run else {}
        rows.append(
            [name, run.info.status if run else "no run", *(f"{last[k]:.4g}" if k in last else "" for k in keys)]
        )
    return rows


def _row(cells: Iterable[object]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

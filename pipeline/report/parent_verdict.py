"""Writes the verdict of a sweep to the parent run, as description and as metrics."""

import math
import re
import textwrap
from collections.abc import Sequence
from typing import Any

from pipeline.report.findings import SweepFinding, results_of
from pipeline.report.reading import SEEDS_OF_VERDICT
from pipeline.report.sweep_result import SweepResult
from pipeline.report.verdict import Verdict
from pipeline.tracking.foreign_store import LONGEST_TAG, NOTE

# The description that `pipeline.sweep.mlflow_view` writes begins with this link.
_LINK = "[Compare the runs of this sweep]"
_HEADLINE = re.compile(rf"\A\*\*[^*]*\*\* (?={re.escape(_LINK)})")
_QUOTE = "> "
# Comments in Markdown, which are not shown, around the quotation of the verdicts.
_BEGIN = "<!-- verdict -->"
_END = "<!-- end of the verdict -->"
_BLOCK = re.compile(rf"^{_BEGIN}\n.*?^{_END}(\n|\Z)", re.DOTALL | re.MULTILINE)
# Matches the verdicts of earlier versions, which wrote no comments: the quotation under
# the line with the headline and the link.
_FORMER_BLOCK = re.compile(rf"({_HEADLINE.pattern}.*\n)\n(?:>.*\n)+")
_LONGEST_VERDICT = 2000  # maximum characters of all verdicts in the description


def record(client: Any, sweep: SweepResult, findings: Sequence[SweepFinding]) -> None:
    """Write the verdicts of a sweep into the description and metrics of its parent run.

    Nothing is written while the sweep is running. A written verdict over at least two
    seeds counts as a look at the data: it lowers the chance of error that later
    verdicts with more seeds may have; see `seed_differences.chance_of_look`.
    """
    verdicts = results_of(findings, Verdict)
    if not verdicts or sweep.status == "RUNNING":
        return

    note = client.get_run(sweep.run_id).data.tags.get(NOTE, "")
    client.set_tag(sweep.run_id, NOTE, with_verdicts(note, verdicts))
    seeds = _most_seeds(verdicts)
    for key, value in metrics(verdicts).items():
        client.log_metric(sweep.run_id, key, value, step=seeds)


def with_verdicts(note: str, verdicts: Sequence[Verdict]) -> str:
    """Return the description `note` with `verdicts` in place of earlier verdicts.

    The headlines are put before the link to the comparison, since MLflow's UI collapses
    a description to three lines. The sentences follow as a quotation between two
    comments, by which the next report finds them. Long sentences are shortened. If the
    description does not begin with the link, only the quotation is put first.
    """
    headlines = "; ".join(verdict.headline for verdict in verdicts)
    quotes = []
    for verdict in verdicts:
        text = textwrap.shorten(verdict.text(), _LONGEST_VERDICT // len(verdicts))
        quotes.append(f"{_QUOTE}{text}")
    block = "\n".join([_BEGIN, "\n>\n".join(quotes), _END])

    rest = _without_verdicts(note)
    if rest.startswith(_LINK):
        link, _, rest = rest.partition("\n")
        headlines = textwrap.shorten(headlines, 200).replace("*", "")
        block = f"**{headlines}.** {link}\n{block}"
    return f"{block}\n{rest}"[:LONGEST_TAG]


def _without_verdicts(note: str) -> str:
    """Return the description without the verdicts that an earlier report put into it.

    Everything else is kept as it is, including quotations and headlines of the user.
    """
    if _BLOCK.match(note):
        # A headline after the block is the user's: ours stands before it.
        return _BLOCK.sub("", note, count=1)
    if _BLOCK.search(note):
        rest = _BLOCK.sub("", note, count=1)
    elif _FORMER_BLOCK.match(note):
        rest = _FORMER_BLOCK.sub(r"\1", note, count=1)
    else:
        return note
    return _HEADLINE.sub("", rest)


def metrics(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """Return the verdicts as metrics of the parent run, by name.

    For each budget, they are the difference between the losses and the two ends of its
    interval. `factor` is the recommended factor, if a budget is decided. If there are
    several verdicts, the names also include the recipe and the micro-batch. Values that
    are not finite are left out. `SEEDS_OF_VERDICT` is the largest number of seeds of a
    setting, if it is at least two.
    """
    values: dict[str, float] = {}
    for verdict in verdicts:
        prefix = "verdict"
        if len(verdicts) > 1:
            recipe = f"{verdict.recipe} micro={verdict.micro}".strip()
            prefix = "verdict/" + re.sub(r"[^\w. -]", "_", recipe)
        for contrast in verdict.contrasts:
            name = f"{prefix}/{contrast.axis}"
            values[f"{name}/difference"] = contrast.result.value
            values[f"{name}/low"] = contrast.result.lower
            values[f"{name}/high"] = contrast.result.upper
        if verdict.better is not None:
            values[f"{prefix}/factor"] = verdict.better.factor

    known = {key: value for key, value in values.items() if math.isfinite(value)}
    seeds = _most_seeds(verdicts)
    if seeds > 1:
        known[SEEDS_OF_VERDICT] = seeds
    return known


def _most_seeds(verdicts: Sequence[Verdict]) -> int:
    """Return the largest number of seeds of a setting, which grows with each look."""
    seeds = []
    for verdict in verdicts:
        seeds += [contrast.most_seeds for contrast in verdict.contrasts]
    return max(seeds)

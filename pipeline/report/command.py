"""`pipeline report`: reports on a sweep, on runs, or on how two sweeps differ.

one SWEEP ─────► writer: its report, logged to its parent run
RUN …, --filter ► run_results ─► runs_page ─┐
two SWEEPs ────► reading ─► sweep_changes ──┴► one HTML file on this machine
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.common.errors import ConfigError, Parser, as_config_error, say
from pipeline.config import compose, trust_entries
from pipeline.config.overrides import named_experiment, names_and_overrides
from pipeline.report import run_results, runs_page, sweep_changes, writer
from pipeline.report.findings import FindingsPage
from pipeline.report.html_page import plot_key
from pipeline.report.job_results import JobResult
from pipeline.tracking.foreign_store import ForeignStore

_OUT = Path("outputs")  # the folder of pages without `--out`


@dataclass(frozen=True)
class _Request:
    """The arguments of the command line.

    Attributes:
        names: runs or sweeps.
        filter: MLflow's filter string for runs, or None.
        out: the file of the page, or None for the default.
        uri: the URI of the store.
        allow: the places where artifacts may be.
        experiment: the experiment that the filter string is for, or None for all.
    """

    names: list[str]
    filter: str | None
    out: str | None
    uri: str
    allow: list[str]
    experiment: str | None


def report(arguments: Sequence[str]) -> int:
    """Write a report on a sweep, on several runs side by side, or on two sweeps."""
    request = _request(arguments)
    if request.filter is not None:
        matches = _matching(request, request.filter)
        _write_runs(request, _results(request, matches), request.filter)
        return 0

    sources = _sources(request)
    sweeps = [source for source in sources if _is_sweep(source)]
    if not sweeps:
        _write_runs(request, _results(request, sources))
    elif len(sources) == 1:
        if request.out is not None:
            rule = "must be left out for a sweep, whose report goes to its parent run"
            raise ConfigError("--out", rule, request.out)
        writer.publish(request.uri, sweeps[0].info.run_id, request.allow)
    elif len(sweeps) == len(sources) == 2:
        first, second = (sweep.info.run_id for sweep in sweeps)
        page = sweep_changes.page(request.uri, first, second, request.allow)
        _write(request, page, f"{first[:8]}-{second[:8]}")
    else:
        rule = "must name only runs, one sweep, or two sweeps"
        raise ConfigError("SWEEP or RUN", rule, request.names)
    return 0


def _request(arguments: Sequence[str]) -> _Request:
    options, unknown = _parser().parse_known_intermixed_args(list(arguments))
    names, overrides = names_and_overrides(options.names)
    if options.config_dir is not None:
        overrides += ["--config-dir", options.config_dir]
    config = compose.composed([*overrides, *unknown])

    if options.filter is None and not names:
        rule = "must name a sweep, two sweeps or runs in the store"
        raise ConfigError("SWEEP or RUN", rule, "")
    if options.filter is not None and names:
        rule = "must be left out with --filter, which selects runs"
        raise ConfigError("SWEEP or RUN", rule, names)
    allow = [*config.trust.allow, *options.allow]
    trust_entries.check_allowed(allow)
    return _Request(
        names=names,
        filter=options.filter,
        out=options.out,
        uri=config.tracking.uri,
        allow=allow,
        experiment=named_experiment(overrides, config.tracking.experiment),
    )


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="pipeline report", description=report.__doc__, allow_abbrev=False
    )
    parser.add_argument(
        "names",
        metavar="SWEEP or RUN",
        nargs="*",
        help=(
            "a sweep: its run ID, the start of this ID, the name of its run, or the "
            "NAME of `pipeline sweep NAME`, which selects the newest one. Two sweeps: "
            "the page shows what changed between them. Runs: run directories, "
            "run IDs or the starts of run IDs"
        ),
    )
    parser.add_argument(
        "--filter",
        metavar="TEXT",
        help="show the runs that match a filter string in MLflow's syntax, such as "
        "\"tags.team='vision'\"",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="the file for the page of runs or of two sweeps; by default "
        f"{_OUT}/report-….html",
    )
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="PLACE",
        help="a place where artifacts may be",
    )
    parser.add_argument(
        "--config-dir",
        "-cd",
        metavar="DIR",
        help="a folder with config groups of your own",
    )
    return parser


def _matching(request: _Request, condition: str) -> list[Any]:
    """Return the runs in the store that a filter string selects.

    Raises:
        ConfigError: it selects no run, or more runs than a page shows.
    """
    store = ForeignStore.open(request.uri, request.allow)
    runs = store.matching(condition, request.experiment)
    if not 0 < len(runs) <= runs_page.MOST_RUNS:
        rule = (
            f"must select from 1 to {runs_page.MOST_RUNS} runs of the store, but "
            f"selects {len(runs)}"
        )
        raise ConfigError("--filter", rule, condition)
    return runs


def _sources(request: _Request) -> list[Any]:
    """Return for each name a run directory, or a run or a sweep's parent in the store.

    The store is opened only if a name is not a run directory, since a journal has all
    rows.

    Raises:
        ConfigError: there are more names than runs on a page, or a name is not known.
    """
    if len(request.names) > runs_page.MOST_RUNS:
        rule = f"must name at most {runs_page.MOST_RUNS} runs"
        raise ConfigError("SWEEP or RUN", rule, len(request.names))
    others = []
    for name in request.names:
        if not run_results.is_run_directory(name):
            others.append(name)
    run_by_name = {}
    if others:
        store = ForeignStore.open(request.uri, request.allow)
        run_by_name = {name: store.run_or_sweep(name) for name in others}
    sources = [run_by_name.get(name, Path(name)) for name in request.names]
    identities = [_identity(source) for source in sources]
    for name, identity in zip(request.names, identities, strict=True):
        if identities.count(identity) > 1:
            raise ConfigError(
                "SWEEP or RUN", "must name each sweep or run only once", name
            )
    return sources


def _identity(source: Any) -> object:
    if isinstance(source, Path):
        return source.resolve()
    return source.info.run_id


def _is_sweep(source: Any) -> bool:
    return not isinstance(source, Path) and "sweep.name" in source.data.tags


def _results(request: _Request, sources: Sequence[Any]) -> list[JobResult]:
    """Return the results of run directories and of runs in the store."""
    results = []
    for source in sources:
        if isinstance(source, Path):
            results.append(run_results.from_directory(source))
        else:
            client = ForeignStore(request.uri).client()
            results.append(run_results.from_store(client, source))
    return results


def _write_runs(
    request: _Request, runs: Sequence[JobResult], selection: str = ""
) -> None:
    runs = run_results.with_unique_names(runs)
    page = runs_page.page(runs, selection)
    ids = [(run.run_id or run.name)[:8] for run in runs]
    name = "-".join(ids[:4])
    if len(ids) > 4:
        name += f"-and-{len(ids) - 4}-more"
    _write(request, page, name)


def _write(request: _Request, page: FindingsPage, name: str) -> None:
    """Write a page, and print its findings and where it is.

    Args:
        request: the arguments, with the file if the user named one.
        page: the page.
        name: the end of the file's name if the user named no file.
    """
    file = _OUT / f"report-{plot_key(name)}.html"
    if request.out is not None:
        file = Path(request.out)
    with as_config_error("--out", "must be a file that can be written", str(file)):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(page.html, encoding="utf-8")
    say(*page.lines(), f"report: {file.absolute()}", to=sys.stdout)

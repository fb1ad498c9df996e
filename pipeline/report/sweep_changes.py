"""What changed between two sweeps: config, code, packages, and each setting's result."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.common.errors import ConfigError, count, first_line
from pipeline.config import plain
from pipeline.report import key_differences, reading, statistics
from pipeline.report.findings import FindingsPage, Result, SweepFinding
from pipeline.report.html_page import RESULT, PageParts, Plot, axis, render, trace
from pipeline.report.job_results import JobResult, finished_jobs
from pipeline.report.key_differences import KeyDifference
from pipeline.report.seed_differences import (
    Difference,
    Values,
    difference,
    paired_seeds,
    values_by_seed,
)
from pipeline.report.statistics import CHANCE
from pipeline.report.sweep_result import SweepResult
from pipeline.report.table import Table
from pipeline.report.wording import joined, number, plus_minus
from pipeline.tracking import record_files
from pipeline.tracking.foreign_store import ForeignStore
from pipeline.trust import artifact_locations

# The headings of the findings, by topic.
TOPICS = {
    "settings": "Settings",
    "keys": "What differs",
    "result": "Result",
}
# The values of environment.json that are compared, besides the versions of packages.
_MACHINE = ("python", "platform", "processor", "gpus", "driver", "cuda", "cudnn")
_ENVIRONMENT = "environment.json"

# The verdicts on the second sweep at a setting.
BETTER = "better"
WORSE = "worse"
NOT_TOLD_APART = "not told apart"
EQUAL = "equal"
UNKNOWN = "chance not known"
# The sentences that begin the lists of settings with each verdict.
_SENTENCES = {
    BETTER: "The second sweep is better at",
    WORSE: "The second sweep is worse at",
    NOT_TOLD_APART: "The data do not tell the sweeps apart at",
    EQUAL: "The sweeps are equal at",
    UNKNOWN: (
        "The effect of chance is unknown, for lack of seeds with different results, at"
    ),
}

Columns = list[dict[str, str]]  # the values by key of the first and the second sweep


@dataclass(frozen=True)
class SettingChange:
    """The final results of one setting in two sweeps.

    Attributes:
        setting: the name of the setting, which is that of the group of jobs and leaves
            out the seed.
        first: the spread of the results over the seeds of the first sweep. If both
            sweeps are compared seed by seed, only the seeds in common count.
        second: the same for the second sweep.
        difference: the second minus the first.
        half_width: half the width of the interval of the difference, which is infinite
            if chance is not known.
    """

    setting: str
    first: statistics.Spread
    second: statistics.Spread
    difference: Difference
    half_width: float

    @property
    def has_interval(self) -> bool:
        """Whether the results differ and the interval of the difference is known."""
        return math.isfinite(self.half_width) and not self.difference.equal

    @property
    def told_apart(self) -> bool:
        """Whether 0 lies outside the interval of the difference."""
        return self.has_interval and abs(self.difference.value) > self.half_width


@dataclass(frozen=True)
class ResultChanges(Result):
    """The changes of a final metric in all settings that both sweeps have.

    With a probability of 95%, the intervals of all settings hold at once.

    Attributes:
        metric: the metric.
        lower_is_better: whether lower values are better.
        changes: the changes, in the order of the first sweep.
    """

    metric: str
    lower_is_better: bool
    changes: list[SettingChange]

    def verdict(self, change: SettingChange) -> str:
        """Return the verdict on the second sweep at a setting, such as `BETTER`."""
        if change.difference.equal:
            return EQUAL
        if not change.has_interval:
            return UNKNOWN
        if not change.told_apart:
            return NOT_TOLD_APART
        if (change.difference.value < 0) == self.lower_is_better:
            return BETTER
        return WORSE

    def figures(self) -> dict[str, Any]:
        verdicts = {change.setting: self.verdict(change) for change in self.changes}
        return {"metric": self.metric, "verdicts": verdicts}


def page(uri: str, first: str, second: str, allow: Sequence[str]) -> FindingsPage:
    """Return the page on what changed between two sweeps of one store.

    Args:
        uri: the URI of the store.
        first: the run ID of the first sweep.
        second: the run ID of the second sweep.
        allow: locations where artifacts may be.

    Raises:
        ConfigError: as for `reading.read`, or a job has a record that cannot be read.
    """
    sweeps = [reading.read(uri, sweep, allow) for sweep in (first, second)]
    names = _names(sweeps)
    shared = shared_settings(sweeps)
    keys: list[KeyDifference] = []
    code: list[KeyDifference] = []
    without_runs = [
        name for name, sweep in zip(names, sweeps, strict=True) if not _runs(sweep.jobs)
    ]
    if without_runs:
        # Otherwise, each key and package of the other sweep would count as a
        # difference.
        text = f"Nothing to compare: no job of {joined(without_runs)} has a run."
        what_differs = SweepFinding("keys", text)
    else:
        keys = key_differences.between(_columns(sweeps, shared, lambda job: job.params))
        environments = _environments(uri, sweeps, allow)
        code = key_differences.between(
            _columns(sweeps, [], lambda job: environments[job.run_id or ""])
        )
        what_differs = key_differences.finding(keys, code)

    findings = [_settings_finding(sweeps, shared), what_differs]
    all_changes = changes(sweeps)
    for result in all_changes:
        findings.append(SweepFinding("result", _result_sentences(result), result))
    if not all_changes:
        text = "No setting has finished in both sweeps, so no results are compared."
        findings.append(SweepFinding("result", text))

    tables = [_result_table(result, names) for result in all_changes]
    tables += key_differences.tables(names, keys, code)
    parts = PageParts(findings=findings, topics=TOPICS, tables=tables, groups=names)
    plots: list[Plot] = []
    for position, result in enumerate(all_changes):
        plots += _plots(result, names, position)
    title = f"What changed from {names[0]} to {names[1]}"
    about = f"MLflow runs {first} and {second}"
    footer = "Computed from the metrics, params and records of both sweeps in MLflow."
    return FindingsPage(findings, TOPICS, render(title, about, plots, footer, parts))


def changes(sweeps: Sequence[SweepResult]) -> list[ResultChanges]:
    """Return the changes of each metric that has final results in both sweeps.

    The metric that ranks the jobs of the first sweep comes first. The chance that an
    interval misses its difference is divided among the settings (Bonferroni). So if
    nothing changed, the sweeps are told apart at one or more settings of a metric in at
    most 5% of all cases.

    Args:
        sweeps: the first and the second sweep.
    """
    first, second = sweeps
    metrics = [metric for metric in first.metrics if metric in second.metrics]
    metrics.sort(key=lambda metric: metric != first.quality)
    all_changes = []
    for metric in metrics:
        of_metric = _changes_of(sweeps, metric)
        if of_metric:
            lower = first.lower_is_better(metric)
            all_changes.append(ResultChanges(metric, lower, of_metric))
    return all_changes


def _changes_of(sweeps: Sequence[SweepResult], metric: str) -> list[SettingChange]:
    pairs = {}
    for shared in shared_settings(sweeps):
        values = []
        for sweep, group in zip(sweeps, shared.groups, strict=True):
            finals = _finals(sweep, group, metric)
            if finals:
                values.append(finals)
        if len(values) == 2:
            pairs[shared.name] = values

    of_metric = []
    for setting, (first, second) in pairs.items():
        # A difference over the common seeds is not that of the means over other seeds.
        seeds = paired_seeds(first, second)
        first_spread = _spread_at(first, seeds or first)
        second_spread = _spread_at(second, seeds or second)
        if first_spread is None or second_spread is None:
            continue
        change = difference(first, second)
        half_width = change.half_width(CHANCE / 2 / len(pairs))
        of_metric.append(
            SettingChange(setting, first_spread, second_spread, change, half_width)
        )
    return of_metric


def _spread_at(values: Values, seeds: Iterable[str]) -> statistics.Spread | None:
    return statistics.spread([values[seed] for seed in seeds])


def _finals(sweep: SweepResult, group: str, metric: str) -> dict[str, float]:
    """Return a metric's final values by seed, for the finished jobs of a group."""
    jobs = finished_jobs(sweep.groups[group])
    return values_by_seed(jobs, lambda job: sweep.final(job, metric))


@dataclass(frozen=True)
class SharedSetting:
    """A setting that both sweeps have.

    Attributes:
        name: the name of the setting.
        groups: the name of its group in the first and in the second sweep. They differ
            if one sweep fixes a key that the other one varies.
    """

    name: str
    groups: tuple[str, str]


def shared_settings(sweeps: Sequence[SweepResult]) -> list[SharedSetting]:
    """Return the settings that both sweeps have, in the order of the first one.

    If only one sweep varies a key, its value in a shared setting is the one that the
    other sweep has recorded.
    """
    first, second = sweeps
    keys = {plain.short(key, "")[:-1]: key for key in (*first.varied, *second.varied)}
    shared = []
    taken: set[str] = set()
    for group, jobs in first.groups.items():
        for other_group, other_jobs in second.groups.items():
            if other_group in taken or not _same_setting(jobs, other_jobs, keys):
                continue
            taken.add(other_group)
            name = _name_of_both(jobs[0], other_jobs[0])
            shared.append(SharedSetting(name, (group, other_group)))
            break
    return shared


def _same_setting(
    jobs: Sequence[JobResult], others: Sequence[JobResult], keys: Mapping[str, str]
) -> bool:
    """Return whether two groups of jobs have the same setting.

    Args:
        jobs: the jobs of a group.
        others: the jobs of a group of the other sweep.
        keys: the keys of the config, by the short names that stand in the names of
            jobs.
    """
    settings = dict(jobs[0].settings)
    other_settings = dict(others[0].settings)
    for name in {*settings, *other_settings} - {"seed"}:
        if name in settings and name in other_settings:
            is_same = jobs[0].setting(name) == others[0].setting(name)
            # A job without a run has no recorded sizes.
            is_same = is_same or settings[name] == other_settings[name]
        else:
            value = _recorded(jobs, name, keys)
            is_same = bool(value) and value == _recorded(others, name, keys)
        if not is_same:
            return False
    return True


def _recorded(
    jobs: Sequence[JobResult], name: str, keys: Mapping[str, str]
) -> dict[str, str]:
    """Return the recorded value of a key, or all values of a group of the config.

    The result is empty if no job has a run, or if there is no such key.
    """
    for job in _runs(jobs):
        if name in ("factor", "batch"):
            return {name: str(job.setting(name))}
        key = keys.get(name)
        values = {}
        for param, value in job.params.items():
            if key is not None and f"{param}.".startswith(f"{key}."):
                values[param] = value
        return values
    return {}


def _name_of_both(job: JobResult, other: JobResult) -> str:
    """Return the setting of a job, with the keys that only the other job's name has."""
    settings = dict(other.settings) | dict(job.settings)
    words = []
    for key in dict.fromkeys([*dict(job.settings), *settings]):
        if key == "seed":
            continue
        if settings[key]:
            words.append(f"{key}={settings[key]}")
        else:
            words.append(key)
    return " ".join(words) or job.group


def _names(sweeps: Sequence[SweepResult]) -> list[str]:
    """Return the names of two sweeps, with the start of the run ID if they are equal."""
    names = [sweep.name for sweep in sweeps]
    if len(set(names)) > 1:
        return names
    return [f"{sweep.name} {sweep.run_id[:8]}" for sweep in sweeps]


def _columns(
    sweeps: Sequence[SweepResult],
    settings: Sequence[SharedSetting],
    values_of: Callable[[JobResult], dict[str, str]],
) -> Columns:
    """Return the values in two sweeps of each key whose values differ.

    The values of a key are compared setting by setting, at the seeds at which results
    are compared. If they differ in one setting, the key's values in all of the settings
    are listed.

    Args:
        sweeps: the first and the second sweep.
        settings: the settings to compare, or none to compare all jobs at once.
        values_of: returns the values of a job by key.
    """
    blocks = []
    for setting in settings:
        block = []
        for sweep, group in zip(sweeps, setting.groups, strict=True):
            block.append(_runs(sweep.groups[group]))
        blocks.append(_compared(*block))
    if not blocks:
        blocks = [[_runs(sweep.jobs) for sweep in sweeps]]

    differing: set[str] = set()
    for first_jobs, second_jobs in blocks:
        first_texts = _texts(first_jobs, values_of)
        second_texts = _texts(second_jobs, values_of)
        for item in key_differences.between([first_texts, second_texts]):
            differing.add(item.key)

    columns = []
    for position in range(len(sweeps)):
        jobs = []
        for block in blocks:
            jobs += block[position]
        texts = _texts(jobs, values_of)
        columns.append({key: texts[key] for key in texts if key in differing})
    return columns


def _compared(first: list[JobResult], second: list[JobResult]) -> list[list[JobResult]]:
    """Return the jobs of a setting in two sweeps, of those seeds that are compared.

    If results are not compared seed by seed, these are all jobs.
    """
    seeds_of_jobs = []
    for jobs in (first, second):
        finished = {job.seed for job in finished_jobs(jobs)}
        seeds_of_jobs.append([seed for seed in finished if seed is not None])
    seeds = paired_seeds(*seeds_of_jobs)
    if not seeds:
        return [first, second]
    compared = []
    for jobs in (first, second):
        compared.append([job for job in jobs if job.seed in seeds])
    return compared


def _runs(jobs: Sequence[JobResult]) -> list[JobResult]:
    return [job for job in jobs if job.run_id is not None]


def _texts(
    jobs: Sequence[JobResult], values_of: Callable[[JobResult], dict[str, str]]
) -> dict[str, str]:
    """Return, for each key, one text with its distinct values over some jobs."""
    values_by_key: dict[str, dict[str, None]] = {}
    for job in jobs:
        for key, value in values_of(job).items():
            values_by_key.setdefault(key, {})[value] = None
    return {key: ", ".join(sorted(values)) for key, values in values_by_key.items()}


def _environments(
    uri: str, sweeps: Sequence[SweepResult], allow: Sequence[str]
) -> dict[str, dict[str, str]]:
    """Return the code, the machine and the packages of each job, by run ID.

    Raises:
        ConfigError: a job has a record that cannot be read.
    """
    from mlflow.exceptions import MlflowException

    store = ForeignStore.open(uri, allow)
    client = store.client()
    environments = {}
    with artifact_locations.confined(uri, store.places):
        for sweep in sweeps:
            for job in _runs(sweep.jobs):
                run_id = str(job.run_id)
                try:
                    files = record_files.download(client, run_id, [_ENVIRONMENT])
                except (MlflowException, OSError, ValueError) as error:
                    rule = f"must have records that can be read ({first_line(error)})"
                    raise ConfigError("SWEEP", rule, run_id) from error
                environment = files.get(_ENVIRONMENT, {})
                environments[run_id] = _described(job, environment)
    return environments


def _described(job: JobResult, environment: dict[str, Any]) -> dict[str, str]:
    """Return the code, the machine and the packages of a job, as strings by name."""
    described = key_differences.code_of(job)
    for key in _MACHINE:
        if key in environment:
            described[key] = str(environment[key])
    package = environment.get("package") or {}
    if "sha256" in package:
        described["package.sha256"] = str(package["sha256"])
    for name, version in (environment.get("packages") or {}).items():
        described[f"{name} (package)"] = str(version)
    return described


@dataclass(frozen=True)
class SharedSettings(Result):
    """The settings that both sweeps have, and those that only one of them has."""

    both: list[str]
    only_first: list[str]
    only_second: list[str]


def _settings_finding(
    sweeps: Sequence[SweepResult], shared: list[SharedSetting]
) -> SweepFinding:
    first, second = sweeps
    of_first = {setting.groups[0] for setting in shared}
    of_second = {setting.groups[1] for setting in shared}
    both = [setting.name for setting in shared]
    result = SharedSettings(
        both=both,
        only_first=[group for group in first.groups if group not in of_first],
        only_second=[group for group in second.groups if group not in of_second],
    )
    text = f"{count(len(both), 'setting')} in both sweeps."
    if both:
        text = f"{count(len(both), 'setting')} in both sweeps: {joined(both)}."
    if result.only_first:
        text += f" Only in the first one: {joined(result.only_first)}."
    if result.only_second:
        text += f" Only in the second one: {joined(result.only_second)}."
    return SweepFinding("settings", text, result)


def _result_sentences(result: ResultChanges) -> str:
    """Describe at which settings the second sweep ends better or worse."""
    settings = count(len(result.changes), "setting")
    direction = "lower" if result.lower_is_better else "higher"
    text = f"Final {result.metric}, where {direction} is better."
    changes_by_verdict: dict[str, list[str]] = {}
    for change in result.changes:
        verdict = result.verdict(change)
        changes_by_verdict.setdefault(verdict, []).append(_described_change(change))
    if list(changes_by_verdict) == [EQUAL]:
        return f"{text} Both sweeps end with the same values at all {settings}."

    if BETTER not in changes_by_verdict and WORSE not in changes_by_verdict:
        text += " At no setting can the sweeps be told apart."
    for verdict, sentence in _SENTENCES.items():
        if verdict in changes_by_verdict:
            text += f" {sentence} {joined(changes_by_verdict[verdict])}."
    if any(change.has_interval for change in result.changes):
        text += f" Intervals: 95% for {settings} together."
    return text


def _described_change(change: SettingChange) -> str:
    """Return the setting and its difference, with the interval if there is one."""
    if change.difference.equal:
        return change.setting
    value = number(change.difference.value)
    if change.has_interval:
        interval = plus_minus(change.difference.value, change.half_width)
        value = f"{interval}, {_method(change)}"
    return f"{change.setting} (difference {value})"


def _method(change: SettingChange) -> str:
    if change.difference.paired:
        return f"over {count(change.difference.seeds, 'pair')} with equal seeds"
    return "Welch"


def _result_table(result: ResultChanges, names: Sequence[str]) -> Table:
    rows = []
    for change in result.changes:
        value = number(change.difference.value)
        if change.has_interval:
            value = plus_minus(change.difference.value, change.half_width)
        cells = [change.first.text(), change.second.text(), value]
        rows.append([change.setting, *cells, result.verdict(change)])
    head = ["setting", *names, "difference", "second sweep"]
    return Table(f"Final {result.metric}", head, rows)


def _plots(result: ResultChanges, names: Sequence[str], position: int) -> list[Plot]:
    """Plot the final results of both sweeps, and their differences, by setting."""
    settings = [change.setting for change in result.changes]
    spreads = {
        names[0]: [change.first for change in result.changes],
        names[1]: [change.second for change in result.changes],
    }
    traces = []
    for color, (name, of_sweep) in enumerate(spreads.items()):
        means = [spread.mean for spread in of_sweep]
        deviations = [spread.deviation or 0.0 for spread in of_sweep]
        drawn = trace(name, settings, means, color, "markers", deviations)
        meta = {"color": color, "group": name}
        traces.append(drawn | {"showlegend": False, "meta": meta})
    category = axis("setting") | {"type": "category"}
    ends = Plot(
        key=f"final-{position}",
        section=RESULT,
        title=f"Final {result.metric}",
        caption="Bars: ± one sample standard deviation over seeds, if there are "
        "several.",
        data=traces,
        layout={"xaxis": category, "yaxis": axis(result.metric)},
    )

    known = [change for change in result.changes if math.isfinite(change.half_width)]
    by_setting = trace(
        "difference",
        [change.setting for change in known],
        [change.difference.value for change in known],
        color=2,
        mode="markers",
        error=[change.half_width for change in known],
    )
    settings_text = count(len(result.changes), "setting")
    zero = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": 0, "y1": 0}
    differences = Plot(
        key=f"difference-{position}",
        section=RESULT,
        title=f"Difference of the final {result.metric}",
        caption=(
            f"The second sweep minus the first. Bars: 95% for {settings_text} together."
        ),
        data=[by_setting | {"showlegend": False}],
        layout={
            "xaxis": category,
            "yaxis": axis("difference"),
            "shapes": [zero],
        },
    )
    return [plot for plot in (ends, differences) if plot.has_points()]

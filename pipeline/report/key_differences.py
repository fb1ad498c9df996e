"""Which keys of the config, and which parts of the code, differ between runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.common.errors import count
from pipeline.config import key_kinds
from pipeline.report.findings import Result, SweepFinding
from pipeline.report.job_results import JobResult
from pipeline.report.table import Table
from pipeline.report.wording import joined

ABSENT = "–"  # stands for the value of a key that a run does not have
# Tags of a run that say which code it ran.
CODE = ("git.commit", "git.clean", "package.version", "float32.in_tf32")
_LONGEST_VALUE = 300  # maximum characters of a value on the page
_DERIVED = "derived."  # begins the names of params that the config implies


@dataclass(frozen=True)
class KeyDifference:
    """A key whose value is not the same in all columns of a table.

    Attributes:
        key: the dotted name of a key of the config, or the name of another value.
        values: the value in each column.
    """

    key: str
    values: tuple[str, ...]

    @property
    def decides_what_runs(self) -> bool:
        """Whether the key affects more than the place and the logging of a run."""
        return key_kinds.kind_of(self.key) in key_kinds.WHAT_RUNS

    @property
    def is_derived(self) -> bool:
        """Whether the value follows from other keys, such as `derived.factor`."""
        return self.key.startswith(_DERIVED)


def between(columns: Sequence[Mapping[str, str]]) -> list[KeyDifference]:
    """Return the keys whose values differ between columns, in alphabetical order.

    Keys that nothing but a sweep sets are left out, since they only name the sweep.
    """
    keys: set[str] = set()
    for values in columns:
        keys.update(values)
    differences = []
    for key in sorted(keys):
        values_of_key = tuple(values.get(key, ABSENT) for values in columns)
        of_a_sweep = key_kinds.facts_of(key).set_by_a_sweep
        if len(set(values_of_key)) > 1 and not of_a_sweep:
            differences.append(KeyDifference(key, values_of_key))
    return differences


def code_of(run: JobResult) -> dict[str, str]:
    """Return the tags of a run that say which code it ran."""
    return {tag: run.tags[tag] for tag in CODE if tag in run.tags}


@dataclass(frozen=True)
class DifferingKeys(Result):
    """The differing keys that decide what runs, and the parts of the code that differ.

    Attributes:
        keys: the dotted names of the keys.
        code: the names of tags in `CODE`, or of packages and parts of the machine.
    """

    keys: list[str]
    code: list[str]


def finding(
    keys: Sequence[KeyDifference], code: Sequence[KeyDifference]
) -> SweepFinding:
    """Report which keys of the config differ, and whether the code differs."""
    decisive = []
    for difference in keys:
        if difference.decides_what_runs and not difference.is_derived:
            decisive.append(difference.key)
    result = DifferingKeys(decisive, [difference.key for difference in code])

    text = (
        "All keys of the config, except those of place and logging, have the same "
        "values."
    )
    if decisive:
        what = count(len(decisive), "key")
        text = f"{what} of the config with different values: {joined(decisive)}."
    if code:
        text += f" The code or its packages differ: {joined(result.code)}."
    return SweepFinding("keys", text, result)


def tables(
    columns: Sequence[str],
    keys: Sequence[KeyDifference],
    code: Sequence[KeyDifference],
) -> list[Table]:
    """Return the tables of the keys and of the code that differ between columns."""
    what_runs = [item for item in keys if item.decides_what_runs]
    others = [item for item in keys if not item.decides_what_runs]
    return [
        _table("Keys that differ", columns, what_runs),
        _table("Code that differs", columns, code),
        _table("Keys of place, log and machine that differ", columns, others),
    ]


def _table(
    heading: str, columns: Sequence[str], differences: Sequence[KeyDifference]
) -> Table:
    rows = []
    for difference in differences:
        rows.append([difference.key, *map(_shown, difference.values)])
    return Table(heading, ["key", *columns], rows, has_texts=True)


def _shown(value: str) -> str:
    if len(value) <= _LONGEST_VALUE:
        return value
    return f"{value[: _LONGEST_VALUE - 1]}…"

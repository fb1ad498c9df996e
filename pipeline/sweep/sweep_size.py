"""Checks the number of jobs of a sweep before Hydra lists all of them."""

import math
from collections.abc import Sequence
from typing import Any

from hydra.core.override_parser.types import ChoiceSweep, Override, RangeSweep

from pipeline.common.errors import ConfigError, say

MOST_JOBS = 5000
# Number of jobs above which a message is printed: Hydra composes the configs of all
# jobs before the first job starts, at tens of jobs per second.
_MANY_JOBS = 200


def check(overrides: Sequence[Override]) -> None:
    """Check that a grid has at most `MOST_JOBS` jobs, and that no range is empty.

    Args:
        overrides: the overrides of the sweep. If two overrides have the same key, the
            last one counts.

    Raises:
        ConfigError: a range has no values or the step 0, a key has an interval, or
            there are too many jobs.
    """
    jobs_by_key = {}
    for override in overrides:
        key = override.get_key_element()
        jobs_by_key[key] = 1
        if override.is_sweep_override():
            jobs_by_key[key] = _count(override)
    jobs = math.prod(jobs_by_key.values())
    if jobs > MOST_JOBS:
        largest = max(jobs_by_key, key=lambda key: jobs_by_key[key])
        rule = (
            f"must have fewer values: the sweep has {jobs:,} jobs, and at most "
            f"{MOST_JOBS:,} are allowed"
        )
        received = {
            override.get_key_element(): _text(override) for override in overrides
        }
        raise ConfigError(largest.lstrip("+~"), rule, received[largest])
    if jobs > _MANY_JOBS:
        say(f"composing {jobs:,} jobs")


def _count(override: Override) -> int:
    """Return the number of values of a choice or a range; 1 for any other sweep.

    Raises:
        ConfigError: a range has no values or the step 0, or it is an interval.
    """
    swept: Any = override.value()
    key = override.get_key_element().lstrip("+~")
    if override.is_interval_sweep():
        rule = (
            "must be a list of values, such as 0.01,0.1: an interval needs "
            "hydra/sweeper=search"
        )
        raise ConfigError(key, rule, _text(override))
    if isinstance(swept, ChoiceSweep):
        return len(swept.list)
    if not isinstance(swept, RangeSweep):
        return 1
    if swept.step == 0:
        rule = "must be a range with a step other than 0"
        raise ConfigError(key, rule, _text(override))
    assert swept.start is not None
    assert swept.stop is not None
    count = math.ceil((swept.stop - swept.start) / swept.step)
    if count <= 0:
        rule = "must be a range with at least one value"
        raise ConfigError(key, rule, _text(override))
    return count


def _text(override: Override) -> str:
    """Return the value of an override as it was typed."""
    return str(override.input_line).partition("=")[2]

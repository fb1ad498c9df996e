"""The horizon of a rerun, if the run was resumed with a different horizon.

The record has the horizon with which the run began; the tag `horizons` lists all
horizons of the run.
"""

import shlex
from dataclasses import replace

from pipeline.common import secrets
from pipeline.common.errors import ConfigError, say
from pipeline.config.overrides import keys_set
from pipeline.rerun.recorded_run import RecordedRun
from pipeline.rerun.request import Request
from pipeline.tracking import horizons


def requested(recorded: RecordedRun, request: Request) -> Request:
    """Return the request with the horizon that the run ended with.

    If the user's overrides have a horizon, the request is returned unchanged.

    Raises:
        ConfigError: the run had several horizons, and its learning rates depend on
            them. No single run repeats it.
    """
    if not keys_set(request.overrides).isdisjoint(horizons.KEYS):
        return request
    in_force = horizons.of_tags(recorded.run.data.tags)
    if not in_force:
        _check_finished_as_planned(recorded, request)
        return request

    last = in_force[-1].override
    is_repeatable = len(in_force) == 1
    if not is_repeatable and horizons.decides_rates(recorded.config, recorded.links):
        rule = (
            "must have a single horizon to be repeated, since its learning rates "
            f"depend on it, but had {horizons.described(in_force)}; to train with "
            f"only the last one: {_command(recorded, request, last)}"
        )
        raise ConfigError("RUN_ID", rule)
    say(f"  the run was resumed with {last}, which the rerun uses")
    return replace(request, overrides=[*request.overrides, last])


def _check_finished_as_planned(recorded: RecordedRun, request: Request) -> None:
    """Reject a finished run whose number of updates is not that of its record.

    Older versions could change a run's horizon in a resume without recording it.

    Raises:
        ConfigError: the numbers differ.
    """
    run = recorded.run
    tags = run.data.tags
    is_resumed = run.info.status == "FINISHED" and "segments" in tags
    if not is_resumed or "stopped_by" in tags:
        return
    updates = tags.get("updates", "")
    planned = run.data.params.get("derived.updates", updates)
    if updates == planned or not updates.isdecimal():
        return
    rule = (
        "must have a single horizon to be repeated, but began with a horizon of "
        f"{planned} updates, and ended after {updates}; to train with only the last "
        f"one: {_command(recorded, request, f'training.updates={updates}')}"
    )
    raise ConfigError("RUN_ID", rule)


def _command(recorded: RecordedRun, request: Request, horizon: str) -> str:
    """Return the command that reruns the run with a horizon, as the user asked."""
    options = [*request.own_config_options]
    options += [f"--allow={entry}" for entry in request.allow]
    overrides = [secrets.mask(override) for override in request.overrides]
    words = ["pipeline", "rerun", recorded.run_id, *options, *overrides, horizon]
    return shlex.join(words)

"""The horizons of a run that was resumed with a horizon other than its first.

The params of a run in MLflow cannot change, so they keep the first horizon. The tag
`horizons` has all horizons, as JSON, each with the update after which it began:

    [{"after": 0, "horizon": "training.epochs=600", "updates": 7200},
     {"after": 399, "horizon": "training.epochs=70", "updates": 840}]
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.config import plain, sizes
from pipeline.config.plan import ENDLESS
from pipeline.tracking.journal_lines import RunStart

TAG = "horizons"
KEYS = tuple(f"training.{unit}" for unit in sizes.HORIZONS)
_OVERRIDE = re.compile(r"(training\.[a-z]+)=([0-9]{1,10})")


@dataclass(frozen=True)
class RecordedHorizon:
    """The horizon towards which a part of a run was trained.

    Attributes:
        after: the number of updates completed before it applied.
        key: the config key, such as `training.epochs`.
        length: the value of the key.
        updates: the horizon in updates, or None if it is not known.
    """

    after: int
    key: str
    length: int
    updates: int | None

    @property
    def override(self) -> str:
        """The override that selects the horizon, such as `training.epochs=70`."""
        return f"{self.key}={self.length}"

    def entry(self) -> dict[str, Any]:
        """Return the entry of the tag, which is also a part of `segments.json`."""
        return {
            "after": self.after,
            "horizon": self.override,
            "updates": self.updates,
        }


def of_segment(after: int, horizon: sizes.Horizon, updates: int) -> RecordedHorizon:
    """Return the horizon of a segment of a run.

    Args:
        after: the number of updates completed before the segment.
        horizon: the horizon in the unit of the config.
        updates: the horizon in updates.
    """
    known = None if updates == ENDLESS else updates
    return RecordedHorizon(after, f"training.{horizon.unit}", horizon.length, known)


def of_run(
    start: RunStart, segments: Iterable[Mapping[str, Any]]
) -> list[RecordedHorizon]:
    """Return the horizons of a run, each with the update after which it applied.

    Horizons towards which no update was trained are left out. Older versions did not
    record the horizons of segments. For their runs, the first horizon is that of the
    params.

    Args:
        start: the description of the run.
        segments: the run's segments after the first one.
    """
    recorded = []
    first = _parsed(start.segment) or _of_params(start)
    if first is not None:
        recorded.append(first)
    for segment in segments:
        horizon = _parsed(segment)
        if horizon is not None:
            recorded.append(horizon)

    in_force: list[RecordedHorizon] = []
    for horizon in recorded:
        while in_force and in_force[-1].after >= horizon.after:
            in_force.pop()
        if not in_force or in_force[-1].override != horizon.override:
            in_force.append(horizon)
    return in_force


def of_tags(tags: Mapping[str, str]) -> list[RecordedHorizon]:
    """Return the horizons in the tag of a run; none if it has no such tag.

    The tag may come from a store that is not trusted: values that this package cannot
    have written are ignored.
    """
    try:
        entries = json.loads(tags.get(TAG, "[]"))
    except (ValueError, RecursionError):
        return []
    if not isinstance(entries, list):
        return []
    horizons = [_parsed(entry) for entry in entries]
    return [horizon for horizon in horizons if horizon is not None]


def tag(
    start: RunStart, horizons: Sequence[RecordedHorizon], tags: Collection[str]
) -> dict[str, str]:
    """Return the tag of a resumed run; no tag if its params hold its only horizon.

    Args:
        start: the description of the run.
        horizons: the horizons of the run; see `of_run`.
        tags: the tags that the run has.
    """
    first = _of_params(start)
    has_other = any(
        first is None or horizon.override != first.override for horizon in horizons
    )
    if not has_other and TAG not in tags:
        return {}
    return {TAG: json.dumps([horizon.entry() for horizon in horizons])}


def current_params(
    params: Mapping[str, str], tags: Mapping[str, str]
) -> dict[str, str]:
    """Return the params of a run, with the last of its horizons."""
    horizons = of_tags(tags)
    current = dict(params)
    if not horizons:
        return current
    last = horizons[-1]
    for key in KEYS:
        if key in current:
            current[key] = "null"
    current[last.key] = str(last.length)
    if last.updates is not None:
        current["derived.updates"] = str(last.updates)
    return current


def current_name(name: str, tags: Mapping[str, str]) -> str:
    """Return the name of a run, in which the first horizon is followed by the last.

    `digits epochs=600` becomes `digits epochs=600→70`, or `digits
    epochs=600→updates=840` if the unit is different. Other names are returned
    unchanged.
    """
    horizons = of_tags(tags)
    if len(horizons) < 2:
        return name
    first = plain.short(horizons[0].key, horizons[0].length)
    last: object = horizons[-1].length
    if horizons[-1].key != horizons[0].key:
        last = plain.short(horizons[-1].key, last)
    words = name.split(" ")
    if first in words:
        words[words.index(first)] = f"{first}→{last}"
    return " ".join(words)


def described(horizons: Sequence[RecordedHorizon]) -> str:
    """Return a text such as `training.epochs=600 and, after update 399, …`."""
    text = horizons[0].override
    for horizon in horizons[1:]:
        text += f" and, after update {horizon.after}, {horizon.override}"
    return text


def with_last(
    config: Mapping[str, Any], horizons: Sequence[RecordedHorizon]
) -> dict[str, Any]:
    """Return a recorded config with the last of the run's horizons."""
    if not horizons:
        return dict(config)
    last = horizons[-1]
    training = dict(config["training"])
    for unit in sizes.HORIZONS:
        training[unit] = None
    training[last.key.removeprefix("training.")] = last.length
    return {**config, "training": training}


def decides_rates(config: Mapping[str, Any], links: Mapping[str, str]) -> bool:
    """Return whether more than the length of a run depends on its horizon.

    Args:
        config: a recorded config.
        links: the recorded links between its keys.
    """
    groups = {name: config.get(name) or {} for name in ("schedule", "scaling")}
    for value in plain.leaves(groups).values():
        entries = value if isinstance(value, list) else [value]
        for entry in entries:
            if not isinstance(entry, str):
                continue
            if entry.endswith("%") or entry == sizes.REST:
                return True
    for link in links.values():
        if any(f"${{{key}}}" in link for key in KEYS):
            return True
    return False


def _of_params(start: RunStart) -> RecordedHorizon | None:
    """Return the horizon in the params of a run, or None if there is none."""
    for key in KEYS:
        text = str(start.params.get(key, ""))
        if text.isdecimal():
            planned = str(start.params.get("derived.updates"))
            updates = int(planned) if planned.isdecimal() else None
            after = start.segment.get("after", 0)
            return RecordedHorizon(after, key, int(text), updates)
    return None


def _parsed(entry: Any) -> RecordedHorizon | None:
    """Return the horizon in a segment, or in an entry of the tag, or None."""
    if not isinstance(entry, Mapping):
        return None
    match = _OVERRIDE.fullmatch(str(entry.get("horizon")))
    after = entry.get("after")
    updates = entry.get("updates")
    if match is None or match[1] not in KEYS or not isinstance(after, int):
        return None
    if not isinstance(updates, int):
        updates = None
    return RecordedHorizon(after, match[1], int(match[2]), updates)

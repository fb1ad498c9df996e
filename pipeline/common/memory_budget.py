"""The amount of memory that this process may use.

It is limited by the machine, by control groups, and by the limit of the address space.
"""

import math
import re
import resource
from contextlib import suppress
from pathlib import Path

import psutil

# The fraction of the memory that a trial of a micro-batch size may fill. The rest is
# for the parts of a run other than its updates.
MARGIN = 0.9
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B", re.ASCII)


def limit() -> int:
    """Return the limit of the resident memory in bytes.

    This is the lowest of the limits set by the machine and by control groups.
    """
    limits = [psutil.virtual_memory().total]
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            limits += _limits_of_group(controllers, Path(path.lstrip("/")))
    return min(limits)


def _limits_of_group(controllers: str, group: Path) -> list[int]:
    """Return the limits of a control group and of its parents, in bytes.

    `controllers` is the field of that name in /proc/self/cgroup. It is empty in version
    2 of control groups.
    """
    if "memory" in controllers.split(","):
        root = Path("/sys/fs/cgroup/memory")
        file = "memory.limit_in_bytes"
    elif not controllers:
        root = Path("/sys/fs/cgroup")
        file = "memory.max"
    else:
        return []
    limits = []
    for folder in (group, *group.parents):
        # The limit may be `max`, and a group may not be visible inside a container.
        with suppress(OSError, ValueError):
            limits.append(int((root / folder / file).read_text()))
    return limits


def address_space() -> int | None:
    """Return the limit of the address space in bytes, or None if there is no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft


def parsed(size: object) -> int | None:
    """Return the number of bytes in a size such as "8GiB", "500MB" or 1048576.

    The size is text with a unit, or a positive integer. Return None for anything else.
    """
    if isinstance(size, int) and not isinstance(size, bool):
        return size if size > 0 else None
    if not isinstance(size, str):
        return None
    match = _SIZE.fullmatch(size)
    if match is None:
        return None
    number, prefix, binary = match.groups()
    base = 1024 if binary else 1000
    exponent = " KMGT".index(prefix or " ")
    count = float(number) * base**exponent
    return int(count) if 1 <= count < math.inf else None


def readable(size: float) -> str:
    """Return a number of bytes with a unit, such as `1.5 GiB`."""
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"

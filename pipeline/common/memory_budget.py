"""How much memory this process may use: limits of the machine, its control group and its address space."""

import math
import re
import resource
from contextlib import suppress
from pathlib import Path

import psutil

MARGIN = (
    0.9  # share of the memory that a trial may fill: a run needs more than its updates
)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B", re.ASCII)


def limit() -> int:
    """Return how many bytes may be resident, by the machine and this process' control groups."""
    found = [psutil.virtual_memory().total]
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            root, name = Path("/sys/fs/cgroup"), "memory.max"
            if "memory" in controllers.split(","):
                root, name = root / "memory", "memory.limit_in_bytes"
            elif controllers:
                continue
            group = Path(path.lstrip("/"))
            for folder in (group, *group.parents):
                with suppress(
                    OSError, ValueError
                ):  # `max`, or a group that is not visible inside a container
                    found.append(int((root / folder / name).read_text()))
    return min(found)


def address_space() -> int | None:
    """Return the limit of this process' address space in bytes; None if there is none."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft


def parsed(size: object) -> int | None:
    """Return the bytes of a size such as `8GiB`, `500MB` or `1048576`; None if it is not a size."""
    if isinstance(size, int) and not isinstance(size, bool):
        return size if size > 0 else None
    found = _SIZE.fullmatch(size) if isinstance(size, str) else None
    if found is None:
        return None
    number, prefix, binary = found.groups()
    count = float(number) * (1024 if binary else 1000) ** " KMGT".index(prefix or " ")
    return int(count) if 1 <= count < math.inf else None


def readable(size: float) -> str:
    """Return a number of bytes with a unit, such as `1.5 GiB`."""
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"

"""The workers of a run: how many there are, where each listens, and which one this process is.

TF_CONFIG ─────────────┐
the step of a Slurm job ┼─► Cluster: an address for each worker, and this one's index; worker 0 is the chief
hardware.workers=N ────┘    (which starts the others, on this machine)
"""

import ipaddress
import json
import os
import re
import socket
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from pipeline.common import imports
from pipeline.common.errors import ConfigError, refused

KEY = "hardware.workers"
SECRET_FILE = "hardware.secret_file"
SECRET = (
    "PIPELINE_SECRET"  # environment variable: what all workers of a run have to know
)
SHORTEST_SECRET = 16  # bytes
_TF_CONFIG = 'JSON such as {"cluster": {"worker": ["host:port", "host:port"]}, "task": {"type": "worker", "index": 0}}'
_PORTS = range(
    20000, 32000
)  # of Slurm's chiefs: below those that Linux gives to whoever asks for any
_MOST_HERE = 256  # workers on this machine


@dataclass(frozen=True)
class Cluster:
    """All workers of a run, and which one this process is."""

    addresses: tuple[
        str, ...
    ]  # `host:port` of each worker's TensorFlow; for port 0 it takes a free one, and says so
    index: int = 0  # of this worker; 0 is the chief, which logs and writes checkpoints
    started: bool = (
        False  # whether the chief starts the other workers itself, on its machine
    )
    rendezvous: str = ""  # `host:port` where the chief waits for the others; empty: its own of `addresses`

    @property
    def is_chief(self) -> bool:
        return self.index == 0

    @property
    def index_on_machine(self) -> int:
        """Return the number of workers with a lower index on this machine."""
        return self._hosts[: self.index].count(self._hosts[self.index])

    @property
    def on_machine(self) -> int:
        return self._hosts.count(self._hosts[self.index])

    @property
    def _hosts(self) -> list[str]:
        return [address.rpartition(":")[0] for address in self.addresses]


def resolve(workers: int | None, environment: Mapping[str, str]) -> Cluster | None:
    """Return the workers of a run, on whose number `workers` and the environment agree; None for a single one."""
    if workers is not None and workers < 1:
        raise ConfigError(
            KEY, "must be at least 1, or null for what TF_CONFIG or Slurm says", workers
        )
    if workers == 1:
        return None
    found = None
    if text := environment.get("TF_CONFIG"):
        found = _of_tf_config(text)
    elif is_named(environment) and "SLURM_PROCID" in environment:
        found = _of_slurm(environment)
    if found is not None:
        if workers not in (None, len(found.addresses)):
            where = "TF_CONFIG" if text else "the step of this Slurm job"
            raise ConfigError(
                KEY, f"must be null, or the {len(found.addresses)} of {where}", workers
            )
        return found if len(found.addresses) > 1 else None
    if workers is None:
        rule = "must be a number where neither TF_CONFIG nor a step of a Slurm job (srun) says which workers there are"
        raise ConfigError(KEY, rule, None)
    if workers > _MOST_HERE:
        raise ConfigError(KEY, f"must be at most {_MOST_HERE} on one machine", workers)
    return Cluster(("127.0.0.1:0",) * workers, started=True)


def is_named(environment: Mapping[str, str]) -> bool:
    """Return whether the environment names the workers, so that this process starts none."""
    return (
        bool(environment.get("TF_CONFIG"))
        or int(environment.get("SLURM_STEP_NUM_TASKS") or 1) > 1
    )


def check_open_ports(allowed: bool) -> None:
    """Refuse several workers on a machine that others reach, unless the user has `allowed` TensorFlow's open ports."""
    if not allowed and (reached := reachable()):
        rule = f"must be true for several workers: TensorFlow opens a port of each on {', '.join(reached[:5])} without "
        rule += "a password, and whoever reaches it can read and write your files. hardware=multi_worker sets it, for "
        raise ConfigError(
            "hardware.open_ports",
            f"{rule}a private network; a namespace without one needs none",
            False,
        )


def reachable() -> list[str]:
    """Return the addresses of this machine, or of its network namespace, that are not of the loopback."""
    of_interfaces = (
        each for interface in psutil.net_if_addrs().values() for each in interface
    )
    found = (
        each.address
        for each in of_interfaces
        if each.family in (socket.AF_INET, socket.AF_INET6)
    )
    return [
        address
        for address in found
        if not ipaddress.ip_address(address.partition("%")[0]).is_loopback
    ]


def secret(file: str | None, environment: Mapping[str, str]) -> bytes:
    """Return what all workers of a run have to know: from the environment, else from a `file`; empty without either."""
    if (text := environment.get(SECRET)) is not None:
        if len(text) < SHORTEST_SECRET:
            raise ConfigError(
                SECRET, f"must have at least {SHORTEST_SECRET} characters"
            )
        return text.encode(errors="surrogateescape")
    if file is None:
        return b""
    with refused(SECRET_FILE, "must be a file that can be read", file):
        mode = os.stat(file).st_mode
        found = Path(file).read_bytes().strip() if stat.S_ISREG(mode) else b""
    if mode & 0o077 or len(found) < SHORTEST_SECRET:
        raise ConfigError(
            SECRET_FILE,
            f"must be a file of mode 0600 with at least {SHORTEST_SECRET} characters",
            file,
        )
    return found


def _of_tf_config(text: str) -> Cluster:
    try:
        given = json.loads(text)
        jobs, task = given["cluster"], given["task"]
        order = [job for job in ("chief", "worker") if job in jobs]
        addresses = tuple(str(address) for job in order for address in jobs[job])
        index = sum(len(jobs[job]) for job in order[: order.index(task["type"])]) + int(
            task["index"]
        )
        ports = [re.fullmatch(r".+:(\d{1,5})", address) for address in addresses]
        valid = all(
            port and 0 < int(port[1]) < 2**16 for port in ports
        ) and 0 <= index < len(addresses)
    except (ValueError, TypeError, KeyError, AttributeError):
        valid = False
    if not valid:
        raise ConfigError("TF_CONFIG", f"must be {_TF_CONFIG}", text)
    if len(set(addresses)) < len(addresses):
        raise ConfigError(
            "TF_CONFIG", "must give each worker an address of its own", list(addresses)
        )
    return Cluster(addresses, index)


def _of_slurm(environment: Mapping[str, str]) -> Cluster:
    """Return the tasks of a Slurm step in the order of their ranks; the chief's port follows from job and step."""
    nodes, tasks = (
        environment["SLURM_STEP_NODELIST"],
        environment["SLURM_STEP_TASKS_PER_NODE"],
    )
    if (names := imports.said("scontrol", "show", "hostnames", nodes)) is None:
        rule = "must be read by `scontrol show hostnames`, which has failed here"
        raise ConfigError("SLURM_STEP_NODELIST", rule, nodes)
    repeated = re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks)
    counts = [int(count) for count, times in repeated for _ in range(int(times or 1))]
    hosts = [
        host
        for host, count in zip(names.split(), counts, strict=True)
        for _ in range(count)
    ]
    number, node = int(environment["SLURM_PROCID"]), environment.get("SLURMD_NODENAME")
    if node not in (None, hosts[number]):
        rule = f"must be {hosts[number]}: the tasks have to be in blocks, srun --distribution=block"
        raise ConfigError("SLURMD_NODENAME", rule, node)
    # Jobs with other numbers may share a node; TensorFlow's ports are chosen on each.
    port = _PORTS[
        (
            int(environment["SLURM_JOB_ID"])
            + 1009 * int(environment.get("SLURM_STEP_ID") or 0)
        )
        % len(_PORTS)
    ]
    return Cluster(
        tuple(f"{host}:0" for host in hosts), number, rendezvous=f"{hosts[0]}:{port}"
    )

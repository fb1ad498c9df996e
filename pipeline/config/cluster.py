"""The workers of a run: their number, their addresses, and the index of this worker.

TF_CONFIG ──────────────┐
the step of a Slurm job ┼─► Cluster: the workers' addresses, and this worker's index
hardware.workers=N ─────┘

Worker 0 is the chief. With `hardware.workers=N`, the chief starts the other workers on
its own machine.
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
from typing import Any

import psutil

from pipeline.common import imports
from pipeline.common.errors import ConfigError, as_config_error

KEY = "hardware.workers"
SECRET_FILE = "hardware.secret_file"
# Environment variable with the secret that all workers of a run share.
SECRET = "PIPELINE_SECRET"
SHORTEST_SECRET = 16  # characters of the variable, or bytes of the file
_TF_CONFIG = (
    'JSON such as {"cluster": {"worker": ["host:port", "host:port"]}, '
    '"task": {"type": "worker", "index": 0}}'
)
# Ports of chiefs under Slurm. They lie below the ephemeral ports, which Linux may
# assign to any process.
_PORTS = range(20000, 32000)
_MOST_HERE = 256  # maximum number of workers on one machine


@dataclass(frozen=True)
class Cluster:
    """The workers of a run, and the index of the worker in this process.

    Attributes:
        addresses: `host:port` of each worker's TensorFlow server. For port 0, the
            worker chooses a free port and reports it to the chief.
        index: index of this worker; 0 is the chief, which logs and writes checkpoints.
        started: whether the chief starts the other workers itself, on its machine.
        rendezvous: `host:port` at which the chief waits for the other workers; if
            empty, the chief's entry in `addresses`.
    """

    addresses: tuple[str, ...]
    index: int = 0
    started: bool = False
    rendezvous: str = ""

    @property
    def is_chief(self) -> bool:
        return self.index == 0

    @property
    def index_on_machine(self) -> int:
        """The number of workers with a lower index on this machine."""
        return self._hosts[: self.index].count(self._hosts[self.index])

    @property
    def on_machine(self) -> int:
        """The number of workers on this machine."""
        return self._hosts.count(self._hosts[self.index])

    @property
    def _hosts(self) -> list[str]:
        return [address.rpartition(":")[0] for address in self.addresses]


def workers_of_run(
    workers: int | None, environment: Mapping[str, str]
) -> Cluster | None:
    """Return the workers of a run, or None if the run has a single worker.

    Args:
        workers: the value of `hardware.workers`, or None to read the environment.
        environment: the environment variables of this process.

    Raises:
        ConfigError: the number of workers is out of range, differs from that in the
            environment, or is given neither by `workers` nor by the environment; or the
            environment describes the workers wrongly.
    """
    if workers is not None and workers < 1:
        rule = "must be at least 1, or null to read TF_CONFIG or the Slurm step"
        raise ConfigError(KEY, rule, workers)
    if workers == 1:
        return None

    tf_config = environment.get("TF_CONFIG")
    named = None
    if tf_config:
        named = _tf_config_workers(tf_config)
    elif is_named(environment) and "SLURM_PROCID" in environment:
        named = _slurm_workers(environment)

    if named is not None:
        processes = len(named.addresses)
        if workers not in (None, processes):
            where = "TF_CONFIG" if tf_config else "the step of this Slurm job"
            rule = f"must be {processes}, as in {where}, or null"
            raise ConfigError(KEY, rule, workers)
        return named if processes > 1 else None

    if workers is None:
        rule = (
            "must be a number if neither TF_CONFIG nor a step of a Slurm job (srun) "
            "names the workers"
        )
        raise ConfigError(KEY, rule, None)
    if workers > _MOST_HERE:
        raise ConfigError(KEY, f"must be at most {_MOST_HERE} on one machine", workers)
    return Cluster(("127.0.0.1:0",) * workers, started=True)


def is_named(environment: Mapping[str, str]) -> bool:
    """Return whether the environment names the workers, by TF_CONFIG or a Slurm step.

    If it does, the chief does not start the other workers.

    Raises:
        ConfigError: the variable with the number of tasks in the Slurm step is not a
            number.
    """
    if environment.get("TF_CONFIG"):
        return True
    return _slurm_number(environment, "SLURM_STEP_NUM_TASKS", default=1) > 1


def check_open_ports(allowed: bool) -> None:
    """Reject several workers if other machines can reach this machine.

    Args:
        allowed: whether the user has allowed TensorFlow's open ports.

    Raises:
        ConfigError: open ports are not allowed, and this machine has an address that
            is not a loopback address.
    """
    if allowed:
        return
    addresses = reachable()
    if addresses:
        rule = (
            "must be true for several workers: for each worker, TensorFlow opens a "
            f"port on {', '.join(addresses[:5])} without a password, and anyone who "
            "can reach this port can read and write your files. On a private network, "
            "use hardware=multi_worker, which sets this key; in a namespace without a "
            "network, this key is not needed"
        )
        raise ConfigError("hardware.open_ports", rule, False)


def reachable() -> list[str]:
    """Return the IP addresses of this machine, except loopback addresses.

    In a network namespace, only the addresses of the namespace are returned.
    """
    addresses = []
    for interface in psutil.net_if_addrs().values():
        for entry in interface:
            if entry.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            address = entry.address
            if not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
                addresses.append(address)
    return addresses


def secret(file: str | None, environment: Mapping[str, str]) -> bytes:
    """Return the secret that the workers share, or `b""` if none is configured.

    Args:
        file: the file with the secret, or None if there is no file.
        environment: the environment variables; `PIPELINE_SECRET` outranks the file.

    Raises:
        ConfigError: the secret is too short, or the file is not a regular file, cannot
            be read, or is accessible to other users.
    """
    text = environment.get(SECRET)
    if text is not None:
        if len(text) < SHORTEST_SECRET:
            rule = f"must have at least {SHORTEST_SECRET} characters"
            raise ConfigError(SECRET, rule)
        return text.encode(errors="surrogateescape")
    if file is None:
        return b""

    content = b""
    with as_config_error(SECRET_FILE, "must be a file that can be read", file):
        mode = os.stat(file).st_mode
        if stat.S_ISREG(mode):
            content = Path(file).read_bytes().strip()
    if mode & 0o077 or len(content) < SHORTEST_SECRET:
        rule = f"must be a file of mode 0600 with at least {SHORTEST_SECRET} characters"
        raise ConfigError(SECRET_FILE, rule, file)
    return content


def _tf_config_workers(text: str) -> Cluster:
    """Return the cluster that TF_CONFIG describes.

    Raises:
        ConfigError: the text is malformed, or two workers have the same address.
    """
    try:
        cluster = _read_tf_config(json.loads(text))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        cluster = None
    if cluster is None:
        raise ConfigError("TF_CONFIG", f"must be {_TF_CONFIG}", text)
    if len(set(cluster.addresses)) < len(cluster.addresses):
        rule = "must give each worker an address of its own"
        raise ConfigError("TF_CONFIG", rule, list(cluster.addresses))
    return cluster


def _read_tf_config(content: Any) -> Cluster | None:
    """Return the cluster in TF_CONFIG, or None if the index or a port is invalid.

    Malformed content raises one of the errors that `_tf_config_workers` handles.
    """
    jobs = content["cluster"]
    task = content["task"]
    addresses: list[str] = []
    first_of_job = {}
    for job in ("chief", "worker"):
        if job in jobs:
            first_of_job[job] = len(addresses)
            addresses += [str(address) for address in jobs[job]]

    # Some launchers write the index as text.
    if isinstance(task["index"], bool | float):
        return None
    index = first_of_job[task["type"]] + int(task["index"])
    if not 0 <= index < len(addresses):
        return None
    for address in addresses:
        port = re.fullmatch(r".+:(\d{1,5})", address)
        if port is None or not 0 < int(port[1]) < 2**16:
            return None
    return Cluster(tuple(addresses), index)


def _slurm_workers(environment: Mapping[str, str]) -> Cluster:
    """Return the cluster of the tasks in a Slurm step, in the order of their ranks.

    Raises:
        ConfigError: a variable is missing or does not fit the others, the list of nodes
            cannot be read, or the tasks are not distributed over the nodes in blocks.
    """
    nodes = _slurm_text(environment, "SLURM_STEP_NODELIST")
    names = imports.output_of("scontrol", "show", "hostnames", nodes)
    if names is None:
        rule = "must be readable by `scontrol show hostnames`, which failed here"
        raise ConfigError("SLURM_STEP_NODELIST", rule, nodes)

    # `2(x3),1` means two tasks on each of three nodes, and one task on a fourth node.
    tasks = _slurm_text(environment, "SLURM_STEP_TASKS_PER_NODE")
    counts: list[int] = []
    for count, repeats in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks):
        counts += [int(count)] * int(repeats or 1)
    node_names = names.split()
    if len(counts) != len(node_names):
        rule = f"must have a number of tasks for each of the {len(node_names)} nodes"
        raise ConfigError("SLURM_STEP_TASKS_PER_NODE", rule, tasks)
    hosts: list[str] = []
    for host, count in zip(node_names, counts, strict=True):
        hosts += [host] * count

    rank = _slurm_number(environment, "SLURM_PROCID")
    if rank >= len(hosts):
        rule = f"must be below the number of tasks in the step, {len(hosts)}"
        raise ConfigError("SLURM_PROCID", rule, rank)
    node = environment.get("SLURMD_NODENAME")
    if node not in (None, hosts[rank]):
        rule = (
            f"must be {hosts[rank]}: distribute the tasks in blocks, with "
            "srun --distribution=block"
        )
        raise ConfigError("SLURMD_NODENAME", rule, node)

    # Derive the chief's port from the job and the step, as other jobs may share the
    # node. Each worker chooses the port of its TensorFlow server itself.
    job = _slurm_number(environment, "SLURM_JOB_ID")
    step = _slurm_number(environment, "SLURM_STEP_ID", default=0)
    port = _PORTS[(job + 1009 * step) % len(_PORTS)]
    addresses = tuple(f"{host}:0" for host in hosts)
    return Cluster(addresses, rank, rendezvous=f"{hosts[0]}:{port}")


def _slurm_text(environment: Mapping[str, str], name: str) -> str:
    """Return a variable that Slurm sets in each task of a step.

    Raises:
        ConfigError: the variable is missing or empty.
    """
    text = environment.get(name, "")
    if not text:
        raise ConfigError(
            name, "must be set in a task of a Slurm step: start the run with srun"
        )
    return text


def _slurm_number(
    environment: Mapping[str, str], name: str, default: int | None = None
) -> int:
    """Return a number that Slurm sets, or `default` if it is missing or empty.

    Raises:
        ConfigError: the variable is not a number, or is missing without a default.
    """
    if default is not None and not environment.get(name):
        return default
    text = _slurm_text(environment, name)
    if not re.fullmatch(r"\d{1,10}", text, re.ASCII):
        raise ConfigError(name, "must be a number of at least 0", text)
    return int(text)

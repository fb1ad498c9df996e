"""What a run records of its environment and its data, so that it can be rerun and differences can be named."""

from __future__ import annotations

import getpass
import hashlib
import itertools
import json
import os
import platform
import re
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline import __version__
from pipeline.common import imports, nvidia, secrets
from pipeline.common.errors import ConfigError
from pipeline.config import compose, key_kinds, plain, resolve
from pipeline.dataset.checksums import Files

if TYPE_CHECKING:
    from pipeline.dataset.splits import Data

LARGEST_DIFF = 1_000_000  # characters of a dirty tree's diff
MACHINE = (
    "python",
    "platform",
    "processor",
    "processors",
    "gpus",
    "driver",
    "cuda",
    "cudnn",
    "lock_file",
    "lock",
)
# The form of dataset.json.
DATASET = {
    "name": object,
    "version": object,
    "examples": {str: int},
    "files": {str: str},
    "content": {str: str},
}
NAMED = (
    "tensorflow",
    "keras",
    "numpy",
    "hydra-core",
    "omegaconf",
    "mlflow",
    "tensorflow-datasets",
    "scikit-learn",
)


HASH_VERSION = "v2:"  # begins a hash; one of version 1 begins with its first digit


def config_hash(resolved: Mapping[str, Any], run_dir: str | None) -> str:
    """Return a hash of what a config runs; runs that differ in place and log share it.

    It covers the keys of the training, the cut and the numerics. A key that the schema
    lacks counts as one of the training, so a key of these kinds may be renamed or
    removed, but no key may change its kind without a new version of the hash.

    Args:
        resolved: the plain config, without secrets, as it is recorded.
        run_dir: the run directory, whose path is left out of the hash.
    """
    covered = key_kinds.restricted(resolved, key_kinds.WHAT_RUNS)
    return HASH_VERSION + _sha256_of_config(covered, run_dir)


def config_hash_1(resolved: Mapping[str, Any], run_dir: str | None) -> str:
    """Return the hash of version 1, by which records of schema 1 and 2 are checked.

    It stays as it was, over the config as it was recorded, under its former names.
    """
    same = {
        key: value
        for key, value in resolved.items()
        if key not in ("tracking", "trust")
    }
    free = {"training": ("resume", "checkpoint_every"), "dataset": ("data_dir",)}
    free["hardware"] = ("open_ports", "secret_file", "gpu", "jobs_per_gpu")
    for group, left_out in free.items():
        if isinstance(same.get(group), dict):
            same[group] = {
                key: value for key, value in same[group].items() if key not in left_out
            }
    return _sha256_of_config(same, run_dir)


def has_hash(resolved: Mapping[str, Any], run_dir: str | None, recorded: str) -> bool:
    """Return whether a recorded config has the recorded hash, of either version."""
    if recorded.startswith(HASH_VERSION):
        return config_hash(resolved, run_dir) == recorded
    return config_hash_1(resolved, run_dir) == recorded


def _sha256_of_config(config: Mapping[str, Any], run_dir: str | None) -> str:
    text = json.dumps(config, sort_keys=True, default=str)
    if run_dir:
        text = text.replace(run_dir, "RUN_DIR")
    return hashlib.sha256(text.encode()).hexdigest()


def environment(run_dir: Path) -> dict[str, Any]:
    """Describe the interpreter, the machine, the code, every installed distribution, and the run directory."""
    # Not by their `metadata`, which parses all of each file. Of two with one name the first on the path is imported.
    texts = [
        dist.read_text("METADATA") or dist.read_text("PKG-INFO") or ""
        for dist in metadata.distributions()
    ]
    heads = (
        dict(re.findall(r"^(Name|Version): *(\S+)", text.partition("\n\n")[0], re.M))
        for text in texts[::-1]
    )
    found: dict[str, Any] = {
        "run_dir": str(run_dir.absolute()),
        "git": git(),
        "code": own_code(),
    }
    found |= {
        "python": platform.python_version(),
        "platform": platform.platform(),
        **_hardware(),
        **_lock(),
    }
    found["package"] = {"version": __version__, "sha256": _package_hash()}
    found["packages"] = dict(
        sorted({of["Name"]: of.get("Version") for of in heads if "Name" in of}.items())
    )
    return found


def segment(after: int, spec: resolve.RunSpec) -> dict[str, Any]:
    """Describe what may change when a run is resumed; `after` is the number of updates completed before."""
    hardware = {
        key: str(value)
        for key, value in plain.leaves(spec.recorded["hardware"]).items()
    }
    versions = {
        name: metadata.version(name) for name in ("tensorflow", "keras", "numpy")
    }
    return {
        "after": after,
        "cut": asdict(spec.batching),
        "hardware": hardware,
        "versions": versions,
    }


def differences(recorded: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return one line for each part of the environment that differs from the recorded one."""
    then, package, packages = (
        recorded.get(name) or {} for name in ("git", "package", "packages")
    )
    pairs = {
        key: (recorded[key], now[key])
        for key in MACHINE
        if key in recorded and key in now
    }
    pairs["commit"] = then.get("commit", "unknown"), now["git"].get("commit", "unknown")
    for name in sorted({*packages, *now["packages"]}):
        if name in NAMED or name.startswith("nvidia-"):
            pairs[name] = (
                packages.get(name, "absent"),
                now["packages"].get(name, "absent"),
            )
    lines = [
        f"{name}: {old} then, {new} now"
        for name, (old, new) in pairs.items()
        if old != new
    ]
    trees = {"then": then, "now": now["git"]}
    lines += [
        f"code: the tree was not clean {when}"
        for when, tree in trees.items()
        if tree.get("clean") is False
    ]
    for file, digest in (recorded.get("code") or {}).items():
        if (changed := _hash_on_path(str(file))) != digest:
            lines.append(
                f"code: {file} is {'not the recorded file' if changed else 'not found'}"
            )
    if package and package != now["package"]:
        ours = now["package"]["version"]
        lines.append(
            f"code: other files of the package, version {package.get('version')} then, {ours} now"
        )
    return lines


def git() -> dict[str, Any]:
    """Return commit and cleanliness of the working directory's repository, which is the user's; empty without one."""
    commit = _git("rev-parse", "HEAD")
    return (
        {}
        if commit is None
        else {"commit": commit, "clean": _git("status", "--porcelain") == ""}
    )


def own_code() -> dict[str, str]:
    """Return the SHA-256 of each imported file of the user's own, by its path below the folder that it was found in."""
    standard, found = sysconfig.get_path("stdlib"), {}
    for name, module in list(sys.modules.items()):
        file, parts = getattr(module, "__file__", None) or "", name.split(".")
        installed = (
            file.startswith(standard)
            or "/site-packages/" in file
            or "/dist-packages/" in file
        )
        # AutoGraph's modules begin with an underscore too.
        theirs = (
            installed
            or name.startswith("__")
            or parts[0] in ("pipeline", "hydra_plugins")
        )
        if file.endswith(".py") and not theirs:
            path = (
                "/".join(
                    [*parts, "__init__"] if Path(file).name == "__init__.py" else parts
                )
                + ".py"
            )
            if digest := _hash_on_path(path):
                found[path] = digest
    return dict(sorted(found.items()))


def _hash_on_path(file: str) -> str | None:
    """Return the SHA-256 of the file that Python would import; None without one. A record's name leads nowhere else."""
    if re.fullmatch(r"\w+(/\w+)*\.py", file):
        for folder in sys.path:
            if (path := Path(folder, file)).is_file():
                return hashlib.sha256(path.read_bytes()).hexdigest()
    return None


def diff() -> str:
    """Return `git diff HEAD` without secrets, cut at `LARGEST_DIFF` characters."""
    text = secrets.mask(_git("diff", "HEAD") or "")
    return (
        text
        if len(text) <= LARGEST_DIFF
        else f"{text[:LARGEST_DIFF]}\n… cut: {len(text)} characters in all\n"
    )


def dataset(
    data: Data,
    checksum: str = "full",
    *,
    files: Files | None = None,
    of_files: bool = True,
) -> dict[str, Any]:
    """Return name, version, sizes and checksums of a dataset: of its files, or of its examples if it has no files.

    The `checksum` is `full`, or `none` to omit them. With `of_files`, all files are read now; `files` keeps theirs.
    """
    wanted, files = checksum == "full", files or Files(data.files)
    if wanted and of_files:
        files.known()
    found = {
        "name": data.name,
        "version": data.version,
        "checksum": checksum,
        "files": files.checksums,
    }
    found["examples"] = {
        name: count for name in data.splits if (count := data.count(name)) is not None
    }
    hashed = data.splits if wanted and not data.files else {}
    return {
        **found,
        "content": {name: _content_hash(split) for name, split in hashed.items()},
    }


def check_dataset(
    recorded: Mapping[str, Any], now: Mapping[str, Any], run_id: str
) -> None:
    """Refuse data that differ from those of the recorded run; the error names the file or the split."""
    now = json.loads(secrets.mask(json.dumps(now)))  # as the recorded ones were
    for key in ("name", "version"):
        if recorded[key] != now[key]:
            raise ConfigError(
                "dataset",
                f"must have the {key} {recorded[key]!r} of run {run_id}",
                now[key],
            )
    for key, what in (
        ("files", "file"),
        ("content", "split"),
        ("examples", "number of examples of the split"),
    ):
        if key != "examples" and now.get("checksum") == "none":
            continue
        for name, value in recorded[key].items():
            if now[key].get(name) != value:
                found = now[key].get(name, "absent")
                raise ConfigError(
                    "dataset",
                    f"must be that of run {run_id}: the {what} {name} differs",
                    found,
                )


def origin() -> dict[str, str]:
    """Return the tags for the user, the command and the commit."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a number without a name, as in a container
        user = "unknown"
    command = " ".join(["pipeline", *map(secrets.mask, sys.argv[1:])])
    tags = {
        "mlflow.user": user,
        "mlflow.source.type": "LOCAL",
        "mlflow.source.name": command,
    }
    tags["package.version"] = __version__
    if tree := git():
        commit, clean = tree["commit"], str(tree["clean"]).lower()
        tags |= {
            "git.commit": commit,
            "git.clean": clean,
            "mlflow.source.git.commit": commit,
        }
    return tags


def _git(*arguments: str) -> str | None:
    # Without the option git refreshes the index, and a run that is killed meanwhile would leave the repository locked.
    return imports.said("git", "--no-optional-locks", *arguments)


def _hardware() -> dict[str, Any]:
    cpuinfo = Path("/proc/cpuinfo")
    models = (
        re.findall(r"^model name\s*: (.*)$", cpuinfo.read_text(), re.MULTILINE)
        if cpuinfo.exists()
        else []
    )
    answer = (
        imports.said(
            "nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"
        )
        or ""
    )
    gpus = [line.split(", ") for line in answer.splitlines() if ", " in line]
    found = {
        "processor": models[0] if models else platform.processor(),
        "processors": os.cpu_count(),
    }
    found |= {"gpus": [gpu[0] for gpu in gpus], "driver": gpus[0][1] if gpus else None}
    if (
        "tensorflow" in sys.modules
    ):  # importing it takes seconds; the versions of CUDA's packages are recorded anyway
        build = sys.modules["tensorflow"].sysconfig.get_build_info()
        found |= {
            "cuda": build.get("cuda_version"),
            "cudnn": build.get("cudnn_version"),
        }
        found["tf32"] = nvidia.computes_in_tf32()
    return found


def _package_hash() -> str:
    """Return the SHA-256 of the code and the configs, as an installed package has no repository."""
    package = Path(__file__).resolve().parents[1]
    folders = {
        package: "*.py",
        Path(compose.directory("conf")): "*.yaml",
        Path(compose.directory("sweeps")): "*.yaml",
    }
    found = hashlib.sha256()
    for folder, pattern in folders.items():
        for path in sorted(folder.rglob(pattern)):
            found.update(
                path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes()
            )
    return found.hexdigest()


def _lock() -> dict[str, str]:
    """Return name and SHA-256 of the lock that this environment was made from, a copy of which `make` leaves in it."""
    copies = [
        file
        for file in Path(sys.prefix).glob("requirements*.lock.installed")
        if file.stat().st_size
    ]
    last = max(
        copies, key=lambda file: file.stat().st_mtime, default=None
    )  # a later one was installed over the others
    return (
        {}
        if last is None
        else {
            "lock_file": last.stem,
            "lock": hashlib.sha256(last.read_bytes()).hexdigest(),
        }
    )


def _content_hash(split: Any) -> str:
    """Return the SHA-256 of all examples in order: 4 s for 0.6 GB of images, 0.1 ms for each ragged or sparse one."""
    import tensorflow as tf

    specs = tf.nest.flatten(split.element_spec)
    if all(
        isinstance(spec, tf.TensorSpec) and spec.shape.is_fully_defined()
        for spec in specs
    ):
        batches = split.batch(1024).as_numpy_iterator()
        examples = (
            example
            for batch in batches
            for example in zip(*tf.nest.flatten(batch), strict=True)
        )
    else:  # flat values and row splits of a ragged tensor; indices, values and shape of a sparse one
        flat = (tf.nest.flatten(example, expand_composites=True) for example in split)
        examples = (
            tuple(leaf.numpy() for leaf in example if leaf is not None)
            for example in flat
        )
    found = hashlib.sha256()
    for leaf in itertools.chain.from_iterable(examples):
        found.update(str(getattr(leaf, "shape", "")).encode())
        # The bytes of an array of strings are addresses; their `repr` shows where each string ends.
        texts = (
            leaf
            if isinstance(leaf, bytes)
            else leaf.tolist()
            if leaf.dtype.hasobject
            else None
        )
        found.update(leaf.tobytes() if texts is None else repr(texts).encode())
    return found.hexdigest()

"""Records the environment and the data of a run.

With this record, a run can be repeated, and differences can be listed.
"""

from __future__ import annotations

import getpass
import hashlib
import json
import os
import platform
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline import __version__
from pipeline.common import imports, nvidia, own_code, secrets
from pipeline.common.errors import ConfigError
from pipeline.config import compose, key_kinds, plain, resolve
from pipeline.dataset.checksums import DataFiles

if TYPE_CHECKING:
    from pipeline.dataset.splits import Data

LARGEST_DIFF = 1_000_000  # maximum number of characters of a recorded diff
# The keys of `environment` for the interpreter, the machine and the lock file, whose
# values `differences` compares.
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
# The keys of dataset.json and the types of their values.
DATASET = {
    "name": object,
    "version": object,
    "examples": {str: int},
    "files": {str: str},
    "records?": {str: str},
    "content": {str: str},
    "validations?": {str: {"name": object, "version": object}},
}
# The packages to compare, in addition to those whose names start with `nvidia-`.
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


_OWN_FILE = re.compile(r"\w+(/\w+)*\.py")  # matches the name of a file of code
HASH_TAG = "config.hash"  # tag of a run: the hash of its config
HASH_VERSION = "v2:"  # prefix of a config hash; a hash of version 1 has no prefix
# Keys that are newer than this version of the hash, each with the default that changes
# nothing. The hash leaves out a key with this default, so it equals the hash of a
# config without the key.
_NEWER_KEYS = {
    "accumulation.micro_batch_tokens": None,
    "dataset.lengths": None,
    "hardware.xla_lengths": None,
}


def config_hash(resolved: Mapping[str, Any], run_dir: str | None) -> str:
    """Return a hash of the part of a config that decides what a run computes.

    The hash covers the keys of the kinds in `key_kinds.WHAT_RUNS`, and keys that the
    schema lacks. It does not cover keys that only decide where the run takes place or
    how it is logged. The hashes in old records stay valid if a covered key is removed
    from the schema. If a key becomes covered, or is no longer covered, `HASH_VERSION`
    must change.

    Args:
        resolved: the recorded config: plain, resolved and without secrets.
        run_dir: the run directory; its path in values does not affect the hash.
    """
    covered = key_kinds.restricted(resolved, key_kinds.WHAT_RUNS)
    for key, default in _NEWER_KEYS.items():
        group, _, name = key.partition(".")
        values = covered.get(group)
        if isinstance(values, dict) and values.get(name) == default:
            values.pop(name, None)
    return HASH_VERSION + _sha256_of_config(covered, run_dir)


def config_hash_1(resolved: Mapping[str, Any], run_dir: str | None) -> str:
    """Return the hash of version 1, which records of schema 1 and 2 hold.

    This function must not change. It takes the config as it was recorded, with the
    former names of keys.
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
    """Return whether `recorded` is the hash of a config, in version 1 or 2."""
    hash_of_version = config_hash_1
    if recorded.startswith(HASH_VERSION):
        hash_of_version = config_hash
    try:
        return hash_of_version(resolved, run_dir) == recorded
    except TypeError:  # a key is not valid in JSON, so the config never had a hash
        return False


def _sha256_of_config(config: Mapping[str, Any], run_dir: str | None) -> str:
    text = json.dumps(config, sort_keys=True, default=str)
    if run_dir:
        text = text.replace(run_dir, "RUN_DIR")
    return hashlib.sha256(text.encode()).hexdigest()


def environment(run_dir: Path) -> dict[str, Any]:
    """Describe the interpreter, the machine, the code, and every installed package."""
    return {
        "run_dir": str(run_dir.absolute()),
        "git": git(),
        "code": hashes_of_own_code(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        **_hardware(),
        **_lock(),
        "package": {"version": __version__, "sha256": _package_hash()},
        "packages": _installed_packages(),
    }


def segment(after: int, spec: resolve.RunSpec) -> dict[str, Any]:
    """Describe the process and the settings, which may change when a run is resumed.

    Args:
        after: the number of updates completed before this segment.
        spec: the spec of the run in this segment.
    """
    hardware = {}
    for key, value in plain.leaves(spec.recorded["hardware"]).items():
        hardware[key] = str(value)
    versions = {}
    for name in ("tensorflow", "keras", "numpy"):
        versions[name] = metadata.version(name)
    return {
        "after": after,
        "cut": asdict(spec.batching),
        "hardware": hardware,
        "versions": versions,
        "code": hashes_of_own_code(),
        "pid": os.getpid(),
    }


def differences(recorded: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return one line for each difference between two environments.

    A working tree that was or is not clean counts as a difference.

    Args:
        recorded: the environment that a run recorded.
        now: the environment of this process; see `environment`.
    """
    lines = _different_values(recorded, now)
    trees = {
        "was not clean then": recorded.get("git") or {},
        "is not clean": now["git"],
    }
    for state, tree in trees.items():
        if tree.get("clean") is False:
            lines.append(f"code: the working tree {state}")

    for file, digest in (recorded.get("code") or {}).items():
        current = _current_hash(str(file))
        if current == digest:
            continue
        problem = "not the recorded file" if current else "not found"
        lines.append(f"code: {file} is {problem}")

    package = recorded.get("package") or {}
    if package and package != now["package"]:
        # The record has no hash of each file.
        version = package.get("version")
        version_now = now["package"]["version"]
        versions = f"version {version} then, {version_now} now"
        if version == version_now:
            versions = f"although its version is {version} as before"
        lines.append(f"code: the files of the package differ, {versions}")
    return lines


def _different_values(recorded: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return one line per difference in the machine, the commit or the main packages.

    The packages are those that may affect the results; see `NAMED`.
    """
    pairs = {}
    for key in MACHINE:
        if key in recorded and key in now:
            pairs[key] = (recorded[key], now[key])

    tree = recorded.get("git") or {}
    commit = tree.get("commit", "unknown")
    pairs["commit"] = (commit, now["git"].get("commit", "unknown"))

    packages = recorded.get("packages") or {}
    for name in sorted({*packages, *now["packages"]}):
        if name in NAMED or name.startswith("nvidia-"):
            old = packages.get(name, "absent")
            pairs[name] = (old, now["packages"].get(name, "absent"))

    lines = []
    for name, (old, new) in pairs.items():
        if old != new:
            lines.append(f"{name}: {old} then, {new} now")
    return lines


def changed_code(recorded: Mapping[str, Any]) -> list[str]:
    """Return the files of the user's code that have changed since they were recorded.

    Files that are no longer found are left out: if the run still needs them, the import
    has failed.

    Args:
        recorded: the SHA-256 of each file, by its name; see `hashes_of_own_code`.
    """
    changed = []
    for file, digest in recorded.items():
        current = _current_hash(file)
        if current is not None and current != digest:
            changed.append(file)
    return changed


def changes_of_code(segments: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return one line per segment whose code differs from that of the segment before.

    Only files that both segments have recorded are compared.

    Args:
        segments: the segments of the run; see `segment`. Segments that an older
            version recorded have no code.
    """
    lines = []
    before: Mapping[str, Any] = {}
    for entry in segments:
        code = entry.get("code") or {}
        changed = []
        for file, digest in code.items():
            if _OWN_FILE.fullmatch(str(file)) and before.get(file, digest) != digest:
                changed.append(file)
        if changed:
            lines.append(
                f"code: {', '.join(changed)} changed after update {entry['after']} of "
                "the run, when it was resumed"
            )
        before = code
    return lines


def git() -> dict[str, Any]:
    """Return the commit of the user's repository, and whether its tree is clean.

    The result is empty if the working directory is not in a repository with a commit,
    or if git is not installed.
    """
    commit = _git("rev-parse", "HEAD")
    if commit is None:
        return {}
    return {"commit": commit, "clean": _git("status", "--porcelain") == ""}


def hashes_of_own_code() -> dict[str, str]:
    """Return the SHA-256 of each imported Python file that is the user's own.

    These are the files that are neither installed nor part of this package, in any
    folder of `sys.path`. `__main__` is not included. In contrast,
    `logged_model.code_to_save` is limited to the working directory.

    The keys are the files' paths relative to their folder in `sys.path`.
    """
    hashes = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        if not file.endswith(".py") or not own_code.is_own(name, file):
            continue
        parts = name.split(".")
        if Path(file).name == "__init__.py":
            parts.append("__init__")
        path = "/".join(parts) + ".py"
        digest = _current_hash(path)
        if digest is not None:
            hashes[path] = digest
    return dict(sorted(hashes.items()))


def _current_hash(file: str) -> str | None:
    """Return the SHA-256 of a file of code as it is now, or None if it is not found.

    The file is the one that Python has imported, or else the one that it would import.
    The path may come from an untrusted record: a path that could leave the folders in
    `sys.path` is rejected.
    """
    if not _OWN_FILE.fullmatch(file):
        return None
    # An editable install may be in no folder of `sys.path`.
    name = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    imported = getattr(sys.modules.get(name), "__file__", None)
    candidates = [Path(folder, file) for folder in sys.path]
    if imported:
        candidates = [Path(imported)]
    for path in candidates:
        if path.is_file():
            return hashlib.sha256(path.read_bytes()).hexdigest()
    return None


def diff() -> str:
    """Return `git diff HEAD` without secrets, cut at `LARGEST_DIFF` characters."""
    text = secrets.mask(_git("diff", "HEAD") or "")
    if len(text) <= LARGEST_DIFF:
        return text
    return f"{text[:LARGEST_DIFF]}\n… cut: {len(text)} characters in all\n"


def dataset(
    data: Data,
    checksum: str = "full",
    *,
    files: DataFiles | None = None,
    of_files: bool = True,
) -> dict[str, Any]:
    """Return the record of a dataset: its name, version, sizes and checksums.

    There is a checksum per file, or per split if the split's dataset has no files. A
    TFRecord file may have a second one, of its examples.

    Args:
        data: the dataset.
        checksum: `full`, or `none` to compute no checksums.
        files: the files and the checksums that are already known.
        of_files: whether to compute the checksums of all files now. If not, only the
            known checksums are recorded.
    """
    is_wanted = checksum == "full"
    files = files or DataFiles(data.all_files)
    if is_wanted and of_files:
        files.compute_now()

    examples = {}
    for name in data.splits:
        count = data.count(name)
        if count is not None:
            examples[name] = count
    content = {}
    if is_wanted:
        for name, split in data.splits.items():
            if not data.files_of(name):
                content[name] = _content_hash(split)
    validations = {}
    for name, validation in data.validations.items():
        validations[name] = {"name": validation.name, "version": validation.version}
    return {
        "name": data.name,
        "version": data.version,
        "checksum": checksum,
        "files": files.checksums,
        "records": files.record_checksums,
        "examples": examples,
        "content": content,
        "validations": validations,
    }


def check_dataset(
    recorded: Mapping[str, Any], now: Mapping[str, Any], run_id: str
) -> None:
    """Reject data that differ from the data of a recorded run.

    If `now` was recorded without checksums, only the name, the version and the numbers
    of examples are compared. A file with other bytes is accepted if the checksums of
    its examples are equal.

    Args:
        recorded: the record of the run's data; see `dataset`.
        now: the record of the current data.
        run_id: the ID of the run, for the error.

    Raises:
        ConfigError: the data differ; the message names the difference.
    """
    now = json.loads(secrets.mask(json.dumps(now)))  # the recorded data are masked, too
    for key in ("name", "version"):
        if recorded[key] != now[key]:
            rule = f"must have the {key} {recorded[key]!r} of run {run_id}"
            raise ConfigError("dataset", rule, now[key])
    # Records of older versions have no validation sets.
    sets_now = now.get("validations") or {}
    for name, source in (recorded.get("validations") or {}).items():
        if sets_now.get(name) != source:
            rule = f"must be that of run {run_id}, {source}"
            received = sets_now.get(name, "absent")
            raise ConfigError(f"dataset.{name}", rule, received)

    kinds = {
        "files": "file",
        "content": "split",
        "examples": "number of examples of the split",
    }
    if now.get("checksum") == "none":
        del kinds["files"]
        del kinds["content"]
    for key, kind in kinds.items():
        for name, value in recorded[key].items():
            if now[key].get(name) == value:
                continue
            if key == "files" and _has_equal_records(recorded, now, name):
                continue
            rule = f"must be that of run {run_id}: the {kind} {name} differs"
            raise ConfigError("dataset", rule, now[key].get(name, "absent"))


def _has_equal_records(
    recorded: Mapping[str, Any], now: Mapping[str, Any], file: str
) -> bool:
    """Return whether two TFRecord files of this name are known to have equal examples.

    Records of older versions, and of large files, have no checksums of examples.
    """
    checksum = (recorded.get("records") or {}).get(file)
    return checksum is not None and checksum == (now.get("records") or {}).get(file)


def origin() -> dict[str, str]:
    """Return the tags for the user, the command, the package version and the commit."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user ID without a name, as in a container
        user = "unknown"
    arguments = [secrets.mask(argument) for argument in sys.argv[1:]]
    tags = {
        "mlflow.user": user,
        "mlflow.source.type": "LOCAL",
        "mlflow.source.name": " ".join(["pipeline", *arguments]),
        "package.version": __version__,
    }
    tree = git()
    if tree:
        tags["git.commit"] = tree["commit"]
        tags["git.clean"] = str(tree["clean"]).lower()
        tags["mlflow.source.git.commit"] = tree["commit"]
    return tags


def _git(*arguments: str) -> str | None:
    # Keep git from refreshing the index: a run that is killed meanwhile would leave the
    # repository locked.
    return imports.output_of("git", "--no-optional-locks", *arguments)


def _installed_packages() -> dict[str, str | None]:
    """Return the version of every installed distribution, by its name.

    The metadata files are searched as text. This is faster than the attribute
    `metadata`, which parses each file completely.
    """
    versions: dict[str, str | None] = {}
    for distribution in metadata.distributions():
        text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO")
        head = (text or "").partition("\n\n")[0]
        fields = dict(re.findall(r"^(Name|Version): *(\S+)", head, re.MULTILINE))
        # If two distributions have the same name, keep the first one on the path, since
        # Python imports the first one.
        if "Name" in fields and fields["Name"] not in versions:
            versions[fields["Name"]] = fields.get("Version")
    return dict(sorted(versions.items()))


def _hardware() -> dict[str, Any]:
    gpus = _gpus()
    driver = gpus[0][1] if gpus else None
    hardware: dict[str, Any] = {
        "processor": _processor(),
        "processors": os.cpu_count(),
        "gpus": [name for name, _ in gpus],
        "driver": driver,
    }
    # Do not import TensorFlow just for this: the import takes seconds, and the versions
    # of CUDA's packages are recorded anyway.
    if "tensorflow" in sys.modules:
        build = sys.modules["tensorflow"].sysconfig.get_build_info()
        hardware["cuda"] = build.get("cuda_version")
        hardware["cudnn"] = build.get("cudnn_version")
        hardware["tf32"] = nvidia.computes_in_tf32()
    return hardware


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        model = re.search(r"^model name\s*: (.*)$", cpuinfo.read_text(), re.MULTILINE)
        if model:
            return model[1]
    return platform.processor()


def _gpus() -> list[tuple[str, str]]:
    """Return the name and the driver version of each GPU of the machine."""
    query = ("--query-gpu=name,driver_version", "--format=csv,noheader")
    answer = imports.output_of("nvidia-smi", *query) or ""
    gpus = []
    for line in answer.splitlines():
        if ", " in line:
            name, driver = line.split(", ")[:2]
            gpus.append((name, driver))
    return gpus


def _package_hash() -> str:
    """Return the SHA-256 of this package's code and configs.

    The hash identifies an installed package, which has no repository and so no commit.
    """
    package = Path(__file__).resolve().parents[1]
    patterns = {
        package: "*.py",
        Path(compose.directory("conf")): "*.yaml",
        Path(compose.directory("sweeps")): "*.yaml",
    }
    total = hashlib.sha256()
    for folder, pattern in patterns.items():
        for path in sorted(folder.rglob(pattern)):
            name = path.relative_to(folder).as_posix()
            total.update(name.encode() + b"\0" + path.read_bytes())
    return total.hexdigest()


def _lock() -> dict[str, str]:
    """Return the name and the SHA-256 of the lock file that was installed last.

    `make` keeps a copy of each installed lock file in the environment. The result is
    empty if there is no copy.
    """
    copies = []
    for file in Path(sys.prefix).glob("requirements*.lock.installed"):
        if file.stat().st_size:
            copies.append(file)
    if not copies:
        return {}
    # Use the newest copy: its packages replaced those of the lock files before it.
    last = max(copies, key=lambda file: file.stat().st_mtime)
    digest = hashlib.sha256(last.read_bytes()).hexdigest()
    return {"lock_file": last.stem, "lock": digest}


def _content_hash(split: Any) -> str:
    """Return the SHA-256 of all examples of a split, in order.

    This takes 4 s for 0.6 GB of images, and 0.1 ms per ragged or sparse example.
    """
    total = hashlib.sha256()
    for leaf in _leaves(split):
        total.update(str(getattr(leaf, "shape", "")).encode())
        total.update(_leaf_bytes(leaf))
    return total.hexdigest()


def _leaves(split: Any) -> Iterator[Any]:
    """Yield the arrays or scalars of each example in turn."""
    import tensorflow as tf

    specs = tf.nest.flatten(split.element_spec)
    if all(_has_fixed_shape(spec) for spec in specs):
        for batch in split.batch(1024).as_numpy_iterator():
            for example in zip(*tf.nest.flatten(batch), strict=True):
                yield from example
        return
    # A ragged tensor is expanded to its flat values and row splits, a sparse tensor to
    # its indices, values and shape.
    for example in split:
        for leaf in tf.nest.flatten(example, expand_composites=True):
            if leaf is not None:
                yield leaf.numpy()


def _has_fixed_shape(spec: Any) -> bool:
    import tensorflow as tf

    return isinstance(spec, tf.TensorSpec) and spec.shape.is_fully_defined()


def _leaf_bytes(leaf: Any) -> bytes:
    # Use the `repr` of strings: the bytes of an array of strings are addresses, and
    # `repr` marks where each string ends.
    if isinstance(leaf, bytes):
        return repr(leaf).encode()
    if leaf.dtype.hasobject:
        return repr(leaf.tolist()).encode()
    return leaf.tobytes()

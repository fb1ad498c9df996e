"""Runs many command lines in one process, so that TensorFlow is loaded once.

    python -m tests.one_process < lines.json

It reads a list of command lines without `pipeline`, and prints a list of results. Each
line goes through the `main` of `pipeline …`, with the same parsing and the same file
descriptors. Tests call it by `tests.running.one_process`.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import shlex
import sys
import tempfile
from pathlib import Path

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.hydra import Hydra

from pipeline.__main__ import main

HEAVY = ("tensorflow", "keras", "mlflow")


def run(line: str) -> dict:
    """Run one command line in this process and this folder.

    Returns:
        its exit status (`status`), what it wrote to the two streams (`out`, `err`), the
        paths of this folder that it changed (`changed`), and the names of `HEAVY` that
        are loaded by now (`loaded`).
    """
    before = tree(Path())
    real_out = os.dup(1)
    real_err = os.dup(2)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        try:
            status = main(shlex.split(line))
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os.dup2(real_out, 1)
            os.dup2(real_err, 2)
            os.close(real_out)
            os.close(real_err)

        out.seek(0)
        err.seek(0)
        out_text = out.read().decode()
        err_text = err.read().decode()

    changes = before.items() ^ tree(Path()).items()
    return {
        "status": status,
        "out": out_text,
        "err": err_text,
        "changed": sorted({path for path, _ in changes}),
        "loaded": [name for name in HEAVY if name in sys.modules],
    }


def tree(folder: Path) -> dict[str, str]:
    """Return the hash of each file below `folder` by path; "folder" for a folder."""
    contents = {}
    for path in sorted(folder.rglob("*")):
        if "__pycache__" in path.parts:
            continue
        if path.is_file():
            contents[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest()
        else:
            contents[str(path)] = "folder"
    return contents


def compose_once() -> None:
    """Let Hydra compose each line once, and read each config file once.

    To learn whether a line is a multirun, Hydra composes all of it. Without that answer
    it looks for --multirun, which gives the same result unless a line sets hydra.mode.
    """
    load = FileConfigSource.load_config
    loaded_configs = {}

    def load_once(self: FileConfigSource, config_path: str) -> object:
        key = (self.path, config_path)
        if key not in loaded_configs:
            loaded_configs[key] = load(self, config_path)
        return copy.deepcopy(loaded_configs[key])

    FileConfigSource.load_config = load_once
    Hydra.get_mode = lambda *_, **__: None


if __name__ == "__main__":
    compose_once()
    results = [run(line) for line in json.load(sys.stdin)]
    json.dump(results, sys.stdout)

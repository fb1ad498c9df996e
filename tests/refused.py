"""Runs many command lines in one process, so that TensorFlow is loaded once: `python -m tests.refused < lines.json`.

What each gets is what `pipeline …` does with it: the same `main`, the same parsing, the same file descriptors.
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
    """Status, what was written to either stream, and what changed in this folder."""
    before, kept = tree(Path()), [os.dup(1), os.dup(2)]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        try:
            status = main(shlex.split(line))
        finally:
            for stream, descriptor, real in zip(
                (sys.stdout, sys.stderr), (1, 2), kept, strict=True
            ):
                stream.flush()
                os.dup2(real, descriptor)
                os.close(real)
        texts = [(stream.seek(0), stream.read().decode())[1] for stream in (out, err)]
    changed = sorted({path for path, _ in before.items() ^ tree(Path()).items()})
    loaded = [name for name in HEAVY if name in sys.modules]
    return {
        "status": status,
        "out": texts[0],
        "err": texts[1],
        "changed": changed,
        "loaded": loaded,
    }


def tree(folder: Path) -> dict[str, str]:
    """Every file with the hash of what is in it, and every folder."""
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        if path.is_file()
        else "folder"
        for path in sorted(folder.rglob("*"))
        if "__pycache__" not in path.parts
    }


def compose_once() -> None:
    """Let Hydra compose each line once, and read each config file once.

    To learn whether a line is a multirun, Hydra composes all of it; without the answer it looks for --multirun, which
    says the same of all lines but those with hydra.mode.
    """
    load, seen = FileConfigSource.load_config, {}

    def loaded(self: FileConfigSource, config_path: str) -> object:
        key = self.path, config_path
        if key not in seen:
            seen[key] = load(self, config_path)
        return copy.deepcopy(seen[key])

    FileConfigSource.load_config = loaded
    Hydra.get_mode = lambda *_, **__: None


if __name__ == "__main__":
    compose_once()
    answers = [run(line) for line in json.load(sys.stdin)]
    json.dump(answers, sys.stdout)

"""The command lines that the examples show."""

from __future__ import annotations

import ast
import shlex
from pathlib import Path


def command_on_top_of(file: Path) -> list[str]:
    """Return the arguments of `pipeline` in the docstring of an example's module.

    The line there is `cd FOLDER && pipeline ARGUMENTS`.
    """
    tree = ast.parse(file.read_text(encoding="utf-8"))
    _, command = ast.get_docstring(tree).split("&& pipeline ")
    return shlex.split(command.splitlines()[0])

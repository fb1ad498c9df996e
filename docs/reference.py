"""A Sphinx extension that generates parts of pages from the sources.

The parts are the config reference and the list of modules. A page holds an empty fence
such as ```` ```{config-keys} ````; the generated Markdown takes its place.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import NoneType
from typing import Any, get_args

from omegaconf import OmegaConf
from sphinx.application import Sphinx

from pipeline.config import compose, key_guide, key_kinds
from pipeline.config.plain import value_at
from pipeline.config.schema import ShownConfig, keys_in

ROOT = Path(__file__).resolve().parent.parent
CONF = ROOT / "conf"
# The groups of the config that are nodes: their keys are the arguments of a target.
_NODES = ("dataset", "model", "optimizer", "schedule")


@dataclass(frozen=True)
class Row:
    """A config key as the reference lists it; `kind` is its type as YAML has it."""

    key: str
    kind: str
    default: str
    description: str

    def cells(self) -> list[str]:
        """Return the cells of the row: all but the description are code."""
        as_code = [_code(self.key), _code(self.kind), _code(self.default)]
        return [*as_code, self.description]


def setup(app: Sphinx) -> None:
    """Register what this extension adds; Sphinx calls it."""
    app.connect("source-read", _fill)


def _fill(app: Sphinx, page: str, content: list[str]) -> None:
    """Replace the empty fences of a page by what is generated for them."""
    for fence, generate in FENCES.items():
        empty = f"```{{{fence}}}\n```"
        if empty in content[0]:
            content[0] = content[0].replace(empty, generate())


def config_keys() -> str:
    """Return a table for each group of keys in `key_guide`."""
    hints = {key.name: key.hint for key in keys_in(ShownConfig)}
    composition = compose.composition([])
    values: Any = OmegaConf.to_container(composition.config, enum_to_str=True)
    tables = []
    for group in key_guide.KEY_GROUPS:
        rows = []
        for key in group.keys:
            description = key_guide.described(key, CONF)
            default = composition.chosen.get(key) or _shown(value_at(values, key))
            kind = description.kind or _type(hints.get(key, float))
            rows.append(Row(key, kind, default, description.text))
        tables.append(f"### {group.title}\n\n{group.reader}\n\n{_table(rows)}")
    return "\n\n".join(tables)


def kept_keys() -> str:
    """Return the list of the keys that a resumed run must keep."""
    kept = ["accumulation.effective_batch_size"]
    for key in key_kinds.keys_where(lambda key_facts: key_facts.fixed):
        group = key.partition(".")[0]
        if group not in _NODES:
            kept.append(key)
    names = [f"`{group}.*`" for group in _NODES] + [f"`{key}`" for key in sorted(kept)]
    return f"{', '.join(names)}."


def dataset_keys() -> str:
    """Return a table of the keys of conf/dataset/tfds.yaml with their comments."""
    rows = []
    for key in key_guide.choice_keys(CONF / "dataset" / "tfds.yaml"):
        rows.append(Row(f"dataset.{key.name}", "", key.value, key.comment))
    return _table(rows)


def argument_keys() -> str:
    """Return a table of the arguments in the choices of model, optimizer, schedule."""
    tables = []
    for group in ("model", "optimizer", "schedule"):
        lines = [f"### {group}\n", "| key | default | description |"]
        lines.append("| --- | --- | --- |")
        for name, choices_by_default in _defaults_in(CONF / group).items():
            key = f"{group}.{name}"
            defaults = []
            for default, choices in choices_by_default.items():
                defaults.append(f"`{default}` in {', '.join(choices)}")
            text = _escaped(key_guide.described(key, CONF).text)
            lines.append(f"| `{key}` | {'; '.join(defaults)} | {text} |")
        tables.append("\n".join(lines))
    return "\n\n".join(tables)


def _defaults_in(folder: Path) -> dict[str, dict[str, list[str]]]:
    """Return the choices with each default, by the name of the key and the default."""
    defaults_by_name: dict[str, dict[str, list[str]]] = {}
    for file in sorted(folder.glob("*.yaml")):
        for key in key_guide.choice_keys(file):
            choices_by_default = defaults_by_name.setdefault(key.name, {})
            # A value without text on the line of its key is a list below it.
            choices = choices_by_default.setdefault(key.value or "[…]", [])
            choices.append(file.stem)
    return defaults_by_name


def config_groups() -> str:
    """Return a table of the choices of each group in conf/, described by their files.

    A group with one choice is left out.
    """
    tables = []
    for folder in sorted(CONF.iterdir()):
        files = sorted(folder.glob("*.yaml"))
        if len(files) < 2:
            continue
        lines = [f"### Choices for {folder.name}\n"]
        lines += ["| choice | description |", "| --- | --- |"]
        for file in files:
            lines.append(f"| `{folder.name}={file.stem}` | {_header(file)} |")
        tables.append("\n".join(lines))
    return "\n\n".join(tables)


def modules() -> str:
    """Return the packages from the top down: their docstrings, and a line a module."""
    from tests.test_architecture import PACKAGES

    parts = []
    for package in PACKAGES[1:]:  # the first is `__main__`, a module
        folder = ROOT / "pipeline" / package
        lines = [f"### {folder.name}\n\n{_docstring(folder / '__init__.py')}\n"]
        lines += ["| module | description |", "| --- | --- |"]
        for file in sorted(folder.rglob("*.py")):
            if file.name != "__init__.py":
                module = file.relative_to(folder).with_suffix("").as_posix()
                lines.append(f"| `{module}` | {_first_paragraph(file)} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


FENCES: dict[str, Callable[[], str]] = {
    "config-keys": config_keys,
    "kept-keys": kept_keys,
    "dataset-keys": dataset_keys,
    "argument-keys": argument_keys,
    "config-groups": config_groups,
    "modules": modules,
}


def _type(hint: Any) -> str:
    """Return a type as YAML has it: the choices of an enumeration, `null` for None."""
    if isinstance(hint, type) and issubclass(hint, Enum):
        return " | ".join(hint.__members__)
    if NoneType in get_args(hint):
        return " | ".join(map(_type, get_args(hint)))
    names = {
        "NoneType": "null",
        "bool": "true | false",
        "str": "text",
        "dict": "mapping",
    }
    return names.get(hint.__name__, hint.__name__)


def _shown(default: Any) -> str:
    """Return a default as YAML has it.

    A mapping that is not empty, such as a node, is too long for a cell.
    """
    if isinstance(default, dict) and default:
        return "{…}"
    if default is None:
        return "null"
    if isinstance(default, bool):
        return str(default).lower()
    return str(default)


def _table(rows: Iterable[Row]) -> str:
    """Return a Markdown table; a column that is empty in all rows is left out."""
    titles = ["key", "type", "default", "description"]
    cells = [row.cells() for row in rows]
    used = []
    for column in range(len(titles)):
        if any(line[column] for line in cells):
            used.append(column)

    lines = []
    for line in [titles, ["---"] * len(titles), *cells]:
        columns = [_escaped(line[column]) for column in used]
        lines.append(f"| {' | '.join(columns)} |")
    return "\n".join(lines)


def _code(text: str) -> str:
    if not text:
        return ""
    return f"`{text}`"


def _escaped(text: str) -> str:
    """Return a text as it stands in a cell of a Markdown table."""
    return text.replace("|", "\\|")


def _header(file: Path) -> str:
    """Return the first sentence of a config file's first comment.

    The lines for Hydra and with the command are left out.
    """
    text = file.read_text(encoding="utf-8").partition("\n\n")[0]
    lines = []
    for line in text.splitlines():
        if line.startswith("# ") and not line.startswith(("# @package", "# Run:")):
            lines.append(line.removeprefix("# "))
    return re.split(r"(?<=[.]) (?=[A-Z])", " ".join(lines))[0]


def _docstring(file: Path) -> str:
    return ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""


def _first_paragraph(file: Path) -> str:
    """Return the first paragraph of a module's docstring, in one line."""
    paragraph = _docstring(file).partition("\n\n")[0]
    return _escaped(" ".join(paragraph.split()))

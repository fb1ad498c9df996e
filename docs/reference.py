"""A Sphinx extension that generates parts of pages from the sources.

The parts are the config reference and the list of modules. A page holds an empty fence
such as ```` ```{config-keys} ````; the generated Markdown takes its place.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from enum import Enum
from inspect import getsource
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

from omegaconf import MISSING as REQUIRED
from omegaconf import OmegaConf
from sphinx.application import Sphinx

from pipeline.config import key_kinds
from pipeline.config.schema import Config, group_in

ROOT = Path(__file__).resolve().parent.parent
CONF = ROOT / "conf"


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
    """Return a table for each typed group of the schema, and one for the other keys."""
    # At the top level are nodes too, such as `model`, whose keys are their target's.
    top_level = [row for row in _rows(Config, "", _defaults("")) if row.kind == "int"]
    tables = [f"### top level\n\n{_table(top_level)}"]
    for name, kind in get_type_hints(Config).items():
        if is_dataclass(kind):
            rows = _rows(kind, f"{name}.", _defaults(name))
            tables.append(f"### {name}\n\n{_table(rows)}")
    return "\n\n".join(tables)


def dataset_keys() -> str:
    """Return a table of the keys of conf/dataset/tfds.yaml with their comments."""
    text = (CONF / "dataset" / "tfds.yaml").read_text(encoding="utf-8")
    rows = []
    for line in text.splitlines():
        match = re.fullmatch(r"(\w+): (.*?)(?: +# (.*))?", line)
        if match:
            key, default, comment = match.groups()
            rows.append(Row(f"dataset.{key}", "", default, comment or ""))
    return _table(rows)


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
    "dataset-keys": dataset_keys,
    "config-groups": config_groups,
    "modules": modules,
}


def undescribed() -> list[str]:
    """Return the keys in the config reference without a description.

    A test requires that there are none.
    """
    return re.findall(r"^\| `(\S+)` .*\|  \|$", config_keys(), re.MULTILINE)


def _rows(kind: Any, prefix: str, defaults: dict[str, Any]) -> Iterator[Row]:
    """Yield a row for each field of a dataclass, those of nested ones included.

    At the top level, where there is no prefix, nested dataclasses are left out: each is
    a group with a table of its own.
    """
    comments = _comments(kind)
    hints = get_type_hints(kind)
    for field in fields(kind):
        hint = hints[field.name]
        key = f"{prefix}{field.name}"
        nested = group_in(hint)
        if nested is None:
            if not key_kinds.facts_of(key).set_by_a_sweep:
                default = defaults.get(field.name, _default(field))
                yield _row(key, hint, default, comments.get(field.name, ""))
        elif prefix:
            yield from _rows(nested, f"{key}.", defaults.get(field.name) or {})


def _row(key: str, hint: Any, default: Any, comment: str) -> Row:
    """Return the row of a key. Its comment may begin with its type, in brackets."""
    kind = _type(hint)
    match = re.match(r"\((.+?)\) ", comment)
    if match:
        kind = match[1]
        comment = comment[match.end() :]
    return Row(key, kind, _shown(default), comment)


def _comments(kind: type) -> dict[str, str]:
    """Return the comment of each field, from its own line or from those above it."""
    comments: dict[str, str] = {}
    above: list[str] = []
    sources = [getsource(base) for base in kind.__mro__ if is_dataclass(base)]
    for line in "\n".join(sources).splitlines():
        if match := re.match(r"    (\w+): [^#]*(?:# (.*))?$", line):
            comments[match[1]] = match[2] or " ".join(above)
        if line.strip().startswith("#"):
            above.append(line.strip().removeprefix("# "))
        else:
            above = []
    return comments


def _defaults(group: str) -> dict[str, Any]:
    """Return what the default choice of a group sets; without a group, the top level.

    The schema's defaults give way to it.
    """
    config = _loaded(CONF / "config.yaml")
    if not group:
        return config
    chosen: dict[str, str] = {}
    for entry in config["defaults"]:
        if isinstance(entry, dict):
            chosen |= entry

    folders = [group]
    if group == "training":
        folders.append("objective")  # which is packaged into `training`
    values = dict(config.get(group) or {})
    for folder in folders:
        if folder in chosen:
            values |= _loaded(CONF / folder / f"{chosen[folder]}.yaml")
    return values


def _loaded(file: Path) -> dict[str, Any]:
    values: Any = OmegaConf.to_container(OmegaConf.load(file))
    return values


def _default(field: Field) -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return field.default


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
    if isinstance(default, Enum):
        return default.name
    if default == REQUIRED:
        return ""
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

"""A Sphinx extension that generates parts of pages from the sources: the config reference and the list of modules.

A page holds an empty fence such as ```` ```{config-keys} ````; the generated Markdown takes its place.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from inspect import getsource
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

from omegaconf import MISSING as REQUIRED
from omegaconf import OmegaConf
from sphinx.application import Sphinx

from pipeline.config import key_kinds
from pipeline.config.schema import Config

ROOT = Path(__file__).resolve().parent.parent
CONF = ROOT / "conf"
Row = tuple[str, str, str, str]  # key, type, default, description


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _fill)


def _fill(app: Sphinx, page: str, content: list[str]) -> None:
    for fence, generate in FENCES.items():
        if (empty := f"```{{{fence}}}\n```") in content[0]:
            content[0] = content[0].replace(empty, generate())


def config_keys() -> str:
    """Return a table of keys for each typed group of the schema, and one for the keys outside of groups."""
    groups = {
        name: kind
        for name, kind in get_type_hints(Config).items()
        if is_dataclass(kind)
    }
    top = [row for row in _rows(Config, "", _defaults("")) if row[1] == "int"]
    tables = {"top level": top} | {
        name: list(_rows(kind, f"{name}.", _defaults(name)))
        for name, kind in groups.items()
    }
    return "\n\n".join(f"### {name}\n\n{_table(rows)}" for name, rows in tables.items())


def dataset_keys() -> str:
    """Return a table of the keys of conf/dataset/tfds.yaml with their comments."""
    lines = (CONF / "dataset" / "tfds.yaml").read_text(encoding="utf-8").splitlines()
    found = [
        match
        for line in lines
        if (match := re.fullmatch(r"(\w+): (.*?)(?: +# (.*))?", line))
    ]
    return _table(
        [
            (f"dataset.{key}", "", default, text or "")
            for key, default, text in (m.groups() for m in found)
        ]
    )


def config_groups() -> str:
    """Return a table of the choices of each group in conf/, with the first sentence of each file."""
    folders = {
        folder.name: sorted(folder.glob("*.yaml"))
        for folder in sorted(CONF.iterdir())
        if folder.is_dir()
    }
    return "\n\n".join(
        f"### Choices for {name}\n\n| choice | description |\n| --- | --- |\n"
        + "\n".join(f"| `{name}={file.stem}` | {_header(file)} |" for file in files)
        for name, files in folders.items()
        if len(files) > 1
    )


def modules() -> str:
    """Return the packages from the top down: their docstrings, and a line a module."""
    from tests.test_architecture import PACKAGES

    parts = []
    for package in PACKAGES[1:]:  # the first is `__main__`, a module
        folder = ROOT / "pipeline" / package
        files = sorted(
            file for file in folder.rglob("*.py") if file.name != "__init__.py"
        )
        lines = [
            f"| `{file.relative_to(folder).with_suffix('').as_posix()}` | {_first(file)} |"
            for file in files
        ]
        parts.append(
            f"### {folder.name}\n\n{_docstring(folder / '__init__.py')}\n\n| module | description |\n| --- | --- |"
        )
        parts[-1] += "\n" + "\n".join(lines)
    return "\n\n".join(parts)


FENCES: dict[str, Callable[[], str]] = {
    "config-keys": config_keys,
    "dataset-keys": dataset_keys,
    "config-groups": config_groups,
    "modules": modules,
}


def undescribed() -> list[str]:
    """Return the keys in the config reference that have no description: a test requires that there are none."""
    return re.findall(r"^\| `(\S+)` .*\|  \|$", config_keys(), re.MULTILINE)


def _rows(kind: Any, prefix: str, defaults: dict[str, Any]) -> Iterator[Row]:
    """Yield a row for each field of a dataclass, those of nested dataclasses included."""
    comments, hints = _comments(kind), get_type_hints(kind)
    for field in fields(kind):
        hint, key = hints[field.name], f"{prefix}{field.name}"
        nested = next(
            (part for part in (hint, *get_args(hint)) if is_dataclass(part)), None
        )
        if nested is not None and prefix:
            yield from _rows(nested, f"{key}.", defaults.get(field.name) or {})
        elif nested is None and not key_kinds.facts_of(key).set_by_a_sweep:
            typed, text = re.fullmatch(
                r"(?:\((.*?)\) )?(.*)", comments.get(field.name, ""), re.DOTALL
            ).groups()  # type: ignore[union-attr]
            yield (
                key,
                typed or _type(hint),
                _shown(defaults.get(field.name, _default(field))),
                text,
            )


def _comments(kind: type) -> dict[str, str]:
    """Return the comment of each field, from its own line or from those above it."""
    found: dict[str, str] = {}
    above: list[str] = []
    sources = [getsource(base) for base in kind.__mro__ if is_dataclass(base)]
    for line in "\n".join(sources).splitlines():
        if match := re.match(r"    (\w+): [^#]*(?:# (.*))?$", line):
            found[match[1]] = match[2] or " ".join(above)
        above = (
            [*above, line.strip().removeprefix("# ")]
            if line.strip().startswith("#")
            else []
        )
    return found


def _defaults(group: str) -> dict[str, Any]:
    """Return what the default choice of a group sets, which the schema's defaults give way to."""
    config: Any = OmegaConf.to_container(OmegaConf.load(CONF / "config.yaml"))
    if not group:
        return config
    chosen = {
        key: value
        for entry in config["defaults"]
        if isinstance(entry, dict)
        for key, value in entry.items()
    }
    folders = (
        [group, "objective"] if group == "training" else [group]
    )  # `objective` is packaged into `training`
    found = dict(config.get(group) or {})
    for folder in (folder for folder in folders if folder in chosen):
        found |= OmegaConf.to_container(
            OmegaConf.load(CONF / folder / f"{chosen[folder]}.yaml")
        )  # type: ignore[arg-type]
    return found


def _default(field: Field) -> Any:
    return (
        field.default_factory()
        if field.default_factory is not MISSING
        else field.default
    )


def _type(hint: Any) -> str:
    """Return a type as YAML has it: the choices of an enumeration, `null` for None."""
    if isinstance(hint, type) and issubclass(hint, Enum):
        return " | ".join(hint.__members__)
    if NoneType in get_args(hint):
        return " | ".join(map(_type, get_args(hint)))
    names = {NoneType: "null", bool: "true | false", str: "text"}
    return names.get(hint, {"dict": "mapping"}.get(hint.__name__, hint.__name__))


def _shown(default: Any) -> str:
    """Return a default as YAML has it; a mapping that is not empty, such as a node, is too long for a cell."""
    if isinstance(default, dict) and default:
        return "{…}"
    if default is None or isinstance(default, bool):
        return {None: "null", True: "true", False: "false"}[default]
    return "" if default == REQUIRED else str(getattr(default, "name", default))


def _table(rows: list[Row]) -> str:
    """Return a Markdown table; a column that is empty in all rows is left out."""
    head = ("key", "type", "default", "description")
    cells = [
        (f"`{key}`", *(f"`{cell}`" if cell else "" for cell in (kind, default)), text)
        for key, kind, default, text in rows
    ]
    used = [column for column in range(len(head)) if any(row[column] for row in cells)]
    lines = [head, ("---",) * len(head), *cells]
    return "\n".join(
        "| " + " | ".join(line[column].replace("|", "\\|") for column in used) + " |"
        for line in lines
    )


def _header(file: Path) -> str:
    """Return the first sentence of a config file's first comment, without its command."""
    text = file.read_text(encoding="utf-8").partition("\n\n")[0]
    lines = [line[2:] for line in text.splitlines() if line.startswith("# ")]
    prose = " ".join(
        line for line in lines if not line.startswith(("@package", "Run:"))
    )
    return re.split(r"(?<=[.]) (?=[A-Z])", prose)[0]


def _docstring(file: Path) -> str:
    return ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""


def _first(file: Path) -> str:
    """Return the first paragraph of a module's docstring."""
    return " ".join(_docstring(file).partition("\n\n")[0].split()).replace("|", "\\|")

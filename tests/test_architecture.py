"""The rooms of the package and the direction of the arrows between them: read in the sources, nothing is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# From the top of the house to its ground: a room imports from rooms below it, and from none above.
ROOMS = (
    *(
        "__main__",
        "cli",
        "rerun",
        "launch",
        "verify",
        "sweep",
        "report",
        "run",
        "distributed",
        "components",
    ),
    *(
        "training",
        "checkpoints",
        "tracking",
        "dataset",
        "accumulation",
        "trust",
        "config",
        "common",
    ),
)


def modules(root: Path) -> dict[str, Path]:
    """Every module of both packages by its dotted name."""
    files = [
        file
        for top in ("pipeline", "hydra_plugins")
        for file in sorted((root / top).rglob("*.py"))
    ]
    names = {
        ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(
            ".__init__"
        ): file
        for file in files
    }
    return {name: file for name, file in names.items() if name != "pipeline"}


@cache
def arrows(root: Path) -> dict[str, set[str]]:
    """The modules that each module imports, also inside of functions; what only a type checker reads is left out."""
    known = modules(root)
    return {
        name: set(_imported(name, file, known)) - {name} for name, file in known.items()
    }


def _imported(name: str, file: Path, known: dict[str, Path]) -> Iterator[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    branches = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    ]
    for_types = {id(inner) for branch in branches for inner in ast.walk(branch)}
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            yield from (
                known_part(alias.name, known)
                for alias in node.names
                if known_part(alias.name, known)
            )
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                base = ".".join(
                    [
                        *parts[: len(parts) - node.level + 1],
                        *filter(None, [node.module]),
                    ]
                )
            for alias in node.names:
                found = known_part(f"{base}.{alias.name}", known)
                if found:
                    yield found
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            # A module that is named to be imported later: the verbs, a process that is started with -m.
            found = node.value.partition(":")[0]
            if found in known and ("." in found):
                yield found


def known_part(dotted: str, known: dict[str, Path]) -> str:
    """The longest start of a dotted name that is a module; empty where there is none."""
    while dotted and dotted not in known:
        dotted = dotted.rpartition(".")[0]
    return dotted


def room(module: str) -> str:
    """The folder of `pipeline` that a module lies in; Hydra's plugin is of the top, as what it names is what it has."""
    return "__main__" if module.startswith("hydra_plugins") else module.split(".")[1]


def upward(root: Path) -> list[str]:
    """The arrows that lead up, as `from -> to`."""
    return [
        f"{name} -> {other}"
        for name, others in arrows(root).items()
        for other in sorted(others)
        if ROOMS.index(room(other)) < ROOMS.index(room(name))
    ]


def circles(root: Path) -> list[str]:
    """The modules from which imports lead back to themselves, and the rooms."""
    return _circles(arrows(root)) + _circles(_rooms(root))


def _rooms(root: Path) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for name, others in arrows(root).items():
        found.setdefault(room(name), set()).update(
            {room(other) for other in others} - {room(name)}
        )
    return found


def _circles(edges: dict[str, set[str]]) -> list[str]:
    def reach(name: str) -> set[str]:
        seen: set[str] = set()
        rest = list(edges.get(name, ()))
        while rest:
            other = rest.pop()
            if other not in seen:
                seen.add(other)
                rest += edges.get(other, ())
        return seen

    return sorted(name for name in edges if name in reach(name))


def test_every_module_lies_in_a_room():
    assert {room(name) for name in modules(ROOT)} == set(ROOMS)


def test_no_arrow_leads_up():
    assert upward(ROOT) == []


def test_no_circle():
    assert circles(ROOT) == []


def test_accumulation_can_be_copied_into_any_project():
    outside = {
        other
        for name, others in arrows(ROOT).items()
        if room(name) == "accumulation"
        for other in others
    }
    assert {room(other) for other in outside} <= {"accumulation"}


def test_who_comes_from_outside_uses_the_door():
    """A room's `__init__.py` names in `__all__` what others may use."""
    entered = [
        f"{name} -> {other}"
        for name, others in arrows(ROOT).items()
        for other in sorted(others)
        if other.count(".") > 1
        and room(other) != room(name)
        and other.split(".")[2] not in _door(room(other))
    ]
    assert entered == []


def _door(name: str) -> list[str]:
    names = _listed(ROOT / "pipeline" / name / "__init__.py")
    if name == "accumulation":
        # What this project's packages use and users do not call.
        names.append("internals")
    return names


def _listed(file: Path) -> list[str]:
    """The names in the `__all__` of a module."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    names = []
    for node in tree.body:
        is_assignment = isinstance(node, ast.Assign | ast.AugAssign)
        if is_assignment and ast.unparse(node).startswith("__all__ "):
            names += ast.literal_eval(node.value)
    return names


def test_what_comes_from_accumulation_is_listed():
    """Other packages use its public names, and those that `internals` lists."""
    folder = ROOT / "pipeline" / "accumulation"
    listed = {
        "pipeline.accumulation": [*_listed(folder / "__init__.py"), "internals"],
        "pipeline.accumulation.internals": _listed(folder / "internals.py"),
    }
    unlisted = []
    for name, file in modules(ROOT).items():
        if room(name) == "accumulation":
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module in listed:
                for alias in node.names:
                    if alias.name not in listed[node.module]:
                        unlisted.append(f"{name} -> {node.module}.{alias.name}")
    assert unlisted == []


@pytest.mark.parametrize(
    ("module", "line", "check"),
    [
        ("config/validate", "def f():\n    from pipeline.run import run", upward),
        ("tracking/journal", "from pipeline.report import writer", upward),
        ("common/secrets", "from pipeline.common import errors", circles),
        ("common/secrets", "from pipeline.tracking import store", circles),
        ("sweep/again", "def f():\n    from . import parent_run", circles),
    ],
)
def test_a_wrong_import_is_found(tmp_path, module, line, check):
    for top in ("pipeline", "hydra_plugins"):
        for file in (ROOT / top).rglob("*.py"):
            copy = tmp_path / file.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(file.read_bytes())
    with (tmp_path / "pipeline" / f"{module}.py").open("a") as file:
        file.write(f"\n{line}\n")
    assert check(tmp_path)

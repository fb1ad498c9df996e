"""The packages of `pipeline` and the direction of the imports between them.

All is read in the sources; nothing is imported.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# From the top to the bottom: a package imports from those below it only.
PACKAGES = (
    "__main__",
    "cli",
    "evaluate",
    "rerun",
    "launch",
    "verify",
    "sweep",
    "report",
    "run",
    "distributed",
    "components",
    "training",
    "shown",
    "checkpoints",
    "tracking",
    "dataset",
    "accumulation",
    "trust",
    "config",
    "common",
)


def source_files(root: Path) -> list[Path]:
    """Return every Python file of `pipeline` and Hydra's plugin."""
    files = []
    for top in ("pipeline", "hydra_plugins"):
        files += sorted((root / top).rglob("*.py"))
    return files


def modules(root: Path) -> dict[str, Path]:
    """Return every module of both packages by its dotted name."""
    file_by_name = {}
    for file in source_files(root):
        dotted = ".".join(file.relative_to(root).with_suffix("").parts)
        file_by_name[dotted.removesuffix(".__init__")] = file
    del file_by_name["pipeline"]
    return file_by_name


@cache
def imports(root: Path) -> dict[str, set[str]]:
    """Return the modules that each module imports, also in functions.

    What only a type checker reads is left out.
    """
    files = modules(root)
    known = frozenset(files)
    imports_by_module = {}
    for name, file in files.items():
        package = name if file.name == "__init__.py" else name.rpartition(".")[0]
        source = file.read_text(encoding="utf-8")
        imports_by_module[name] = _imported(source, package, known) - {name}
    return imports_by_module


@cache
def _imported(source: str, package: str, known: frozenset[str]) -> frozenset[str]:
    """Return the modules of `known` that a source in `package` imports or names.

    A copy of the sources differs in one file, and only that file is read again.
    """
    return frozenset(_each_imported(ast.parse(source), package, known))


def _each_imported(tree: ast.AST, package: str, known: frozenset[str]) -> Iterator[str]:
    for_types = _nodes_for_types(tree)
    for node in ast.walk(tree):
        if node in for_types:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            # A module that is named to be imported later: the verbs, and a process that
            # is started with -m.
            module = node.value.partition(":")[0]
            if module in known and "." in module:
                yield module
        for dotted in _imported_names(node, package):
            module = known_part(dotted, known)
            if module:
                yield module


def _nodes_for_types(tree: ast.AST) -> set[ast.AST]:
    """Return the nodes below each `if TYPE_CHECKING`."""
    nodes: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            nodes.update(ast.walk(node))
    return nodes


def _imported_names(node: ast.AST, package: str) -> list[str]:
    """Return the dotted names that a statement in `package` imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []

    base = node.module or ""
    if node.level:
        parts = package.split(".")
        parts = parts[: len(parts) - node.level + 1]
        if node.module:
            parts.append(node.module)
        base = ".".join(parts)
    return [f"{base}.{alias.name}" for alias in node.names]


def known_part(dotted: str, known: Collection[str]) -> str:
    """Return the longest start of a dotted name that is a module; empty if none is."""
    while dotted and dotted not in known:
        dotted = dotted.rpartition(".")[0]
    return dotted


def package_of(module: str) -> str:
    """Return the package of `pipeline` that a module lies in.

    Hydra's plugin belongs to the top: what it names is there already.
    """
    if module.startswith("hydra_plugins"):
        return "__main__"
    return module.split(".")[1]


def upward(root: Path) -> list[str]:
    """Return the imports that lead up, as `from -> to`."""
    imports_upward = []
    for name, others in imports(root).items():
        for other in sorted(others):
            place = PACKAGES.index(package_of(name))
            if PACKAGES.index(package_of(other)) < place:
                imports_upward.append(f"{name} -> {other}")
    return imports_upward


def cycles(root: Path) -> list[str]:
    """Return the modules, and the packages, whose imports lead back to themselves."""
    return _in_cycles(imports(root)) + _in_cycles(_imports_of_packages(root))


def _imports_of_packages(root: Path) -> dict[str, set[str]]:
    imports_by_package: dict[str, set[str]] = {}
    for name, others in imports(root).items():
        package = package_of(name)
        packages = {package_of(other) for other in others} - {package}
        imports_by_package.setdefault(package, set()).update(packages)
    return imports_by_package


def _in_cycles(edges: dict[str, set[str]]) -> list[str]:
    def reachable(name: str) -> set[str]:
        seen: set[str] = set()
        rest = list(edges.get(name, ()))
        while rest:
            other = rest.pop()
            if other not in seen:
                seen.add(other)
                rest += edges.get(other, ())
        return seen

    return sorted(name for name in edges if name in reachable(name))


def public_names(file: Path) -> list[str]:
    """Return the names in the `__all__` of a module."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    names = []
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AugAssign):
            if ast.unparse(node).startswith("__all__ "):
                names += ast.literal_eval(node.value)
    return names


def public_modules(package: str) -> list[str]:
    """Return the names of a package that other packages may import."""
    names = public_names(ROOT / "pipeline" / package / "__init__.py")
    if package == "accumulation":
        # What this project's packages use and users do not call.
        names.append("internals")
    return names


@pytest.fixture(scope="module", autouse=True)
def one_process() -> None:
    """Keep the tests in one worker, which reads each source once (conftest.py)."""


def test_every_module_lies_in_a_package() -> None:
    assert {package_of(name) for name in modules(ROOT)} == set(PACKAGES)


def test_no_import_leads_up() -> None:
    assert upward(ROOT) == []


def test_no_cycle() -> None:
    assert cycles(ROOT) == []


def test_accumulation_can_be_copied_into_any_project() -> None:
    imported = set()
    for name, others in imports(ROOT).items():
        if package_of(name) == "accumulation":
            imported |= others
    assert {package_of(module) for module in imported} <= {"accumulation"}


def test_other_packages_use_public_names() -> None:
    """A package's `__init__.py` names in `__all__` what others may use."""
    not_public = []
    for name, others in imports(ROOT).items():
        for other in sorted(others):
            package = package_of(other)
            if other.count(".") == 1 or package == package_of(name):
                continue
            if other.split(".")[2] not in public_modules(package):
                not_public.append(f"{name} -> {other}")
    assert not_public == []


def test_what_comes_from_accumulation_is_listed() -> None:
    """Other packages use its public names, and those that `internals` lists."""
    folder = ROOT / "pipeline" / "accumulation"
    listed = {
        "pipeline.accumulation": [*public_names(folder / "__init__.py"), "internals"],
        "pipeline.accumulation.internals": public_names(folder / "internals.py"),
    }
    unlisted = []
    for name, file in modules(ROOT).items():
        if package_of(name) == "accumulation":
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
        ("common/secrets", "from pipeline.common import errors", cycles),
        ("common/secrets", "from pipeline.tracking import store", cycles),
        ("sweep/again", "def f():\n    from . import opening", cycles),
    ],
)
def test_a_wrong_import_is_found(
    tmp_path: Path, module: str, line: str, check: Callable[[Path], list[str]]
) -> None:
    for source in source_files(ROOT):
        copy = tmp_path / source.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(source.read_bytes())
    with (tmp_path / "pipeline" / f"{module}.py").open("a") as file:
        file.write(f"\n{line}\n")
    assert check(tmp_path)

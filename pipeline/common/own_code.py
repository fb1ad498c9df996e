"""Finds the user's own modules, and those that they import.

No module is imported: the source files are parsed.
"""

import ast
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from importlib.machinery import PathFinder
from pathlib import Path


def is_own(module: str, file: str) -> bool:
    """Return whether a module is user code: not installed, and not of this package.

    Args:
        module: the dotted name of the module.
        file: the path of its file.
    """
    if file.startswith(sysconfig.get_path("stdlib")):
        return False
    if "/site-packages/" in file or "/dist-packages/" in file:
        return False
    # Skip `__main__`, and the modules that AutoGraph generates.
    if module.startswith("__"):
        return False
    return module.split(".")[0] not in ("pipeline", "hydra_plugins")


def with_imports(modules: Iterable[str], folder: Path) -> set[str]:
    """Return modules, their packages, and the own modules that they import.

    Those that the imported modules import are included, and so on.
    An import anywhere in a file counts, also one in a function or below an `if`. An
    import by a computed name, such as `importlib.import_module(name)`, is not found.

    Args:
        modules: dotted names. Those whose source is not in the folder are not followed.
        folder: the absolute path of a folder. Only imported modules in it are returned,
            without the packages that are installed in it.
    """
    found: set[str] = set()
    for module in modules:
        found.update(_with_packages(module))
    waiting = list(found)
    while waiting:
        module = waiting.pop()
        file = source(module)
        if file is None or not _is_in(module, file, folder):
            continue
        for name in _imported_names(module, file):
            if name in found:
                continue
            imported_file = source(name)
            if imported_file is not None and _is_in(name, imported_file, folder):
                found.add(name)
                waiting.append(name)
    return found


def _is_in(module: str, file: Path, folder: Path) -> bool:
    return is_own(module, str(file)) and file.is_relative_to(folder)


def source(module: str) -> Path | None:
    """Return the source file of a module, or None if it is not found or has none."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        file = _origin(module)
    if file is None or not file.endswith(".py"):
        return None
    return Path(file).absolute()


def _origin(module: str) -> str | None:
    """Return the file from which Python would import a module, or None.

    In contrast to `importlib.util.find_spec`, this does not import the parent package.
    """
    folders: Sequence[str] | None = None  # those of `sys.path`
    origin = None
    name = ""
    for part in module.split("."):
        name = f"{name}.{part}".lstrip(".")
        spec = PathFinder.find_spec(name, folders)
        if spec is None:
            return None
        folders = spec.submodule_search_locations or []
        origin = spec.origin
    return origin


def _imported_names(module: str, file: Path) -> Iterator[str]:
    """Yield the dotted names that a module may import.

    These are also the packages around the modules, and names in modules that may not be
    modules themselves.
    """
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):  # it is not a source that Python reads
        return
    package = module.split(".")
    if file.name != "__init__.py":
        package.pop()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _with_packages(alias.name)
        elif isinstance(node, ast.ImportFrom):
            # `from ..a import b` in the package `p.q` names `p.a` and maybe `p.a.b`.
            parts = []
            if node.level > len(package):
                continue
            if node.level:
                parts = package[: len(package) - node.level + 1]
            if node.module:
                parts.append(node.module)
            for alias in node.names:
                yield from _with_packages(".".join([*parts, alias.name]))


def _with_packages(name: str) -> Iterator[str]:
    """Yield a dotted name and the packages around it, from the outermost on."""
    parts = name.split(".")
    for length in range(1, len(parts) + 1):
        yield ".".join(parts[:length])

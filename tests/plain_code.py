"""Rules of plain code that the linter does not know, and how dense the code is.

    python -m tests.plain_code [PATH …]

It prints what breaks a rule, then the counts in 10,000 tokens. Exit status 1 if a rule
is broken. `tests/test_plain_code.py` holds both.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Indices, and the inputs and labels of a model. Other letters are mathematics, which
# the docstring of the function, the class or the module has to state.
LETTERS = frozenset("_ijknxy")
VAGUE_PARAMETERS = frozenset(["of", "given", "found", "whole", "said", "held", "asked"])
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow)


@dataclass(frozen=True)
class Violation:
    """A line that breaks a rule."""

    path: str
    line: int
    rule: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}"


@dataclass(frozen=True)
class Density:
    """How often some constructs occur in 10,000 tokens, and how full the lines are."""

    tokens: int
    tuple_assignments: float
    conditional_expressions: float
    comprehensions: float
    walruses: float
    tokens_per_line: float
    longest_line: int

    def __str__(self) -> str:
        return (
            f"{self.tuple_assignments:.1f} tuple assignments, "
            f"{self.conditional_expressions:.1f} conditional expressions, "
            f"{self.comprehensions:.1f} comprehensions, "
            f"{self.walruses:.1f} walruses in 10,000 tokens; "
            f"{self.tokens_per_line:.1f} tokens a line, longest line "
            f"{self.longest_line}, {self.tokens:,} tokens"
        )


def violations(path: str, source: str) -> list[Violation]:
    """Return the lines of `source` that break a rule, in their order."""
    tree = ast.parse(source)
    parents = _parents(tree)
    broken = []
    for node in ast.walk(tree):
        for rule in _broken_rules(node, parents):
            broken.append(Violation(path, node.lineno, rule))
    return sorted(broken, key=lambda violation: violation.line)


def density(sources: list[str]) -> Density:
    """Count over all `sources`; empty lines are no lines."""
    tokens = lines = longest = 0
    counts = dict.fromkeys(["tuples", "conditionals", "comprehensions", "walruses"], 0)
    for source in sources:
        tokens += _token_count(source)
        for line in source.splitlines():
            longest = max(longest, len(line))
            if line.strip():
                lines += 1
        for node in ast.walk(ast.parse(source)):
            if _is_tuple_assignment(node):
                counts["tuples"] += 1
            elif isinstance(node, ast.IfExp):
                counts["conditionals"] += 1
            elif isinstance(node, COMPREHENSIONS):
                counts["comprehensions"] += 1
            elif isinstance(node, ast.NamedExpr):
                counts["walruses"] += 1

    per_token = 10_000 / max(tokens, 1)
    return Density(
        tokens=tokens,
        tuple_assignments=counts["tuples"] * per_token,
        conditional_expressions=counts["conditionals"] * per_token,
        comprehensions=counts["comprehensions"] * per_token,
        walruses=counts["walruses"] * per_token,
        tokens_per_line=tokens / max(lines, 1),
        longest_line=longest,
    )


def python_files(paths: list[Path]) -> list[Path]:
    """Return the Python files at or below `paths`, sorted."""
    files = []
    for path in paths:
        if path.is_dir():
            files += path.rglob("*.py")
        else:
            files.append(path)
    return sorted(files)


def _broken_rules(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> Iterator[str]:
    if _is_tuple_assignment(node) and not _is_swap(node):
        yield "several assignments in one statement"
    if isinstance(node, ast.IfExp) and not _stands_alone(node, parents):
        yield "a conditional expression inside another expression"
    if isinstance(node, COMPREHENSIONS) and len(node.generators) > 1:
        yield "a comprehension with two loops"
    if isinstance(node, COMPREHENSIONS) and _contains(node, ast.NamedExpr):
        yield "an assignment inside a comprehension"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ARITHMETIC):
        if _is_truth(node.left) or _is_truth(node.right):
            yield "arithmetic on a truth value"
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.BoolOp):
        yield "and/or as a statement"
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.IfExp):
        yield "a conditional expression as a statement"
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield from _name_rules(node.id, node, parents)
    if isinstance(node, ast.arg):
        yield from _name_rules(node.arg, node, parents)
        if node.arg in VAGUE_PARAMETERS:
            yield f"a parameter called {node.arg!r}"


def _name_rules(
    name: str, node: ast.AST, parents: dict[ast.AST, ast.AST]
) -> Iterator[str]:
    if len(name) > 1 or name in LETTERS:
        return
    if not _is_stated(name, node, parents):
        yield f"a name of one letter, {name!r}, that no docstring states"


def _is_stated(letter: str, node: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    """Return whether the docstring of an enclosing definition has the letter."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    while node in parents:
        node = parents[node]
        if isinstance(node, documented):
            text = ast.get_docstring(node) or ""
            if re.search(rf"`{letter}`", text):
                return True
            is_a_word = letter in "aAI"
            if not is_a_word and re.search(
                rf"(?<![A-Za-z']){letter}(?![A-Za-z'])", text
            ):
                return True
    return False


def _is_tuple_assignment(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Tuple)
        and isinstance(node.value, ast.Tuple)
    )


def _is_swap(node: ast.Assign) -> bool:
    targets = [ast.unparse(target) for target in node.targets[0].elts]
    values = [ast.unparse(value) for value in node.value.elts]
    return sorted(targets) == sorted(values)


def _stands_alone(node: ast.IfExp, parents: dict[ast.AST, ast.AST]) -> bool:
    """Return whether it is all of the right of an `=`, a `return` or a `yield`."""
    parent = parents[node]
    alone = (ast.Assign, ast.AnnAssign, ast.Return, ast.Yield, ast.Expr, ast.Lambda)
    return isinstance(parent, alone)


def _is_truth(node: ast.expr) -> bool:
    """Return whether a value is seen to be true or false; arrays are not looked at."""
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Not)
    if isinstance(node, ast.Constant):
        return isinstance(node.value, bool)
    return isinstance(node, ast.Compare)


def _contains(node: ast.AST, kind: type[ast.AST]) -> bool:
    return any(isinstance(inner, kind) for inner in ast.walk(node))


def _parents(tree: ast.AST) -> dict[ast.AST, ast.AST]:
    parents = {}
    for node in ast.walk(tree):
        for child in ast.iter_child_nodes(node):
            parents[child] = node
    return parents


def _token_count(source: str) -> int:
    counted = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return len([token for token in tokens if token.type in counted])


def main() -> int:
    """Print the violations and the density of the paths on the command line."""
    paths = [Path(argument) for argument in sys.argv[1:]]
    if not paths:
        paths = [ROOT / "pipeline", ROOT / "hydra_plugins"]
    files = python_files(paths)
    sources = [file.read_text(encoding="utf-8") for file in files]
    broken = []
    for file, source in zip(files, sources, strict=True):
        broken += violations(str(file), source)
    for violation in broken:
        print(violation)
    print(f"{len(broken)} violations; {density(sources)}")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())

"""The code is plain: no construct that a reader has to unfold, and not too dense.

`tests/plain_code.py` has the rules, `pyproject.toml` those that the linter knows.
"""

from __future__ import annotations

import sys
from dataclasses import fields, replace

import pytest

from tests import plain_code
from tests.plain_code import ROOT, Density, density, python_files, violations

# In 10,000 tokens, and tokens a line. Tests are tables and literals in part.
LIMITS_OF_THE_PACKAGE = Density(
    tokens=sys.maxsize,
    tuple_assignments=5,
    conditional_expressions=22,
    comprehensions=35,
    walruses=3,
    tokens_per_line=7,
    longest_line=100,
)
LIMITS_OF_TESTS = replace(
    LIMITS_OF_THE_PACKAGE, tuple_assignments=8, comprehensions=45, tokens_per_line=7.6
)


def sources(*folders):
    """Return the Python files below some folders of the project, by path."""
    texts = {}
    for file in python_files([ROOT / folder for folder in folders]):
        path = file.relative_to(ROOT).as_posix()
        texts[path] = file.read_text(encoding="utf-8")
    return texts


@pytest.mark.parametrize(
    "folders",
    [
        ["pipeline", "hydra_plugins"],
        pytest.param(["tests"], marks=pytest.mark.slow),
        pytest.param(["benchmarks", "docs", "examples"], marks=pytest.mark.slow),
    ],
    ids=["package", "tests", "others"],
)
def test_no_rule_is_broken(folders):
    broken = []
    for path, source in sources(*folders).items():
        broken += violations(path, source)
    assert [str(violation) for violation in broken] == []


@pytest.mark.parametrize(
    ("folders", "limits"),
    [
        (["pipeline", "hydra_plugins"], LIMITS_OF_THE_PACKAGE),
        pytest.param(["tests"], LIMITS_OF_TESTS, marks=pytest.mark.slow),
        (["benchmarks"], LIMITS_OF_TESTS),
    ],
    ids=["package", "tests", "benchmarks"],
)
def test_the_code_is_not_dense(folders, limits):
    counted = density(list(sources(*folders).values()))
    for field in fields(Density):
        assert getattr(counted, field.name) <= getattr(limits, field.name), field.name


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        ("a_sum, a_product = x + y, x * y", "several assignments in one statement"),
        ("f(x if x else y)", "a conditional expression inside another expression"),
        ("n = [x if x else y]", "a conditional expression inside another expression"),
        (
            "n = x if x else (y if y else k)",
            "a conditional expression inside another expression",
        ),
        ("n = [x for y in k for x in y]", "a comprehension with two loops"),
        ("n = [y for x in k if (y := x)]", "an assignment inside a comprehension"),
        ("n = k * (x < y)", "arithmetic on a truth value"),
        ("n = k + (not x)", "arithmetic on a truth value"),
        ("x and print()", "and/or as a statement"),
        ("print() if x else None", "a conditional expression as a statement"),
        ("q = 1", "a name of one letter, 'q', that no docstring states"),
        ("def f(q): pass", "a name of one letter, 'q', that no docstring states"),
        ("def f(given): pass", "a parameter called 'given'"),
    ],
)
def test_each_rule_finds_what_it_is_for(source, rule):
    (violation,) = violations("file.py", source)
    assert violation.rule == rule
    assert str(violation).startswith("file.py:1: ")


@pytest.mark.parametrize(
    "source",
    [
        "x, y = y, x",
        "loss, weight = sums",
        "n = x if x else y",
        "def f():\n    return x if x else y",
        "n = [x for x in y if x]",
        "n = k * y",
        "n = x and y",
        'def f():\n    """Return q²."""\n    q = 1',
        "if (match := find()):\n    pass",
    ],
)
def test_plain_statements_break_no_rule(source):
    assert violations("file.py", source) == []


def test_the_density_is_counted():
    found = density(["a_name, b_name = 1, 2\n\nc_name = [x for x in y] if z else 1\n"])
    assert found.tokens == 20
    assert found.tokens_per_line == 10
    assert found.tuple_assignments == 10_000 / 20
    assert found.comprehensions == found.conditional_expressions == 10_000 / 20
    assert found.walruses == 0


def test_the_command_names_what_breaks_a_rule(tmp_path, monkeypatch, capsys):
    file = tmp_path / "dense.py"
    file.write_text("first, second = 1, 2\n")
    monkeypatch.setattr("sys.argv", ["plain_code", str(tmp_path)])
    assert plain_code.main() == 1
    assert f"{file}:1: several assignments" in capsys.readouterr().out

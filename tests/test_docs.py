"""What README.md and docs/*.md say is true: commands compose, code is that of the examples, links and paths lead there.

The examples themselves are run by tests/examples/.
"""

from __future__ import annotations

import ast
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from pipeline.__main__ import VERBS
from pipeline.config.compose import composed
from pipeline.config.packaged import directory
from pipeline.config.resolve import resolve
from pipeline.config.schema import register
from pipeline.config.sizes import Batching
from pipeline.rerun.request import parsed
from pipeline.sweep.files import sweep_files
from tests.running import ROOT, environment

README = ROOT / "README.md"
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in (README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
}
BLOCKS = [
    (page, kind, text)
    for page, content in PAGES.items()
    for kind, text in re.findall(r"^```(\w+)\n(.*?)^```$", content, re.DOTALL | re.MULTILINE)
]
COMMANDS = sorted(
    {re.sub(r"\s+# .*", "", line) for _, kind, text in BLOCKS if kind == "sh" for line in text.split("\n")}
)
LINK = re.compile(r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)")
PATH = re.compile(r"`((?:pipeline|conf|sweeps|examples|tests|docs|benchmarks|hydra_plugins)/[\w./]*)`")
FOLDERS = ",".join(f"'file://{folder}'" for folder in sorted((ROOT / "examples").glob("*/conf")))


def of(verb: str) -> list[str]:
    """The documented command lines of a verb, without `pipeline`."""
    return [line.removeprefix("pipeline ") for line in COMMANDS if line.startswith(f"pipeline {verb}")]


def test_the_pages_were_read():
    assert len(PAGES) >= 10
    assert len(of("train")) >= 25
    assert len(of("sweep")) >= 6
    assert {verb for verb in VERBS if of(verb)} >= {"train", "sweep", "rerun", "report"}


def test_the_readme_is_short():
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 200


def test_the_table_of_commands_has_every_verb():
    table = PAGES["README.md"].split("## Commands")[1].split("\n\n")[1]
    assert set(re.findall(r"^\| `pipeline (\w+)", table, re.MULTILINE)) == set(VERBS)


def unproven(section: str) -> list[str]:
    """The cells of a table without the letter of a test that exists, and the letters that no cell has."""
    named = dict(re.findall(r"^- (\w): `(\S+)`$", section, re.MULTILINE))
    tests = {letter: test.split("::") for letter, test in named.items()}
    there = {letter for letter, (file, name) in tests.items() if name in names_of_tests(ROOT / file)}
    rows = [line.strip("|").split("|")[1:] for line in section.splitlines() if line.startswith("| ")][2:]
    used = [re.findall(r"\((\w(?:, \w)*)\)", cell) for row in rows for cell in row]
    letters = [{letter for group in found for letter in group.split(", ")} for found in used]
    said = set(re.findall(r"\((\w(?:, \w)*)\)", section)) | set().union(*letters)
    cells = [cell for row in rows for cell in row]
    lacking = [cell.strip() for cell, found in zip(cells, letters, strict=True) if not found or found - there]
    return [*lacking, *sorted(set(named) - said)]


def names_of_tests(file: Path) -> set[str]:
    """The names of the tests in a file."""
    if not file.is_file():
        return set()
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_every_cell_of_would_i_get_it_again_has_its_test():
    section = PAGES["README.md"].split("## Would I get it again?")[1].split("\n## ")[0]
    assert section.count("\n| ") >= 6
    assert unproven(section) == []


def test_a_cell_without_its_test_is_found():
    named = "tests/test_docs.py::test_the_pages_were_read"
    table = "| a | b | c |\n| --- | --- | --- |\n| row | equal (a) | {} |\n\n- a: `" + named + "`\n- b: `{}`"
    assert unproven(table.format("equal (b)", named)) == []
    assert unproven(table.format("equal", named)) == ["equal", "b"]
    assert unproven(table.format("equal (c)", named)) == ["equal (c)", "b"]
    for nowhere in ("tests/test_docs.py::test_nothing", "tests/test_nothing.py::test_the_pages_were_read"):
        assert unproven(table.format("equal (b)", nowhere)) == ["equal (b)"]


@pytest.mark.parametrize("line", of("train"), ids=str)
def test_every_training_composes_and_passes_the_checks(line):
    words = shlex.split(line)[1:]
    if words == ["--help"]:
        return  # tests/cli/test_cli.py
    sizes_of([word.replace("1,2,4,8", "2") for word in words if word not in ("-m", "--config-dir", "conf")])


def sizes_of(overrides: list[str]) -> Batching:
    register()
    GlobalHydra.instance().clear()
    with initialize_config_dir(directory(), version_base="1.3"):
        config = compose("config", [*overrides, "hydra/launcher=basic", f"hydra.searchpath=[{FOLDERS}]"])
    return resolve(config, overrides).batching


@pytest.mark.parametrize("line", of("sweep"), ids=str)
def test_every_sweep_composes(line):
    words = shlex.split(line)[1:]
    where = sweep_files()[words[0]]
    file = ["--config-dir", str(where.parent), "--config-name", words[0]]
    composed([*file, *(word for word in words[1:] if not word.startswith(("--", "SWEEP", "https:")))])


@pytest.mark.parametrize("line", of("rerun"), ids=str)
def test_every_rerun_is_understood(line):
    request = parsed(shlex.split(line)[1:], None)
    assert request.run_id in ("RUN_ID", "SWEEP")
    assert all(isinstance(key, str) for key in request.values)


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "train"])
def test_every_option_is_one_of_the_verb(verb):
    command = [sys.executable, "-m", "pipeline", verb, "--help"]
    printed = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True).stdout
    options = {word for line in of(verb) for word in shlex.split(line) if word.startswith("--")}
    assert {option for option in options if not re.search(rf"{option}\b", printed)} == set()


def test_the_sums_beside_the_sizes_are_right():
    text = PAGES["docs/configuration.md"]
    sums = re.findall(r"^pipeline train (.*?) +# (\d+) = (\d+) × (\d+)", text, re.MULTILINE)
    sums += re.findall(r"^pipeline train (.*?) +# (\d+)$", text, re.MULTILINE)
    assert len(sums) == 3
    for command, *numbers in sums:
        sizes = sizes_of(command.split())
        expected = (sizes.effective_batch_size, sizes.micro_batch_size, sizes.factor)
        assert tuple(map(int, numbers)) == expected[: len(numbers)]


def test_other_commands_name_what_is_there():
    """The targets of make, the modules and scripts of Python, the folders that are entered."""
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    named = {name for content in PAGES.values() for name in re.findall(r"(?:^|`)make ([a-z-]+)", content, re.MULTILINE)}
    assert named <= set(targets)
    for line in COMMANDS:
        words = line.split()
        if words[:2] == ["python", "-m"] and words[2] != "pip":
            module = ROOT / words[2].replace(".", "/")
            assert module.with_suffix(".py").is_file() or (module / "__main__.py").is_file(), line
        elif words[:1] in (["python"], ["sbatch"], ["cd"]) and words[1] != "-m":
            assert (ROOT / words[1]).exists(), line


def test_code_is_that_of_the_examples():
    """A block that names a file in its first line is a part of that file."""
    shown = [(page, *text.split("\n", 1)) for page, kind, text in BLOCKS if kind in ("python", "yaml")]
    assert len(shown) >= 8
    for page, first, code in shown:
        file = re.fullmatch(r"# (examples/\S+)", first)
        assert file, f"{page}: a block of code begins with `# examples/…`, the file that it is from; not with {first}"
        assert code in (ROOT / file[1]).read_text(encoding="utf-8"), f"{page}: not in {file[1]}:\n{code}"


def anchors(content: str) -> set[str]:
    """The anchors of a page's headings, as GitHub and MyST make them."""
    prose = re.sub(r"^```.*?^```$", "", content, flags=re.DOTALL | re.MULTILINE)
    titles = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title) for title in re.findall(r"^#+ (.*)$", prose, re.MULTILINE)]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken(page: str, content: str) -> Iterator[str]:
    """The relative links of a page that lead nowhere."""
    for path, anchor in LINK.findall(content):
        target = (ROOT / page).parent / path if path else ROOT / page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text(encoding="utf-8"))):
            yield f"{path}#{anchor}" if anchor else path


@pytest.mark.parametrize("page", PAGES)
def test_every_link_and_every_anchor_exists(page):
    assert list(broken(page, PAGES[page])) == []


def test_a_broken_link_is_found():
    links = "[a](docs/design.md#words) [b](docs/design.md#word) [c](docs/nothing.md) [d](#how-to) [e](#how-not-to)"
    assert list(broken("README.md", f"## How to\n{links}")) == ["docs/design.md#word", "docs/nothing.md", "#how-not-to"]


@pytest.mark.parametrize("page", PAGES)
def test_every_path_that_is_named_exists(page):
    assert [
        path for path in PATH.findall(PAGES[page]) if not re.search("NAME|_build", path) and not (ROOT / path).exists()
    ] == []


def test_the_tree_names_every_module_and_nothing_else():
    tree = PAGES["docs/design.md"].split("## The tree")[1]
    named: set[str] = set()
    folders: list[str] = []
    for indent, name in re.findall(r"^ {4}( *)(\S+?)(?= )", tree, re.MULTILINE):
        folders[len(indent) // 2 :] = [name]
        named.add("".join(folders))
    for path in named:
        assert (ROOT / path).exists(), path
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "pipeline").rglob("*.py")}
    assert {path for path in modules if not path.endswith("__init__.py")} - named == set()
    groups = re.findall(r"^ {6}((?:\w+/ ?)+)$", tree, re.MULTILINE)[0].split()
    assert {path.name + "/" for path in (ROOT / "conf").iterdir() if path.is_dir()} == set(groups)


def test_the_levels_are_those_that_are_tested():
    from tests.test_architecture import LEVELS

    table = PAGES["docs/design.md"].split("| level | rooms |")[1].split("\n\n")[0]
    rows = [re.findall(r"`(\w+)`", row.split("|")[2]) for row in table.splitlines()[2:]]
    assert rows == [[room for room in level if room != "hydra_plugins"] for level in LEVELS]


def site(source: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Build the site as `make docs` does."""
    options = ["--fail-on-warning", "--keep-going", "--nitpicky", "--quiet"]
    command = [sys.executable, "-m", "sphinx", *options, str(source), str(folder)]
    return subprocess.run(command, env=environment(), capture_output=True, text=True)


def test_the_site_is_built_without_a_warning(tmp_path):
    done = site(ROOT / "docs", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "accumulate_gradients" in (tmp_path / "accumulation.html").read_text(encoding="utf-8")
    assert 'href="your_own_code.html#in-your-own-loop"' in (tmp_path / "index.html").read_text(encoding="utf-8")


def test_the_site_is_refused_with_a_dead_link(tmp_path):
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("_build"))
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "pipeline", tmp_path / "pipeline")
    with (tmp_path / "README.md").open("a", encoding="utf-8") as file:
        file.write("\n[one](docs/nothing.md) [two](docs/design.md#nothing)\n")
    done = site(tmp_path / "docs", tmp_path / "site")
    assert done.returncode != 0
    assert "nothing.md" in done.stderr
    assert "design.md#nothing" in done.stderr or "'nothing'" in done.stderr

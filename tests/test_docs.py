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

from docs import reference
from pipeline.__main__ import VERBS, main
from pipeline.config.compose import composed, directory
from pipeline.config.resolve import resolve
from pipeline.config.schema import register
from pipeline.config.sizes import Batching
from pipeline.rerun.request import parsed
from pipeline.sweep.files import sweep_files
from tests.running import ROOT, environment
from tests.test_architecture import ROOMS

README = ROOT / "README.md"
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in (
        README,
        ROOT / "CONTRIBUTING.md",
        *sorted((ROOT / "docs").glob("*.md")),
    )
}
BLOCKS = [
    (page, kind, text)
    for page, content in PAGES.items()
    for kind, text in re.findall(
        r"^```(\w+)\n(.*?)^```$", content, re.DOTALL | re.MULTILINE
    )
]
SHELL = "".join(text for _, kind, text in BLOCKS if kind == "sh")
COMMANDS = sorted(
    {
        re.sub(r"\s+# .*", "", line)
        for line in re.sub(r" \\\n +", " ", SHELL).split("\n")
    }
)
LINK = re.compile(r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)")
PATH = re.compile(
    r"`((?:pipeline|conf|sweeps|examples|tests|docs|benchmarks|hydra_plugins)/[\w./]*)`"
)
WIDTH = 90  # characters of code that fit the column of the site
FOLDERS = ",".join(
    f"'file://{folder}'" for folder in sorted((ROOT / "examples").glob("*/conf"))
)


def of(verb: str) -> list[str]:
    """The documented command lines of a verb, without `pipeline`."""
    return [
        line.removeprefix("pipeline ")
        for line in COMMANDS
        if line.startswith(f"pipeline {verb}")
    ]


def test_the_pages_were_read():
    assert len(PAGES) >= 10
    assert len(of("train")) >= 25
    assert len(of("sweep")) >= 6
    assert {verb for verb in VERBS if of(verb)} >= {"train", "sweep", "rerun", "report"}


def test_the_readme_is_short():
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 150


def test_the_table_of_commands_has_every_verb():
    table = PAGES["README.md"].split("## Commands")[1].split("\n\n")[1]
    assert set(re.findall(r"^\| `pipeline (\w+)", table, re.MULTILINE)) == set(VERBS)


def named_in(file: Path) -> dict[str, bool]:
    """Return the tests in a file by name, and whether all of one is left to `make test-all`."""
    if not file.is_file():
        return {}
    tree = ast.parse(file.read_text(encoding="utf-8"))
    marked = {
        node.name: set(map(ast.unparse, node.decorator_list))
        for node in tree.body
        if hasattr(node, "name")
    }
    slow = {"pytest.mark.slow", "pytest.mark.soak"}
    return {
        name: bool(marks & slow)
        for name, marks in marked.items()
        if name.startswith("test_")
    }


def lacking(table: str) -> list[str]:
    """Return the tests in a table of guarantees that do not exist, and those of `make test` that are left out of it."""
    rows = [
        line.strip("| ").split(" | ")
        for line in table.splitlines()
        if line.startswith("| ") and "::test_" in line
    ]
    found = []
    for _, *cells in rows:
        for wider, cell in enumerate(cells):
            file, name = cell.strip(" |`").split("::")
            if named_in(ROOT / "tests" / file).get(name, True) and (
                not wider or name not in named_in(ROOT / "tests" / file)
            ):
                found.append(f"{file}::{name}")
    return found


def test_every_guarantee_has_its_test():
    table = PAGES["CONTRIBUTING.md"].split("| guarantee |")[1].split("\n\n")[0]
    assert table.count("\n| ") >= 40
    assert lacking(table) == []


def test_a_guarantee_without_its_test_is_found():
    row = "| it holds | `test_docs.py::{}` | `{}::test_every_guarantee_has_its_test` |"
    assert lacking(row.format("test_the_pages_were_read", "test_docs.py")) == []
    assert lacking(row.format("test_nothing", "nowhere.py")) == [
        "test_docs.py::test_nothing",
        "nowhere.py::test_every_guarantee_has_its_test",
    ]


@pytest.mark.parametrize("line", of("train"), ids=str)
def test_every_training_composes_and_passes_the_checks(line):
    words = shlex.split(line)[1:]
    if words == ["--help"]:
        return  # tests/cli/test_cli.py
    sizes_of(
        [
            word.replace("1,2,4,8", "2")
            for word in words
            if word not in ("-m", "--config-dir", "conf")
        ]
    )


def sizes_of(overrides: list[str]) -> Batching:
    register()
    GlobalHydra.instance().clear()
    with initialize_config_dir(directory(), version_base="1.3"):
        config = compose(
            "config",
            [*overrides, "hydra/launcher=basic", f"hydra.searchpath=[{FOLDERS}]"],
        )
    return resolve(config, overrides).batching


@pytest.mark.parametrize("line", of("sweep"), ids=str)
def test_every_sweep_composes(line):
    words = shlex.split(line)[1:]
    where = sweep_files()[words[0]]
    file = ["--config-dir", str(where.parent), "--config-name", words[0]]
    composed(
        [
            *file,
            *(
                one_value(word)
                for word in words[1:]
                if not word.startswith(("--", "SWEEP", "https:"))
            ),
        ]
    )


def one_value(override: str) -> str:
    """Return the override of the first job where it is swept, as in `seed=0,1,2`."""
    if "[" in override or "{" in override:
        return override
    return override.partition(",")[0]


@pytest.mark.parametrize("line", of("rerun"), ids=str)
def test_every_rerun_is_understood(line):
    request = parsed(shlex.split(line)[1:], None)
    assert request.run_id in ("RUN_ID", "SWEEP")
    assert all(isinstance(key, str) for key in request.values)


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "train"])
def test_every_option_is_one_of_the_verb(verb, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([verb, "--help"])
    printed = capsys.readouterr().out
    options = {
        word for line in of(verb) for word in shlex.split(line) if word.startswith("--")
    }
    assert {
        option for option in options if not re.search(rf"{option}\b", printed)
    } == set()


@pytest.mark.slow
def test_the_sums_beside_the_sizes_are_right():
    text = PAGES["docs/configuration.md"]
    sums = re.findall(
        r"^pipeline train (.*?) +# (\d+) = (\d+) × (\d+)", text, re.MULTILINE
    )
    sums += re.findall(r"^pipeline train (.*?) +# (\d+)$", text, re.MULTILINE)
    assert len(sums) == 3
    for command, *numbers in sums:
        sizes = sizes_of(command.split())
        expected = (sizes.effective_batch_size, sizes.micro_batch_size, sizes.factor)
        assert tuple(map(int, numbers)) == expected[: len(numbers)]


def test_other_commands_name_what_is_there():
    """The targets of make, the modules and scripts of Python, the folders that are entered."""
    targets = re.findall(
        r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
    )
    named = {
        name
        for content in PAGES.values()
        for name in re.findall(r"(?:^|`)make ([a-z-]+)", content, re.MULTILINE)
    }
    assert named <= set(targets)
    for line in COMMANDS:
        words = line.split()
        if words[:2] == ["python", "-m"] and words[2] != "pip":
            module = ROOT / words[2].replace(".", "/")
            assert (
                module.with_suffix(".py").is_file()
                or (module / "__main__.py").is_file()
            ), line
        elif words[:1] in (["python"], ["sbatch"], ["cd"]) and words[1] != "-m":
            assert (ROOT / words[1]).exists(), line


def test_code_is_that_of_the_examples():
    """A block that names a file in its first line is a part of that file."""
    shown = [
        (page, *text.split("\n", 1))
        for page, kind, text in BLOCKS
        if kind in ("python", "yaml")
    ]
    assert len(shown) >= 8
    for page, first, code in shown:
        file = re.fullmatch(r"# (examples/\S+)", first)
        assert file, (
            f"{page}: a block of code begins with `# examples/…`, the file that it is from; not with {first}"
        )
        assert code in (ROOT / file[1]).read_text(encoding="utf-8"), (
            f"{page}: not in {file[1]}:\n{code}"
        )


def anchors(content: str) -> set[str]:
    """The anchors of a page's headings, as GitHub and MyST make them."""
    prose = re.sub(r"^```.*?^```$", "", content, flags=re.DOTALL | re.MULTILINE)
    titles = [
        re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title)
        for title in re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    ]
    return {
        re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles
    }


def broken(page: str, content: str) -> Iterator[str]:
    """The relative links of a page that lead nowhere."""
    for path, anchor in LINK.findall(content):
        target = (ROOT / page).parent / path if path else ROOT / page
        if not target.exists() or (
            anchor and anchor not in anchors(target.read_text(encoding="utf-8"))
        ):
            yield f"{path}#{anchor}" if anchor else path


@pytest.mark.parametrize("page", PAGES)
def test_every_link_and_every_anchor_exists(page):
    assert list(broken(page, PAGES[page])) == []


def test_a_broken_link_is_found():
    links = "[a](docs/design.md#rooms) [b](docs/design.md#room) [c](docs/nothing.md) [d](#how-to) [e](#how-not-to)"
    assert list(broken("README.md", f"## How to\n{links}")) == [
        "docs/design.md#room",
        "docs/nothing.md",
        "#how-not-to",
    ]


@pytest.mark.parametrize("page", PAGES)
def test_every_path_that_is_named_exists(page):
    assert [
        path
        for path in PATH.findall(PAGES[page])
        if not re.search("NAME|_build", path) and not (ROOT / path).exists()
    ] == []


def test_no_block_is_wider_than_the_column():
    """A block is fenced, or indented by four spaces."""
    shown = [(page, line) for page, _, text in BLOCKS for line in text.split("\n")]
    shown += [
        (page, line[4:])
        for page, text in PAGES.items()
        for line in re.findall("^    .*", text, re.MULTILINE)
    ]
    assert [(page, line) for page, line in shown if len(line) > WIDTH] == []


def test_the_list_of_modules_is_that_of_the_package():
    generated = reference.modules()
    rooms = re.split(r"^### (\w+)$", generated, flags=re.MULTILINE)[1:]
    named = {
        f"{room}/{module}.py"
        for room, text in zip(rooms[::2], rooms[1::2], strict=True)
        for module in re.findall(r"^\| `([\w/]+)` \| \S", text, re.MULTILINE)
    }
    package = ROOT / "pipeline"
    files = {
        path.relative_to(package).as_posix()
        for path in package.glob("*/**/*.py")
        if path.name != "__init__.py"
    }
    assert named == files


def test_the_config_reference_describes_every_key():
    keys = re.findall(r"^\| `(\S+)` \|", reference.config_keys(), re.MULTILINE)
    assert {"seed", "training.keep_best.mode", "trust.allow"} <= set(keys)
    assert reference.undescribed() == []
    choices = re.findall(
        r"^\| `(\w+)=(\w+)` \| \S", reference.config_groups(), re.MULTILINE
    )
    files = [
        path.relative_to(ROOT / "conf").with_suffix("").as_posix()
        for path in (ROOT / "conf").glob("*/*.yaml")
    ]
    alone = {"accumulation/default", "training/default"}
    assert {"/".join(choice) for choice in choices} == set(files) - alone


def test_every_room_says_what_it_is_for():
    """The tree of the documentation is made from the docstrings of the doors."""
    for room in ROOMS[1:]:
        tree = ast.parse(
            (ROOT / "pipeline" / room / "__init__.py").read_text(encoding="utf-8")
        )
        assert ast.get_docstring(tree), room


def site(source: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Build the site as `make docs` does."""
    options = ["--fail-on-warning", "--keep-going", "--nitpicky", "--quiet"]
    command = [sys.executable, "-m", "sphinx", *options, str(source), str(folder)]
    return subprocess.run(command, env=environment(), capture_output=True, text=True)


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path):
    done = site(ROOT / "docs", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "accumulate_gradients" in (tmp_path / "accumulation.html").read_text(
        encoding="utf-8"
    )
    assert "accumulation.same_noise" in (tmp_path / "config_reference.html").read_text(
        encoding="utf-8"
    )
    assert 'href="your_own_code.html#in-your-own-loop"' in (
        tmp_path / "index.html"
    ).read_text(encoding="utf-8")


@pytest.mark.soak
def test_the_site_is_refused_with_a_dead_link(tmp_path):
    shutil.copytree(
        ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("_build")
    )
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path)
    for folder in ("pipeline", "conf", "tests"):  # of which pages are generated
        (tmp_path / folder).symlink_to(ROOT / folder)
    with (tmp_path / "README.md").open("a", encoding="utf-8") as file:
        file.write("\n[one](docs/nothing.md) [two](docs/design.md#nothing)\n")
    done = site(tmp_path / "docs", tmp_path / "site")
    assert done.returncode != 0
    assert "nothing.md" in done.stderr
    assert "design.md#nothing" in done.stderr or "'nothing'" in done.stderr

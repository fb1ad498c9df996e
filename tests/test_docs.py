"""What README.md, CONTRIBUTING.md and docs/*.md say is true.

Commands compose, code is that of the examples, and links and paths lead somewhere. The
examples themselves are run by tests/examples/.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from docs import reference
from pipeline import accumulation
from pipeline.__main__ import VERBS, main
from pipeline.config.compose import composed, directory
from pipeline.config.resolve import resolve
from pipeline.config.schema import register
from pipeline.config.sizes import Batching
from pipeline.rerun.request import parse_command_line
from pipeline.sweep.files import sweep_files
from pipeline.tracking.foreign_store import MULTIRUN
from tests.docs.pages import TUTORIAL, Block, command_lines, read_blocks, read_pages
from tests.parameters import mostly_slow
from tests.running import ROOT, environment
from tests.test_architecture import PACKAGES

LINK = re.compile(r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)")
PATH = re.compile(
    r"`((?:pipeline|conf|sweeps|examples|tests|docs|benchmarks|hydra_plugins)/[\w./]*)`"
)
WIDTH = 90  # characters of code that fit the column of the site
CONFS_OF_EXAMPLES = sorted((ROOT / "examples").glob("*/conf"))
FOLDERS = ",".join(f"'file://{folder}'" for folder in CONFS_OF_EXAMPLES)


def read_commands(blocks: list[Block]) -> list[str]:
    """Return the lines of the shell's blocks, sorted, without comments.

    Those of the tutorial are left out.
    """
    lines = set()
    for block in blocks:
        if block.kind == "sh" and block.page != TUTORIAL:
            lines |= set(command_lines(block))
    return sorted(lines)


PAGES = read_pages()
BLOCKS = read_blocks(PAGES)
COMMANDS = read_commands(BLOCKS)


def lines_of(verb: str) -> list[str]:
    """Return the documented command lines of a verb, without `pipeline`."""
    lines = [line for line in COMMANDS if line.startswith(f"pipeline {verb}")]
    return [line.removeprefix("pipeline ") for line in lines]


def test_the_pages_were_read():
    assert len(PAGES) >= 10
    assert len(lines_of("train")) >= 25
    assert len(lines_of("sweep")) >= 6
    for verb in ("train", "sweep", "rerun", "report"):
        assert lines_of(verb), verb


def test_every_name_for_users_is_in_the_python_api():
    page = PAGES["docs/accumulation.md"]
    documented = re.findall(
        r"^\.\. auto(?:class|function):: (\w+)$", page, re.MULTILINE
    )
    assert set(documented) >= set(accumulation.__all__)


def test_the_readme_is_short():
    assert len(PAGES["README.md"].splitlines()) <= 110


def test_the_readme_counts_the_cases_as_they_were_measured():
    """The table that compares Keras' option and this package."""
    rows = {}
    for line in PAGES["README.md"].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3:
            rows[cells[0]] = cells[1:]
    (cases,) = [row for name, row in rows.items() if "twelve typical cases" in name]
    keras = outcomes_of("keras_fit", "fit")
    ours = outcomes_of("ours", "ours")
    counts = Counter(keras.values())
    assert len(keras) == 12
    assert cases == [
        f"{counts['right']}; {counts['wrong']} are wrong, {counts['raises']} raise an error",
        str(Counter(ours.values())["right"]),
    ]

    (speeds,) = [row for name, row in rows.items() if "six models" in name]
    figures = json.loads((ROOT / "docs" / "bench.json").read_text())["figures"]
    medians = []
    for figure in figures:
        if figure["what"] == "train ÷ fit, one update per execution":
            medians.append(figure["median"])
    assert len(medians) == 6
    assert speeds == ["1", f"{min(medians):.1f} to {max(medians):.1f}"]


def outcomes_of(library: str, way: str) -> dict[str, str]:
    """Return, by case, what a way of a library came to in docs/conformance.json."""
    measured = json.loads((ROOT / "docs" / "conformance.json").read_text())
    outcomes = {}
    for case, outcome in measured[library]["outcomes"][way].items():
        bound = 1e-12
        if case == "logs":
            bound = 1e-6
        if outcome["raised"]:
            outcomes[case] = "raises"
        elif outcome["error"] <= bound:
            outcomes[case] = "right"
        else:
            outcomes[case] = "wrong"
    return outcomes


def test_every_message_of_the_page_on_trouble_is_one_of_the_program():
    page = PAGES["docs/troubleshooting.md"]
    quoted = re.findall(r"^\| `(.+?)` \| ", page, re.MULTILINE)
    assert len(quoted) >= 20
    texts = texts_of_the_program()
    for message in quoted:
        for part in message.split("…"):
            assert any(part.strip() in text for text in texts), message
    assert not any("must not be blue" in text for text in texts)


def texts_of_the_program() -> list[str]:
    """Return the strings in pipeline/; `…` stands for what a string is filled with."""
    texts = []
    for file in sorted((ROOT / "pipeline").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                constants = [
                    part for part in node.values if isinstance(part, ast.Constant)
                ]
                texts += ["…".join(str(part.value) for part in constants)]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return texts


def test_the_table_of_commands_has_every_verb():
    page = PAGES["docs/command_line.md"]
    table = page.split("## Commands")[1].split("\n\n")[1]
    assert set(re.findall(r"^\| `pipeline (\w+)", table, re.MULTILINE)) == set(VERBS)


@cache
def slow_by_test(file: Path) -> dict[str, bool]:
    """Return, by the name of each test in a file, whether it is not in `make test`.

    A test of which only some parameters are marked slow is in it.
    """
    if not file.is_file():
        return {}
    slow_marks = {"pytest.mark.slow", "pytest.mark.soak"}
    is_slow = {}
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            marks = {ast.unparse(mark) for mark in node.decorator_list}
            is_slow[node.name] = bool(marks & slow_marks)
    return is_slow


def lacking(table: str) -> list[str]:
    """Return the tests in a table of guarantees that are not there.

    In the first column a test has to be one of `make test`.
    """
    missing = []
    for line in table.splitlines():
        if not line.startswith("| ") or "::test_" not in line:
            continue
        _, test, *wider_tests = line.strip("| ").split(" | ")
        if is_slow_test(test) is not False:
            missing.append(test.strip(" |`"))
        for wider in wider_tests:
            if is_slow_test(wider) is None:
                missing.append(wider.strip(" |`"))
    return missing


def is_slow_test(cell: str) -> bool | None:
    """Return whether the test in a cell is not in `make test`; None if there is none."""
    file, name = cell.strip(" |`").split("::")
    return slow_by_test(ROOT / "tests" / file).get(name)


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


GROUPS = {path.name for path in (ROOT / "conf").iterdir() if path.is_dir()}


def overrides_of(line: str) -> list[str]:
    """Return the overrides of a training, with one value for those that are swept."""
    words = shlex.split(line)[1:]
    options = ("-m", "--config-dir", "conf", "--help")  # tests/cli/test_cli.py
    overrides = [word for word in words if word not in options]
    return [override.replace("1,2,4,8", "2") for override in overrides]


def choices_of(line: str) -> set[str]:
    """Return the overrides of a training that choose an option of a group."""
    choices = set()
    for override in overrides_of(line):
        if override.lstrip("+").partition("=")[0] in GROUPS | {"callbacks"}:
            choices.add(override)
    return choices


def trainings() -> list:
    """Return the lines as parameters; slow are those that choose nothing new."""
    lines = lines_of("train")
    chosen = set()
    fast = []
    for line in sorted(lines, key=lambda line: (-len(choices_of(line)), line)):
        if not choices_of(line) <= chosen:
            fast.append(line)
            chosen |= choices_of(line)
    return mostly_slow(lines, fast)


@pytest.mark.parametrize("line", trainings(), ids=str)
def test_every_training_composes_and_passes_the_checks(line):
    sizes_of(overrides_of(line))


def test_every_key_of_a_training_is_in_the_config():
    """Of the lines that choose no option: a `+` adds what the config has not."""
    config = composed([])
    checked = []
    for line in lines_of("train"):
        if choices_of(line):
            continue
        for override in overrides_of(line):
            key = override.partition("=")[0]
            if not key.startswith(("+", "~", "hydra.")):
                assert has_key(config, key), line
                checked.append(key)
    assert len(checked) >= 40
    assert not has_key(config, "training.epoch")


def has_key(config: DictConfig, key: str) -> bool:
    parent, _, name = key.rpartition(".")
    node = OmegaConf.select(config, parent)
    return isinstance(node, DictConfig) and name in node


def sizes_of(overrides: list[str]) -> Batching:
    """Return the batch sizes of `pipeline train OVERRIDES`."""
    register()
    GlobalHydra.instance().clear()
    where = ["hydra/launcher=basic", f"hydra.searchpath=[{FOLDERS}]"]
    where += ["hydra.runtime.output_dir=outputs"]
    with initialize_config_dir(directory(), version_base="1.3"):
        config = compose("config", [*overrides, *where], return_hydra_config=True)
    # Callbacks name the run directory by `${hydra:runtime.output_dir}`.
    HydraConfig.instance().set_config(config)
    try:
        keys = [key for key in config if key != "hydra"]
        return resolve(OmegaConf.masked_copy(config, keys), overrides).batching
    finally:
        HydraConfig.instance().cfg = None


def sweeps() -> list:
    """Return the lines as parameters; slow are those after the first of a file."""
    lines = lines_of("sweep")
    first_lines = {}
    for line in lines:
        first_lines.setdefault(shlex.split(line)[1], line)
    return mostly_slow(lines, list(first_lines.values()))


@pytest.mark.parametrize("line", sweeps(), ids=str)
def test_every_sweep_composes(line):
    _, name, *words = shlex.split(line)
    file = []
    if name != MULTIRUN or "--again" not in words:
        file = ["--config-dir", str(sweep_files()[name].parent), "--config-name", name]
    no_overrides = ("--", "SWEEP", "https:")
    overrides = []
    for word in words:
        if not word.startswith(no_overrides):
            overrides.append(first_value(word))
    composed([*file, *overrides])


def first_value(override: str) -> str:
    """Return the override of the first job where it is swept, as in `seed=0,1,2`."""
    if "[" in override or "{" in override:
        return override
    return override.partition(",")[0]


@pytest.mark.parametrize("line", lines_of("rerun"), ids=str)
def test_every_rerun_is_understood(line):
    request = parse_command_line(shlex.split(line)[1:], None)
    assert request.run_id in ("RUN_ID", "SWEEP")
    assert all(isinstance(key, str) for key in request.values)


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "train"])
def test_every_option_is_one_of_the_verb(verb, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([verb, "--help"])
    printed = capsys.readouterr().out
    for line in lines_of(verb):
        for word in shlex.split(line):
            if word.startswith("--"):
                assert re.search(rf"{word}\b", printed), line


def options_in_the_table() -> list[tuple[str, str]]:
    """Return the verbs and options in the table of options, without `--quiet`."""
    page = PAGES["docs/command_line.md"]
    table = page.split("## Options")[1].split("\n\n")[1]
    rows = []
    for line in table.splitlines()[2:]:
        names, verbs, _ = re.split(r" *(?<!\\)\| *", line.strip("| "), maxsplit=2)
        if verbs == "all":
            continue
        listed = re.findall(r"`(\w+)", verbs)
        if verbs.startswith("all but"):
            listed = [verb for verb in VERBS if verb not in listed]
        for verb in listed:
            rows += [(verb, option) for option in re.findall(r"--[\w-]+", names)]
    return rows


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_a_verb_has_the_options_in_the_table(verb, capsys):
    if verb == "train":
        assert main([verb, "--help"]) == 0
    else:
        with pytest.raises(SystemExit, match="0"):
            main([verb, "--help"])
    printed = capsys.readouterr().out
    options = [option for name, option in options_in_the_table() if name == verb]
    assert options or verb == "resume"
    for option in options:
        assert re.search(rf"{option}\b", printed), option


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
    """Targets of make, modules and scripts of Python, and folders to enter."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    for content in PAGES.values():
        named = re.findall(r"(?:^|`)make ([a-z-]+)", content, re.MULTILINE)
        assert set(named) <= targets

    for line in COMMANDS:
        words = line.split()
        if words[:2] == ["python", "-m"] and words[2] != "pip":
            module = ROOT / words[2].replace(".", "/")
            files = [module.with_suffix(".py"), module / "__main__.py"]
            assert any(file.is_file() for file in files), line
        elif words[:1] in (["python"], ["sbatch"], ["cd"]) and words[1] != "-m":
            assert (ROOT / words[1]).exists(), line


def test_code_is_that_of_the_examples():
    """A block that names a file in its first line has parts of that file.

    A comment `# …` stands between two parts, for the lines that are left out. In a
    config, the name of the file follows the line `# @package`, which has to be first.
    """
    blocks = [block for block in BLOCKS if block.kind in ("python", "yaml")]
    assert len(blocks) >= 8
    for block in blocks:
        if block.page == TUTORIAL:
            continue
        first, code = block.text.split("\n", 1)
        if first.startswith("# @package"):
            package = first
            first, code = code.split("\n", 1)
            code = f"{package}\n{code}"
        file = re.fullmatch(r"# (examples/\S+)", first)
        assert file, (
            f"{block.page}: a block of code begins with `# examples/…`, the file that "
            f"it is from; not with {first}"
        )
        source = (ROOT / file[1]).read_text(encoding="utf-8")
        for part in code.split("# …\n"):
            assert part in source, f"{block.page}: not in {file[1]}:\n{part}"


def anchors(content: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and MyST make them."""
    prose = re.sub(r"^```.*?^```$", "", content, flags=re.DOTALL | re.MULTILINE)
    names = set()
    for heading in re.findall(r"^#+ (.*)$", prose, re.MULTILINE):
        title = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)  # a link's text
        title = re.sub(r"[^\w\- ]", "", title.lower())
        names.add(title.replace(" ", "-"))
    return names


def broken(page: str, content: str) -> Iterator[str]:
    """Yield the relative links of a page that lead nowhere."""
    for path, anchor in LINK.findall(content):
        target = ROOT / page
        if path:
            target = target.parent / path
        if not target.exists():
            yield f"{path}#{anchor}" if anchor else path
        elif anchor and anchor not in anchors(target.read_text(encoding="utf-8")):
            yield f"{path}#{anchor}"


@pytest.mark.parametrize("page", PAGES)
def test_every_link_and_every_anchor_exists(page):
    assert list(broken(page, PAGES[page])) == []


def test_a_broken_link_is_found():
    content = """
## How to
[a](docs/design.md#packages) [b](docs/design.md#package) [c](docs/nothing.md)
[d](#track-a-run) [e](#how-not-to)
"""
    assert list(broken("README.md", content)) == [
        "docs/design.md#package",
        "docs/nothing.md",
        "#how-not-to",
    ]


@pytest.mark.parametrize("page", PAGES)
def test_every_path_that_is_named_exists(page):
    for path in PATH.findall(PAGES[page]):
        if not re.search("NAME|_build", path):
            assert (ROOT / path).exists(), path


def test_no_block_is_wider_than_the_column():
    """A block is fenced, or indented by four spaces."""
    for block in BLOCKS:
        for line in block.text.split("\n"):
            assert len(line) <= WIDTH, block.page
    for page, text in PAGES.items():
        for line in re.findall("^    (.*)", text, re.MULTILINE):
            assert len(line) <= WIDTH, page


def test_the_list_of_modules_is_that_of_the_package():
    # Split by a pattern with a group: the parts between are names and texts by turns.
    _, *parts = re.split(r"^### (\w+)$", reference.modules(), flags=re.MULTILINE)
    listed = set()
    for package, text in zip(parts[::2], parts[1::2], strict=True):
        for module in re.findall(r"^\| `([\w/]+)` \| \S", text, re.MULTILINE):
            listed.add(f"{package}/{module}.py")

    root = ROOT / "pipeline"
    files = [path for path in root.glob("*/**/*.py") if path.name != "__init__.py"]
    assert listed == {path.relative_to(root).as_posix() for path in files}


def test_the_config_reference_is_up_to_date():
    written = PAGES["docs/config_reference.md"]
    is_current = written == reference.with_tables(written)
    assert is_current, "docs/config_reference.md is stale: python -m docs.reference"


def described() -> str:
    """Return all tables of keys in the config reference."""
    tables = [reference.config_keys(), reference.dataset_keys()]
    return "\n".join([*tables, reference.argument_keys()])


def test_a_resumed_run_keeps_what_the_reference_lists():
    kept = reference.kept_keys()
    assert "`dataset.*`, `model.*`" in kept
    assert "`accumulation.effective_batch_size`" in kept
    assert "`hardware.precision`" in kept
    assert "hardware.replicas" not in kept
    _, _, free = kept.partition("; but not ")
    assert "`dataset.data_dir`" in free
    assert "`dataset.pad`" not in free


def test_the_config_reference_describes_every_key():
    rows = re.findall(r"^\| `(\S+)` \| .*\| (.*) \|$", described(), re.MULTILINE)
    keys = dict(rows)
    assert {"seed", "training.keep_best.mode", "trust.allow"} <= set(keys)
    assert {"dataset.pad", "model.hidden", "optimizer.rho"} <= set(keys)
    assert [key for key, description in rows if not description.strip()] == []
    choices = re.findall(
        r"^\| `(\w+)=(\w+)` \| \S", reference.config_groups(), re.MULTILINE
    )
    conf = ROOT / "conf"
    files = set()
    for path in conf.glob("*/*.yaml"):
        files.add(path.relative_to(conf).with_suffix("").as_posix())
    only_choices = {"accumulation/default", "training/default"}
    assert {"/".join(choice) for choice in choices} == files - only_choices


def test_every_package_says_what_it_is_for():
    """The list of packages in the documentation is made from their docstrings."""
    for package in PACKAGES[1:]:
        file = ROOT / "pipeline" / package / "__init__.py"
        tree = ast.parse(file.read_text(encoding="utf-8"))
        assert ast.get_docstring(tree), package


def site(source: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Build the site as `make docs` does."""
    options = ["--fail-on-warning", "--keep-going", "--nitpicky", "--quiet"]
    command = [sys.executable, "-m", "sphinx", *options, str(source), str(folder)]
    return subprocess.run(command, env=environment(), capture_output=True, text=True)


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path):
    done = site(ROOT / "docs", tmp_path)
    assert done.returncode == 0, done.stderr
    expected = {
        "accumulation.html": "accumulate_gradients",
        "config_reference.html": "accumulation.same_noise",
        "index.html": 'href="noise.html#batchnormalization"',
    }
    for page, text in expected.items():
        assert text in (tmp_path / page).read_text(encoding="utf-8")


@pytest.mark.soak
def test_the_site_is_rejected_with_a_dead_link(tmp_path):
    ignored = shutil.ignore_patterns("_build")
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=ignored)
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path)
    for folder in ("pipeline", "conf", "tests"):  # pages are generated from them
        (tmp_path / folder).symlink_to(ROOT / folder)
    with (tmp_path / "README.md").open("a", encoding="utf-8") as file:
        file.write("\n[one](docs/nothing.md) [two](docs/design.md#nothing)\n")
    done = site(tmp_path / "docs", tmp_path / "site")
    assert done.returncode != 0
    assert "nothing.md" in done.stderr
    assert "design.md#nothing" in done.stderr or "'nothing'" in done.stderr

"""Reads the pages of the documentation: README.md, CONTRIBUTING.md and docs/*.md."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.running import ROOT

FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)

# Its code and its commands need the folder that the page makes: test_tutorial.py runs
# them there.
TUTORIAL = "docs/tutorial.md"


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: its `kind`, such as `sh`, and its `text`."""

    page: str
    kind: str
    text: str


def read_pages() -> dict[str, str]:
    """Return the text of each page by its path."""
    files = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    files += sorted((ROOT / "docs").glob("*.md"))
    texts = {}
    for file in files:
        texts[file.relative_to(ROOT).as_posix()] = file.read_text(encoding="utf-8")
    return texts


def read_blocks(pages: dict[str, str]) -> list[Block]:
    """Return the fenced blocks of all pages."""
    blocks = []
    for page, content in pages.items():
        for kind, text in FENCE.findall(content):
            blocks.append(Block(page, kind, text))
    return blocks


def command_lines(block: Block) -> list[str]:
    """Return the lines of a block of the shell, without comments."""
    lines = re.sub(r" \\\n +", " ", block.text).split("\n")
    return [re.sub(r"\s+# .*", "", line) for line in lines]


def side(diff: str, dropped: str) -> str:
    """Return the code of one side of a diff, without the lines marked `dropped`."""
    lines = [line[1:] for line in diff.splitlines() if not line.startswith(dropped)]
    return "\n".join(lines)

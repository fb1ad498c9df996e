"""Follows a page as its reader does: saves its files and runs its commands, in order.

python, yaml    a file; the first line of the block is a comment with its path
diff            a change of a file that was saved before
sh              commands
text            what the commands above it print
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.docs.pages import Block, command_lines, side

# Runs `pipeline …` or `python …` in a folder.
Run = Callable[[list[str], Path], subprocess.CompletedProcess[str]]


@dataclass(frozen=True)
class Step:
    """Commands of a page, the output that it shows, and what they printed."""

    commands: str
    shown: str
    printed: str


@dataclass
class Walkthrough:
    """The reader of a page.

    Attributes:
        folder: the folder that the reader is in.
        run: runs `pipeline` and `python`.
        steps: what was done so far.
    """

    folder: Path
    run: Run
    steps: list[Step] = field(default_factory=list)
    _status: int = 0
    _run_id: str = "RUN_ID"  # of the last `pipeline train`, once there is one

    def follow(self, blocks: list[Block]) -> list[Step]:
        """Do what the blocks say, and return the steps whose output is shown."""
        commands = ""
        printed = ""
        for block in blocks:
            if block.kind in ("python", "yaml"):
                self._save(block.text)
            elif block.kind == "diff":
                self._change(block.text)
            elif block.kind == "sh":
                commands = block.text
                printed = self._run_commands(command_lines(block))
            elif block.kind == "text":
                self.steps.append(Step(commands, block.text, printed))
        return self.steps

    def _save(self, text: str) -> None:
        # Hydra reads `# @package …` only above all other comments, such as the path.
        path = re.search(r"^# (\S+\.(?:py|yaml))$", text, re.MULTILINE)
        assert path is not None, text
        file = self.folder / path[1]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")

    def _change(self, diff: str) -> None:
        """Replace the old side of a diff by the new one, in the file that has it."""
        old = side(diff, "+")
        new = side(diff, "-")
        changed = []
        for file in self.folder.glob("*.py"):
            code = file.read_text(encoding="utf-8")
            if old in code:
                file.write_text(code.replace(old, new), encoding="utf-8")
                changed.append(file)
        assert len(changed) == 1, diff

    def _run_commands(self, lines: list[str]) -> str:
        """Run some command lines, and return what they print.

        A command has to end with 0, unless the page shows its exit status.
        """
        printed = ""
        for line in lines:
            words = shlex.split(line.replace("RUN_ID", self._run_id), comments=True)
            if not words:
                continue
            if words[0] == "cd":
                self.folder = (self.folder / words[1]).resolve()
            elif line == "echo $?":
                printed += f"{self._status}\n"
            elif words[0] in ("pipeline", "python"):
                done = self.run(words, self.folder)
                shows_status = "echo $?" in lines
                assert shows_status or done.returncode == 0, f"{line}\n{done.stderr}"
                self._status = done.returncode
                printed += self._output(words, done)
            else:
                subprocess.run(words, cwd=self.folder, check=True)
        return printed

    def _output(self, words: list[str], done: subprocess.CompletedProcess[str]) -> str:
        """Return what a page shows of a command: of a script no warnings of others."""
        if words[0] == "python":
            return done.stdout
        if words[1] == "train":
            (self._run_id,) = re.findall("^MLflow run (.{32}) ", done.stderr, re.M)
        return done.stderr + done.stdout

"""A YAML file of the user's own is rejected where its aliases make it huge.

No memory is spent on it.
"""

from __future__ import annotations

import pytest

from pipeline.common.errors import ConfigError
from pipeline.common.yaml_size import check_size
from pipeline.config import compose


def laughs(levels):
    lines = ["a0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol, lol]"]
    for level in range(1, levels):
        aliases = ", ".join(10 * [f"*a{level - 1}"])
        lines.append(f"a{level}: &a{level} [{aliases}]")
    return "\n".join(lines)


@pytest.mark.parametrize("text", [laughs(9), "a: &a [*a]", laughs(100)], ids=len)
def test_a_file_of_a_billion_values_is_refused(tmp_path, text):
    file = tmp_path / "model" / "mine.yaml"
    file.parent.mkdir()
    file.write_text(text)
    with pytest.raises(ConfigError, match="must hold at most 100,000 values with its"):
        compose.read_command_line(["--config-dir", str(tmp_path), "model=mine"])


@pytest.mark.parametrize("text", [laughs(3), "a: 1 # & *", "a: [", "a: *b\nc: &b 1"])
def test_another_file_is_left_to_hydra(tmp_path, text):
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    check_size(file)

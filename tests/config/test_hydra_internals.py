"""What pipeline/config/hydra_internals.py uses of Hydra is still what it was."""

from __future__ import annotations

from pipeline.config import hydra_internals

WHERE = "see pipeline/config/hydra_internals.py"


def test_the_parser_knows_overrides_and_the_options_that_are_read():
    line = ["a=1", "-m", "--config-dir", "mine", "b=2", "-sc", "query=bash"]
    parser = hydra_internals.get_args_parser()
    options = parser.parse_intermixed_args(line)
    read = {
        name: getattr(options, name, None)
        for name in ("overrides", "multirun", "config_dir", "shell_completion")
    }
    assert read == {
        "overrides": ["a=1", "b=2", "query=bash"],
        "multirun": True,
        "config_dir": "mine",
        "shell_completion": True,
    }, WHERE

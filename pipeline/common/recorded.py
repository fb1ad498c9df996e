"""Reads JSON and YAML files that this package wrote, and checks their content.

A user or a faulty disk may have changed a file in the meantime.

A form describes what a file must contain:

    int                a value of that type
    (int, str)         a value of one of these types
    [form]             a list whose entries have the form
    {"key": form}      a mapping with this key; `key?` may be missing or null
    {str: form}        a mapping with any keys, whose values have the form
"""

import json
import re
from pathlib import Path
from typing import Any

import yaml

from pipeline.common.errors import first_line

_WORDS = {
    dict: "a mapping",
    list: "a list",
    str: "a text",
    int: "an integer",
    float: "a float",
    bool: "a bool",
    type(None): "null",
}


class FormError(ValueError):
    """A file is damaged. The message names the file, the line and the fault."""


class _Loader(yaml.SafeLoader):
    """Loads YAML, and rejects aliases, as an alias could make a node contain itself."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.MarkedYAMLError(
                problem="an alias is not expected",
                problem_mark=self.peek_event().start_mark,
            )
        return super().compose_node(parent, index)


def read(file: Path, form: Any) -> Any:
    """Return the content of `file`: YAML if its suffix is `.yaml`, else JSON.

    Raises:
        FormError: the file cannot be parsed, or does not have the `form`.
        OSError: the file cannot be read.
    """
    data = file.read_bytes()
    path: list[str] = []
    try:
        text = data.decode()
        if file.suffix == ".yaml":
            content = yaml.load(text, _Loader)
        else:
            content = json.loads(text)
        check(content, form, path)
        return content
    except json.JSONDecodeError as error:
        line = error.lineno
        problem = error.msg
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        problem = str(error.problem)
    except FormError as error:
        line = _line(text, path)
        problem = str(error)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        # The file has bytes or characters that are not text, or is nested too deeply.
        position = vars(error).get("position", getattr(error, "start", 0))
        line = 1 + data.count(b"\n", 0, position)
        problem = first_line(error)
    raise FormError(f"{file.name}, line {line}: {problem}")


def check(value: Any, form: Any, path: list[str]) -> None:
    """Check that `value` has the `form`.

    Raises:
        FormError: `value` does not have the `form`. The keys that lead to the fault are
            then in `path`.
    """
    if isinstance(form, dict):
        _check_type(value, dict, path)
        for key, inner in form.items():
            _check_entries(value, key, inner, path)
    elif isinstance(form, list):
        _check_type(value, list, path)
        for entry in value:
            check(entry, form[0], path)
    else:
        _check_type(value, form, path)


def _check_type(value: Any, types: Any, path: list[str]) -> None:
    if isinstance(value, types):
        return
    alternatives = types if isinstance(types, tuple) else (types,)
    expected = " or ".join(_WORDS[each] for each in alternatives)
    actual = _WORDS.get(type(value), type(value).__name__)
    subject = path[-1] if path else "the content"
    raise FormError(f"{subject} must be {expected}, but is {actual}")


def _check_entries(mapping: Any, key: Any, form: Any, path: list[str]) -> None:
    """Check the entry at `key`, or all entries if `key` is the type `str`."""
    names = list(mapping) if key is str else [key.rstrip("?")]
    is_optional = key is not str and key.endswith("?")
    for name in names:
        if is_optional and mapping.get(name) is None:
            continue
        if name not in mapping:
            raise FormError(f"{name} is missing")
        path.append(str(name))
        check(mapping[name], form, path)
        path.pop()


def _line(text: str, path: list[str]) -> int:
    """Return the number of the line in `text` with the last key in `path`."""
    position = 0
    for key in path:
        pattern = rf'^[\s{{\[,-]*"?{re.escape(key)}"?\s*:'
        match = re.compile(pattern, re.MULTILINE).search(text, position)
        if match:
            position = match.end()
    return 1 + text.count("\n", 0, position)

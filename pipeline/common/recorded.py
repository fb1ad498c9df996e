"""JSON and YAML files that this package has written and reads again, perhaps after somebody or a disk has changed them.

A form says what a file must hold: a type, or several; `[form]` for a list of it; a dict for a mapping with these keys,
each of a form, where the key `str` stands for all keys, and `KEY?` may be missing or null.
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
    bool: "a bool",
    type(None): "null",
}


class FormError(ValueError):
    """A file is damaged; the message names the file, the line and what is wrong there."""


class _Loader(yaml.SafeLoader):
    """Without aliases: a node that contains itself has no end."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.MarkedYAMLError(
                problem="an alias is not expected",
                problem_mark=self.peek_event().start_mark,
            )
        return super().compose_node(parent, index)


def read(file: Path, form: Any) -> Any:
    """Return what `file` holds: YAML by its suffix, else JSON; a `FormError` if it is not of the `form`."""
    data, path = file.read_bytes(), list[str]()
    try:
        text = data.decode()
        found = yaml.load(text, _Loader) if file.suffix == ".yaml" else json.loads(text)
        check(found, form, path)
        return found
    except json.JSONDecodeError as error:
        line, wrong = error.lineno, error.msg
    except yaml.MarkedYAMLError as error:
        line, wrong = (
            error.problem_mark.line + 1 if error.problem_mark else 1,
            str(error.problem),
        )
    except FormError as error:
        line, wrong = _line(text, path), str(error)
    except (
        ValueError,
        RecursionError,
        yaml.YAMLError,
    ) as error:  # a byte or a sign that is no text; nested too deeply
        at = vars(error).get("position", getattr(error, "start", 0))
        line, wrong = 1 + data.count(b"\n", 0, at), first_line(error)
    raise FormError(f"{file.name}, line {line}: {wrong}")


def check(value: Any, form: Any, path: list[str]) -> None:
    """Raise a `FormError` if `value` is not of the `form`; the `path` then leads to what is wrong."""
    kind: Any = type(form) if isinstance(form, dict | list) else form
    if not isinstance(value, kind):
        words = " or ".join(
            _WORDS[each] for each in (kind if isinstance(kind, tuple) else (kind,))
        )
        found = _WORDS.get(type(value), type(value).__name__)
        raise FormError(
            f"{path[-1] if path else 'all of it'} must be {words}, and is {found}"
        )
    for entry in value if isinstance(form, list) else ():
        check(entry, form[0], path)
    for key, inner in form.items() if isinstance(form, dict) else ():
        for name in value if key is str else [key.rstrip("?")]:
            if name != key and key is not str and value.get(name) is None:
                continue
            if name not in value:
                raise FormError(f"{name} is missing")
            path.append(str(name))
            check(value[name], inner, path)
            path.pop()


def _line(text: str, path: list[str]) -> int:
    """Return the line of `text` at which the keys of `path` end."""
    place = 0
    for key in path:
        if found := re.compile(
            rf'^[\s{{\[,-]*"?{re.escape(key)}"?\s*:', re.MULTILINE
        ).search(text, place):
            place = found.end()
    return 1 + text.count("\n", 0, place)

"""The outputs of a model by their names, and whatever Keras takes for each of them."""

from __future__ import annotations

from collections.abc import Sequence

import keras

from .batch import Nest


def by_name(model: keras.Model, outputs: Nest) -> dict[str, Nest]:
    """Return the outputs under their names, in their order.

    The names are the keys of a dict, joined by `/` where dicts are nested; for a list, the names that a functional
    model gives its outputs, else their numbers. The only output of any other model has the name "".
    """
    flat = keras.tree.flatten_with_path(outputs)
    names = ["/".join(map(str, path)) for path, _ in flat]
    known = getattr(model, "output_names", None) or []
    if not isinstance(outputs, dict) and len(set(known)) == len(names):
        names = known
    return dict(zip(names, (output for _, output in flat), strict=True))


def spread(nest: Nest, names: Sequence[str], *, to_all: bool = False) -> dict[str, Nest]:
    """Return what `nest` has for each of the outputs `names`.

    Args:
        nest: a dict by name, a list or tuple in the order of the outputs, or a leaf, which is for the only output.
        names: of the outputs.
        to_all: a leaf is for every output.

    Raises:
        ValueError: a name is not that of an output, or the number of entries is wrong.
    """
    if not keras.tree.is_nested(nest):
        if len(names) > 1 and nest is not None and not to_all:
            raise ValueError(f"must be given for each of the outputs {', '.join(names)}")
        return dict.fromkeys(names, nest)
    flat = keras.tree.flatten_with_path(nest)
    if isinstance(nest, list | tuple):
        if len(flat) != len(names):
            raise ValueError(f"must have {len(names)} entries, one an output. Received: {len(flat)}")
        return dict(zip(names, (leaf for _, leaf in flat), strict=True))
    given = {"/".join(map(str, path)): leaf for path, leaf in flat}
    if list(names) == [""] and len(given) == 1:
        return dict.fromkeys(names, *given.values())
    for name in given:
        if name not in names:
            raise ValueError(f"must be named as an output, one of {', '.join(names)}. Received: {name}")
    return given

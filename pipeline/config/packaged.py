"""The folders of configs that come with the package."""

from __future__ import annotations

from pathlib import Path


def directory(name: str = "conf") -> str:
    """Return the packaged folder `conf` or `sweeps`: inside an installed wheel, beside the package in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / name
    return str(inside if inside.is_dir() else package.parent / name)

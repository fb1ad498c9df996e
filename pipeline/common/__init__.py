"""Utilities for all packages.

They cover errors, secrets, signals, processes, files that are read back, a cache,
memory and GPUs. This package imports no other package.
"""

__all__ = [
    "disk_cache",
    "durable",
    "errors",
    "imports",
    "link_path",
    "memory_budget",
    "nvidia",
    "recorded",
    "rounding",
    "secrets",
    "signals",
    "sqlite_uri",
    "yaml_size",
]

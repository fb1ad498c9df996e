"""Utilities for the other packages, except `accumulation`.

They cover errors, secrets, signals, processes, files, the user's own modules, a cache,
memory, rounding and GPUs. This package imports no other package of `pipeline`.
"""

__all__ = [
    "disk_cache",
    "durable",
    "errors",
    "file_patterns",
    "imports",
    "link_path",
    "memory_budget",
    "nvidia",
    "own_code",
    "recorded",
    "rounding",
    "secrets",
    "signals",
    "sqlite_uri",
    "yaml_size",
]

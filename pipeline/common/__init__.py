"""What every room may use: errors, secrets, signals, processes, files that are read again, a cache, memory and GPUs.

Imports no other room.
"""

__all__ = [
    "disk_cache",
    "errors",
    "imports",
    "memory_budget",
    "nvidia",
    "recorded",
    "rounding",
    "secrets",
    "signals",
]

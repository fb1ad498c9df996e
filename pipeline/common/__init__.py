"""What every package may use.

Errors, secrets, signals, processes, files that are read again, a cache, memory and GPUs.
It imports no other package.
"""

__all__ = [
    "disk_cache",
    "durable",
    "errors",
    "imports",
    "memory_budget",
    "nvidia",
    "recorded",
    "rounding",
    "secrets",
    "signals",
    "yaml_size",
]

"""What every room may use: errors, secrets, signals, a cache on disk, the memory there is.

Imports nothing of ours.
"""

__all__ = ["disk_cache", "errors", "imports", "memory_budget", "secrets", "signals"]

"""What every room may use: errors, secrets, signals, a cache on disk, the available memory.

Imports no other room.
"""

__all__ = ["disk_cache", "errors", "imports", "memory_budget", "secrets", "signals"]

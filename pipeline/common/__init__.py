"""What every room may use: errors, secrets, signals, files that are read again, a cache on disk, the available memory.

Imports no other room.
"""

__all__ = ["disk_cache", "errors", "imports", "memory_budget", "recorded", "secrets", "signals"]

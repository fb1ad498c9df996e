"""What a sweep found: words with figures, a table, plots, one page.

In: a sweep's name or run ID, read from MLflow alone. Out: files, which are logged to the sweep's parent run.
"""

__all__ = ["command", "document"]

"""The report of a sweep: findings in words, a table, and plots on one HTML page.

The input is a sweep's name or run ID; all data comes from MLflow. The output is files,
which are logged to the sweep's parent run. `reading` reads the sweep, one module per
topic writes its findings, `table` and `plots` present the figures, and `writer`
assembles the report.
"""

__all__ = ["html_page", "writer"]

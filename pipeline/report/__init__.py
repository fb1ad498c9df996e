"""The report of a sweep: findings in words, a table, and plots on one HTML page.

In: a sweep's name or run ID; all data comes from MLflow. Out: files, which are logged
to the sweep's parent run. `comparison` reads the sweep, one file for each topic makes
the sentences, `table` and `plots` show the figures, and `writer` puts them together.
"""

__all__ = ["html_page", "writer"]

"""The report of a sweep, of runs, or of what changed between two sweeps.

The input is the name or the run ID of sweeps or runs, or run directories; all data
comes from MLflow or from the journals of run directories. `command` reads the command
line. The report of one sweep consists of findings in words, a table and plots, on one
HTML page; its files are logged to the sweep's parent run. `reading` reads the sweep,
one module per topic writes its findings, `table` and `plots` present the figures, and
`writer` assembles the report. `runs_page` and `sweep_changes` write the other pages.
`job_ranking` ranks the jobs of a sweep when it ends. `metric_direction` says whether
lower values of a metric are better.
"""

__all__ = ["command", "html_page", "job_ranking", "metric_direction", "writer"]

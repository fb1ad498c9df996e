"""The state of a run between two updates, and its files.

Input: the state of a run, or a run directory. Output: checkpoints, and the checkpoint
from which a run is resumed (`resume_rules`) or with which a new run begins (`fork`).
"""

__all__ = [
    "csv_rows",
    "files",
    "fork",
    "model_archive",
    "recorded_config",
    "resume_rules",
    "run_dirs",
    "snapshot",
]

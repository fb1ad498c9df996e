"""Evaluates and predicts with a checkpoint of any run.

Input: a run directory, or a run or model of a store, and overrides. Output: results
over splits, which are logged to the run, or a file with one row per example.

    command line ─► subject: a record and its weights ─► parts ─► splits ─► results
"""

__all__ = ["evaluate_command", "predict_command"]

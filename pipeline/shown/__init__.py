"""Pictures and tables that show each evaluation of the validation split.

From the batches of an evaluation and the observations of their examples, this package
makes pictures and tables of examples, a confusion matrix and a reliability curve, and
passes them to the tracker.

- `plan` decides what can be shown of a dataset and an objective.
- `observer` measures each example in the evaluation, on the device.
- `collector` keeps the examples that are shown, and counts over all examples.
- `drawing`, `encoding` and `tables` turn them into files of bounded size.
- `functions` calls the user's own functions.
- `show` runs these steps once per evaluation.
"""

__all__ = ["collector", "functions", "observer", "plan", "show"]

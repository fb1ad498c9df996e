"""The parts of a run: devices, data, model, objective and optimizer.

`assembly` builds the parts from a spec, `description` describes them for the run's
record and for the user, and `fitting` trains with them.
"""

__all__ = ["added_losses", "assembly", "description", "devices", "fitting"]

"""The parts of a run.

In: a spec. Out: model, optimizer, objective, metrics and devices, which `assembly` puts
together, `description` describes and `fitting` trains.
"""

__all__ = ["added_losses", "assembly", "description", "devices", "fitting"]

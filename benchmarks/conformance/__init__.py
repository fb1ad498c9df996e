"""Traps of gradient accumulation, run against others and us: `python -m benchmarks.conformance`.

In: nothing. Out: docs/conformance.json and the tables of docs/conformance.md. `cases` is the catalogue, `ways` says how
each library is called, and a module for each library measures in a process of its own, which `run` serves.
"""

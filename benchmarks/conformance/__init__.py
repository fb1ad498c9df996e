"""Traps of gradient accumulation, run against us and others.

`python -m benchmarks.conformance` writes docs/conformance.json and the tables of
docs/conformance.md. `cases` is the catalogue, `ways` says how each library is called,
and a module for each library measures in a process of its own, which `run` serves.
"""

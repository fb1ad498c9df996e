"""Datasets that come with the package.

To add a dataset, add a module here, and list its function in the public names of
`pipeline.dataset` and in `trust.trusted_names`.
"""

__all__ = ["digits", "tables", "topics"]

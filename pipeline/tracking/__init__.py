"""What a run leaves in MLflow, and how it gets there.

In: rows of an update or an evaluation, tags, files. Out: a journal on disk, which a process of its own ships to the
store. `tracker` names what is logged, `provenance` describes the surroundings, `store` opens a store, and
`foreign_store` one that need not be the user's own.
"""

__all__ = ["foreign_store", "journal", "provenance", "shipper", "store", "tracker"]

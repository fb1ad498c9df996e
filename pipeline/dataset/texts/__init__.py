"""Texts as sequences of tokens, for next-token prediction.

    files or TFDS ─► texts ─► splits ─► tokens ─► pieces ─► examples (x, y)

The tokens come from a tokenizer, in the input pipeline or from a cache on disk.
"""

__all__ = ["text_files"]

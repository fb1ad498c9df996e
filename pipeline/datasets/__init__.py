"""TFDS builders that the package brings along."""

"""Formats the values of params for MLflow."""

PARAM_LENGTH = 6000  # MLflow's maximum number of characters in the value of a param


def param_text(value: object) -> str:
    """Return a value as a string of at most `PARAM_LENGTH` characters.

    A longer string is cut, and ends with a note about its full length. The caller must
    mask secrets first, since a secret that is cut would not be recognized.
    """
    text = str(value)
    if len(text) <= PARAM_LENGTH:
        return text
    note = f" … (cut: {len(text):,} characters in all)"
    return text[: PARAM_LENGTH - len(note)] + note

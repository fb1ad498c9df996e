"""The text of a param in MLflow."""

PARAM_LENGTH = 6000  # characters; MLflow takes no longer value


def param_text(value: object) -> str:
    """Return a value as the text of a param.

    A text that is too long is cut, and ends with a note of its full length. Secrets are
    masked before: half of one would not be recognized.
    """
    text = str(value)
    if len(text) <= PARAM_LENGTH:
        return text
    note = f" … (cut: {len(text):,} characters in all)"
    return text[: PARAM_LENGTH - len(note)] + note

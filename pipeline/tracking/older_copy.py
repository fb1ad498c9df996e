"""Recognizes a run directory whose run was continued in another copy of it."""

from typing import Any

from pipeline.tracking.journal_cursor import UNWRITTEN

SEGMENTS = "segments"  # tag of a run that was resumed: the number of its segments


def is_older_copy(run: Any, resumes: int, status: str | None) -> bool:
    """Return whether a run was continued in another copy of its run directory.

    This is so if the store has a later segment of the run, or if the run has finished
    in a segment that was interrupted according to the journal in the directory.

    Args:
        run: the run as it was read from the store.
        resumes: how often the run was resumed according to the journal, which must be
            undamaged.
        status: the run's status according to the journal, or None if its last segment
            has no end.
    """
    tags = run.data.tags
    segments = resumes + 1
    text = tags.get(SEGMENTS, "1")
    stored_segments = int(text) if text.isdecimal() else 1
    if stored_segments != segments:
        return stored_segments > segments

    # If the disk was full, the end of this segment is not in the journal.
    is_unwritten = tags.get(UNWRITTEN) == str(resumes)
    return run.info.status == "FINISHED" and status != "FINISHED" and not is_unwritten

"""Downloads the record of a run from a store, and checks the form of its files.

The record is untrusted input: its files are small, and their values have known types.
"""

import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

from pipeline.common import recorded
from pipeline.tracking import provenance

# The files of a record, with the required types of their values.
_FORMS = {
    "config.yaml": {
        "dataset?": dict,
        "optimizer?": dict,
        "start?": dict,
        "tracking?": dict,
    },
    "environment.json": {
        "git?": dict,
        "code?": dict,
        "package?": dict,
        "packages?": dict,
    },
    "dataset.json": provenance.DATASET,
    "links.json": {str: str},
    "segments.json": [
        {"after": int, "cut?": dict, "code?": {str: str}, "settings?": dict}
    ],
}
LARGEST = 16 * 2**20  # maximum size of one file of a record, in bytes


def download(
    client: Any, run_id: str, names: Collection[str] = tuple(_FORMS)
) -> dict[str, Any]:
    """Return the contents of a record's files, by the files' names.

    Files that the run does not have are left out.

    Args:
        client: an MLflow client for the store.
        run_id: the ID of the run.
        names: the files to read.

    Raises:
        ValueError: a file is too large, or its values have wrong types or sizes.
    """
    contents = {}
    with tempfile.TemporaryDirectory() as folder:
        for artifact in client.list_artifacts(run_id):
            # Skip folders: their size cannot be checked before the download.
            if artifact.path not in names or artifact.is_dir:
                continue
            if (artifact.file_size or 0) > LARGEST:
                size = artifact.file_size
                raise ValueError(f"{artifact.path} is too large: {size} bytes")
            file = Path(client.download_artifacts(run_id, artifact.path, folder))
            contents[artifact.path] = recorded.read(file, _FORMS[artifact.path])

    examples = contents.get("dataset.json", {}).get("examples", {})
    if any(abs(count) >= 2**63 for count in examples.values()):
        raise ValueError("the numbers of examples in dataset.json are too large")
    return contents

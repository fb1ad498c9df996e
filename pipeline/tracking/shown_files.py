"""Names the files with the pictures and tables of an evaluation."""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.common.secrets import mask
from pipeline.tracking.journal_file import PICTURES, SHOWN


@dataclass(frozen=True)
class EncodedPicture:
    """A picture as the content of two files.

    Attributes:
        png: the picture.
        webp: a smaller one, which MLflow's page shows first.
    """

    png: bytes
    webp: bytes


@dataclass(frozen=True)
class Names:
    """Names the files of one evaluation.

    Attributes:
        run: identifies the run, in hexadecimal.
        update: the number of completed updates.
        timestamp: the time of the evaluation, in milliseconds since 1970.
    """

    run: str
    update: int
    timestamp: int

    def picture_files(self, pictures: Mapping[str, EncodedPicture]) -> dict[str, bytes]:
        """Return the contents of the files of pictures, by path in the run directory.

        The names are those of MLflow's `log_image`, so that MLflow's page steps through
        the pictures of a key. The ID in a name follows from the run, the key and the
        step.

        Args:
            pictures: the pictures by key, such as `shown/worst`.
        """
        files = {}
        for key, picture in pictures.items():
            picture_id = uuid.uuid5(uuid.UUID(self.run), f"{key} {self.update}")
            name = (
                f"{PICTURES}/{key.replace('/', '~')}+step+{self.update}"
                f"+timestamp+{self.timestamp}+{picture_id}"
            )
            files[f"{name}.png"] = picture.png
            files[f"{name}+compressed.webp"] = picture.webp
        return files

    def table_files(self, tables: Mapping[str, str]) -> dict[str, bytes]:
        """Return the contents of the files of tables, by path in the run directory.

        Args:
            tables: tables as CSV by name. Secrets in them are masked.
        """
        files = {}
        for name, text in tables.items():
            # Pad the number with zeros, so that MLflow's page lists the files in order.
            path = f"{SHOWN}/{name}_{self.update:09}.csv"
            files[path] = mask(text).encode()
        return files

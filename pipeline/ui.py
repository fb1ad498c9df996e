"""The verb `pipeline ui`: MLflow's UI on the configured store."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from pipeline import compose
from pipeline.masking import mask


def ui(arguments: Sequence[str]) -> int:
    """Serve MLflow's UI on the composed config's store."""
    opened: list[str] = []
    compose.run(lambda config: opened.append(config.tracking.uri), [*arguments, "hydra.run.dir=."])
    for uri in opened:  # none where Hydra was asked to show something, and did
        return _serve(uri)
    return 0


def _serve(uri: str) -> int:
    if uri.startswith(("http://", "https://")):
        print(f"The store is a server with a UI of its own: {mask(uri)}")
        return 0
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--backend-store-uri", uri]
    try:
        return subprocess.call([*command, "--port", os.environ.get("PIPELINE_UI_PORT", "5000")])
    except KeyboardInterrupt:
        return 0

"""Traps of gradient accumulation, run against others and us.

Command:   python -m benchmarks.conformance [LIBRARY …] [--docs FOLDER]
Run time:  about five minutes on two CPU cores
Expect:    docs/conformance.json, and between two comments of docs/conformance.md its tables; ours is right everywhere.
           What is not measured again stays as it was, with its date.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.conformance import page
from benchmarks.conformance.cases import CASES
from benchmarks.conformance.ways import LIBRARIES, Library
from benchmarks.processes import PEERS, ROOT, run
from benchmarks.report import filled


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.conformance", description=__doc__.splitlines()[0]
    )
    names = [library.module for library in LIBRARIES]
    parser.add_argument(
        "libraries",
        nargs="*",
        metavar="LIBRARY",
        help=f"of {', '.join(names)}; all if none is named",
    )
    parser.add_argument("--docs", type=Path, default=ROOT / "docs")
    options = parser.parse_args()
    if unknown := sorted(set(options.libraries) - set(names)):
        parser.error(
            f"LIBRARY must be one of {', '.join(names)}. Received: {', '.join(unknown)}"
        )
    path, document = options.docs / "conformance.json", options.docs / "conformance.md"
    results = json.loads(path.read_text()) if path.exists() else {}
    for library in LIBRARIES:
        if library.module not in (options.libraries or names):
            continue
        if library.peer and not PEERS.exists():
            print(
                f"{library.module} is left out: `make peers` sets it up",
                file=sys.stderr,
            )
            continue
        print(library.module, file=sys.stderr, flush=True)
        results[library.module] = measure(library)
    path.write_text(json.dumps(results, indent=1) + "\n")
    document.write_text(
        filled(document.read_text(), page.text(results), page.BEGIN, page.END)
    )
    print(page.outcomes(results, []))


def measure(library: Library) -> dict[str, Any]:
    """Run all cases with a library, those of two devices apart, and return their outcomes by way and case."""
    python, begun = str(PEERS) if library.peer else sys.executable, time.time()
    outcomes: dict[str, dict[str, Any]] = {call.name: {} for call in library.calls}
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "outcomes.json"
        for devices in sorted({case.devices for case in CASES}):
            launcher = _launcher(devices) if library.processes and devices > 1 else []
            run(
                [
                    python,
                    *launcher,
                    "-m",
                    "benchmarks.conformance.run",
                    library.module,
                    str(devices),
                    str(output),
                ]
            )
            for name, found in json.loads(output.read_text()).items():
                outcomes[name].update(found)
    asked = f"from importlib import metadata; print(*map(metadata.version, {library.packages}))"
    versions = dict(
        zip(library.packages, run([python, "-c", asked]).split(), strict=True)
    )
    return {
        "begun": begun,
        "seconds": time.time() - begun,
        "versions": versions,
        "outcomes": outcomes,
    }


def _launcher(processes: int) -> list[str]:
    """Return how PyTorch starts processes that find each other."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    where = ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    return ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), *where]


if __name__ == "__main__":
    main()

"""Traps of gradient accumulation, run against others and us.

Command:   python -m benchmarks.conformance [LIBRARY …] [--docs FOLDER]
Run time:  about five minutes on two CPU cores
Expect:    docs/conformance.json, and between two comments of docs/conformance.md its
           tables; ours is right everywhere. What is not measured again remains as it
           was, with its date.
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
from benchmarks.processes import PEERS, ROOT, run, versions_in
from benchmarks.report import filled

NAMES = [library.module for library in LIBRARIES]


def main() -> None:
    options = _options()
    path = options.docs / "conformance.json"
    document = options.docs / "conformance.md"
    results = {}
    if path.exists():
        results = json.loads(path.read_text())

    for library in LIBRARIES:
        if library.module not in options.libraries:
            continue
        if library.peer and not PEERS.exists():
            message = f"{library.module} is left out: `make peers` sets it up"
            print(message, file=sys.stderr)
            continue
        print(library.module, file=sys.stderr, flush=True)
        results[library.module] = measure(library)

    path.write_text(json.dumps(results, indent=1) + "\n")
    text = page.text(results)
    document.write_text(filled(document.read_text(), text, page.BEGIN, page.END))
    print(page.outcomes(results, []))


def measure(library: Library) -> dict[str, Any]:
    """Run all cases with a library, and return its part of the JSON.

    The cases of one device and those of two have processes of their own.
    """
    begun = time.time()
    python = str(PEERS) if library.peer else sys.executable
    outcomes: dict[str, dict[str, Any]] = {call.name: {} for call in library.calls}
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "outcomes.json"
        for devices in sorted({case.devices for case in CASES}):
            command = [python]
            if library.processes and devices > 1:
                command += _launcher(devices)
            command += ["-m", "benchmarks.conformance.run"]
            run([*command, library.module, str(devices), str(output)])
            for name, outcomes_by_case in json.loads(output.read_text()).items():
                outcomes[name].update(outcomes_by_case)
    return {
        "begun": begun,
        "seconds": time.time() - begun,
        "versions": versions_in(python, library.packages),
        "outcomes": outcomes,
    }


def _launcher(processes: int) -> list[str]:
    """Return the arguments by which PyTorch starts processes that find each other."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    count = ["--nproc-per-node", str(processes)]
    return ["-m", "torch.distributed.run", *count, *address]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.conformance", description=__doc__.splitlines()[0]
    )
    names = ", ".join(NAMES)
    parser.add_argument(
        "libraries",
        nargs="*",
        metavar="LIBRARY",
        help=f"of {names}; all if none is named",
    )
    parser.add_argument("--docs", type=Path, default=ROOT / "docs")
    options = parser.parse_args()
    unknown = sorted(set(options.libraries) - set(NAMES))
    if unknown:
        parser.error(f"LIBRARY must be one of {names}. Received: {', '.join(unknown)}")
    if not options.libraries:
        options.libraries = NAMES
    return options


if __name__ == "__main__":
    main()

"""python -m benchmarks.conformance.run MODULE DEVICES OUTPUT: the cases of so many devices, by one library, as JSON."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys
from pathlib import Path

from benchmarks.conformance.cases import CASES
from benchmarks.conformance.outcome import measured


def main() -> None:
    module, devices, output = sys.argv[1:]
    library = importlib.import_module(f"benchmarks.conformance.{module}")
    library.prepare()
    cases = [case for case in CASES if case.devices == int(devices)]
    found = {
        name: {case.name: dataclasses.asdict(measured(way, case)) for case in cases}
        for name, way in library.WAYS.items()
    }
    if os.environ.get("RANK", "0") == "0":  # of several processes, the first
        Path(output).write_text(json.dumps(found))


if __name__ == "__main__":
    main()

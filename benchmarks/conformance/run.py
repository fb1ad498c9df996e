"""python -m benchmarks.conformance.run MODULE DEVICES OUTPUT: a library's outcomes.

The cases are those for DEVICES devices. The output is JSON.
"""

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
    outcomes = {}
    for name, way in library.WAYS.items():
        outcomes_by_case = {}
        for case in CASES:
            if case.devices == int(devices):
                outcome = measured(way, case)
                outcomes_by_case[case.name] = dataclasses.asdict(outcome)
        outcomes[name] = outcomes_by_case

    # If there are several processes, the first one writes.
    if os.environ.get("RANK", "0") == "0":
        Path(output).write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main()

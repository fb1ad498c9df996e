"""python -m benchmarks.pytorch LOOP WORKLOAD THREADS: one of `loops.LOOPS`.

It is a contender, see `child.Child`.
"""

from __future__ import annotations

import sys

from benchmarks.child import Child
from benchmarks.workloads import WORKLOADS


def main() -> None:
    # Before the libraries are imported, which may print.
    child = Child()
    import torch

    from benchmarks.pytorch import loops, networks

    loop, name, threads = sys.argv[1:]
    workload = WORKLOADS[name]
    torch.set_num_threads(int(threads))
    torch.manual_seed(0)
    model = networks.build(workload)
    weights = sum(parameter.numel() for parameter in model.parameters())
    child.ready(weights=weights)
    loops.LOOPS[loop](workload, model, child.updated)


if __name__ == "__main__":
    main()

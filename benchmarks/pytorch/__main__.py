"""python -m benchmarks.pytorch LOOP WORKLOAD THREADS: one of `loops.LOOPS` as a contender, see `child.Child`."""

from __future__ import annotations

import sys

from benchmarks.child import Child


def main() -> None:
    child = Child()
    import torch

    from benchmarks.pytorch import loops, networks

    loop, name, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    torch.manual_seed(0)
    model = networks.build(name)
    weights = sum(parameter.numel() for parameter in model.parameters())
    child.ready(weights=weights)
    loops.LOOPS[loop](name, model, child.updated)


if __name__ == "__main__":
    main()

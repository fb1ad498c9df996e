"""How the learning rate follows the effective batch: the rules of `scaling.rule`, by name.

With r = effective batch / `scaling.reference_batch_size`, every rate is multiplied by

    none    1
    linear  r, which keeps the step an example takes: Krizhevsky 2014 (arXiv:1404.5997, section 5);
            Goyal et al. 2017 (arXiv:1706.02677, section 2.1)
    sqrt    √r, which keeps the variance of an update: Krizhevsky 2014; Hoffer et al. 2017 (arXiv:1705.08741)

A new rule has its name and its factor here, and a file in `conf/scaling/`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum

Rule = Enum("Rule", ["none", "linear", "sqrt"])
FACTORS: dict[Rule, Callable[[float], float]] = {
    Rule.none: lambda ratio: 1.0,
    Rule.linear: lambda ratio: ratio,
    Rule.sqrt: math.sqrt,
}

"""The largest difference at which two results count as equal within rounding.

This is the only table for it. `rerun` and `report` compare runs by its bounds, and
`verify` compares two updates by its unit roundoffs. docs/exact.md shows it.
"""

from collections.abc import Collection
from dataclasses import dataclass

# The precision of a run in float32 whose matrix products are computed in TF32.
TF32 = "float32 with TF32"
# The tag of a run that was computed in this way.
IN_TF32 = "float32.in_tf32"


@dataclass(frozen=True)
class Rounding:
    """The relative differences that rounding explains in one precision.

    Training amplifies rounding: SGD(0.1, momentum 0.9) in float32 carried 1e-7 to 0.2
    in 20 updates. So the bound doubles with every update, up to a maximum. The bounds
    are choices, not a theorem: in float64, 120 updates stay below 1e-13; in float32
    AdamW stays below 1e-5, while with a large momentum the runs diverge and count as
    different.

    Attributes:
        bits: bits of the significand, so that the unit roundoff is 2^-bits.
        first: bound at the first update, where both runs have the same weights.
        most: bound at any update.
    """

    bits: int
    first: float
    most: float

    @property
    def unit_roundoff(self) -> float:
        return 2.0**-self.bits

    def bound(self, update: int) -> float:
        """Return the bound at an update, counted from 1."""
        # 60 doublings exceed every bound; 2 to the power of a million would overflow.
        doublings = min(update - 1, 60)
        return min(self.most, self.first * 2.0**doublings)


# By `hardware.precision`, from the finest to the coarsest.
# TF32 rounds both factors of a product to 10 bits, as float16 has them: each by up to
# 2^-11, so a product by 1e-3, and ten layers in a row by 1e-2 if all errors add up.
# Sums and everything else stay in float32.
BY_PRECISION = {
    "float64": Rounding(bits=53, first=1e-12, most=1e-9),
    "float32": Rounding(bits=24, first=1e-5, most=1e-3),
    TF32: Rounding(bits=11, first=1e-2, most=1e-2),
    "mixed_float16": Rounding(bits=11, first=1e-2, most=1e-2),
    "mixed_bfloat16": Rounding(bits=8, first=1e-1, most=1e-1),
}


def coarsest(precisions: Collection[str]) -> str:
    """Return the coarsest of the precisions of some runs; float32 if none is known."""
    known = [precision for precision in BY_PRECISION if precision in precisions]
    if not known:
        return "float32"
    return known[-1]


def of_dtype(dtype: str, *, in_tf32: bool) -> Rounding:
    """Return the rounding of sums and products in a floating-point dtype."""
    if dtype == "float32" and in_tf32:
        return BY_PRECISION[TF32]
    if dtype in BY_PRECISION:
        return BY_PRECISION[dtype]
    if dtype == "float16":
        return BY_PRECISION["mixed_float16"]
    return BY_PRECISION["mixed_bfloat16"]

"""The differences between two results that rounding explains, by precision.

`rerun` and `report` compare runs by the bounds in `BY_PRECISION`, and `verify` compares
two updates by the unit roundoffs. docs/exact.md shows the table.
"""

from collections.abc import Collection
from dataclasses import dataclass

# The precision of a run in float32 whose matrix products are computed in TF32.
TF32 = "float32 with TF32"
# The tag of a run that was computed with TF32.
IN_TF32 = "float32.in_tf32"


@dataclass(frozen=True)
class Rounding:
    """The relative differences that rounding explains in one precision.

    Training amplifies rounding: in float32, SGD(0.1, momentum 0.9) amplified a
    difference of 1e-7 to 0.2 in 20 updates. So the bound doubles with every update, up
    to a maximum. The bounds were chosen, not derived. In float64, the differences stay
    below 1e-13 for 120 updates. In float32, they stay below 1e-5 with AdamW, but with a
    large momentum, two runs diverge and count as different.

    Attributes:
        bits: number of bits in the significand; the unit roundoff is 2^-bits.
        first: bound at the first update, where both runs have the same weights.
        most: maximum of the bound, at any update.
    """

    bits: int
    first: float
    most: float

    @property
    def unit_roundoff(self) -> float:
        return 2.0**-self.bits

    def bound(self, update: int) -> float:
        """Return the bound at an update, counted from 1."""
        # Limit the exponent: 60 doublings exceed any bound, and a million overflow.
        doublings = min(update - 1, 60)
        return min(self.most, self.first * 2.0**doublings)


# Keyed by `hardware.precision` or `TF32`, from the finest to the coarsest.
# TF32 rounds both factors of a product to 10 bits, like float16. The error of a factor
# is at most 2^-11, that of a product 1e-3, and that of ten layers 1e-2 if all errors
# add up. Sums and all other operations stay in float32.
BY_PRECISION = {
    "float64": Rounding(bits=53, first=1e-12, most=1e-9),
    "float32": Rounding(bits=24, first=1e-5, most=1e-3),
    TF32: Rounding(bits=11, first=1e-2, most=1e-2),
    "mixed_float16": Rounding(bits=11, first=1e-2, most=1e-2),
    "mixed_bfloat16": Rounding(bits=8, first=1e-1, most=1e-1),
}


def coarsest(precisions: Collection[str]) -> str:
    """Return the coarsest of `precisions`, or float32 if none of them is known."""
    known = [precision for precision in BY_PRECISION if precision in precisions]
    if not known:
        return "float32"
    return known[-1]


def of_dtype(dtype: str, *, in_tf32: bool) -> Rounding:
    """Return the rounding of sums and products in a floating-point type.

    An unknown type counts as bfloat16.
    """
    if dtype == "float32" and in_tf32:
        return BY_PRECISION[TF32]
    if dtype in BY_PRECISION:
        return BY_PRECISION[dtype]
    if dtype == "float16":
        return BY_PRECISION["mixed_float16"]
    return BY_PRECISION["mixed_bfloat16"]

"""The same config trains to the same bits: what a rerun relies on."""

from __future__ import annotations

from tests.run.fitted import fit

RUN = (
    "model=mlp",
    "model.hidden=[8]",
    "model.dropout=0.2",
    "hardware.deterministic=true",
    "training.updates=3",
)


def test_a_repeated_run_is_bit_identical(tmp_path):
    """With another seed it is another run: the negative control."""
    one, again, other = (fit(tmp_path, *RUN, f"seed={seed}") for seed in (0, 0, 1))
    assert again.rows.updates == one.rows.updates
    assert again.rows.validations == one.rows.validations
    assert again.bits() == one.bits()
    assert other.curve("loss")[0] != one.curve("loss")[0]
    assert other.bits() != one.bits()

"""benchmarks/gpu.py runs on a CPU with tiny sizes, and counts FLOPs as a person would."""

from __future__ import annotations

import pytest
from keras import Input, Model, layers

from benchmarks import flops, networks


def forward(layer, *shapes):
    inputs = [Input(shape) for shape in shapes]
    return flops.of_forward(Model(inputs, layer(*inputs)))


COUNTED = {
    "dense": (lambda: forward(layers.Dense(5), (3,)), 2 * 3 * 5),
    "dense at each place": (lambda: forward(layers.Dense(5), (7, 3)), 7 * 2 * 3 * 5),
    # 9 × 8 at strides 2, padded: 5 × 4 places.
    "convolution": (lambda: forward(layers.Conv2D(6, 3, strides=2, padding="same"), (9, 8, 4)), 2 * 5 * 4 * 6 * 9 * 4),
    "grouped convolution": (lambda: forward(layers.Conv2D(6, 3, groups=2), (5, 5, 4)), 2 * 3 * 3 * 6 * 9 * 2),
    "einsum": (lambda: forward(layers.EinsumDense("abc,cde->abde", (7, 2, 3)), (7, 4)), 2 * 7 * 4 * 2 * 3),
    "einsum with an ellipsis": (lambda: forward(layers.EinsumDense("...x,xy->...y", 6), (7, 4)), 2 * 7 * 4 * 6),
    # 5 queries of width 8 to 7 values of width 6, two heads of 3 and 4: projections, two products, output of width 8.
    "attention": (
        lambda: forward(layers.MultiHeadAttention(2, 3, value_dim=4), (5, 8), (7, 6)),
        2 * (5 * 8 * 6 + 7 * 6 * 6 + 7 * 6 * 8 + 2 * 5 * 7 * 3 + 2 * 5 * 7 * 4 + 5 * 8 * 8),
    ),
    "a model in a model": (lambda: forward(Model(i := Input((3,)), layers.Dense(5)(i)), (3,)), 2 * 3 * 5),
    # No sum, norm or look-up counts. Of a block of width 8: 4 projections, 2 dense layers of 8 × 32, 2 products.
    "transformer": (
        lambda: flops.of_forward(networks.transformer(layers=3, width=8, heads=2, vocabulary=11, length=5)),
        2 * 5 * (3 * (4 * 8 * 8 + 2 * 8 * 32 + 2 * 5 * 8) + 8 * 11),
    ),
}


@pytest.mark.parametrize("what", COUNTED)
def test_flops_are_those_that_are_counted_by_hand(what):
    count, expected = COUNTED[what]
    assert count() == expected


def bottlenecks(inputs, width, side, blocks, strides):
    "Multiply-adds of a stage, whose first block strides in its 3 × 3 and has a shortcut of 1 × 1."
    first = inputs * width * (side * strides) ** 2 + (9 * width * width + width * 4 * width) * side**2
    shortcut = inputs * 4 * width * side**2
    others = (4 * width * width + 9 * width * width + width * 4 * width) * side**2
    return first + shortcut + (blocks - 1) * others


def test_flops_of_resnet_50():
    stages = ((64, 64, 56, 3, 1), (256, 128, 28, 4, 2), (512, 256, 14, 6, 2), (1024, 512, 7, 3, 2))
    adds = 7 * 7 * 3 * 64 * 112**2 + sum(bottlenecks(*stage) for stage in stages) + 2048 * 1000
    assert adds == pytest.approx(
        4.09e9, rel=1e-3
    )  # as is said of this variant; He et al. 2015 stride in the 1 × 1: 3.8
    model = networks.resnet(50, 224, 1000)
    assert flops.of_forward(model) == 2 * adds
    assert flops.of_training(model) == 6 * adds


def test_what_cannot_be_counted_is_refused():
    with pytest.raises(TypeError, match=r"no FLOPs are known for a layer of the kind LSTM: lstm"):
        forward(layers.LSTM(4), (5, 3))

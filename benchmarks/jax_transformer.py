"""python -m benchmarks.jax_transformer JSON: examples/s of a transformer in JAX.

It prints a line of JSON. An update has the micro-batches of the workload, whose
gradients `optax.MultiSteps` averages under `jax.lax.scan`. The argument has the keys
`name`, `tiny`, `seconds` and `micro`, the number of examples in a micro-batch; that of
the workload if null.

The network is that of `benchmarks.keras_models`, in bfloat16 with float32 weights.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.call_rate import calls_per_second
from benchmarks.workloads import LEARNING_RATE, Transformer, on_gpu

EPSILON = 1e-3  # that of Keras' layer normalization

Weights = dict[str, Any]


def main() -> None:
    arguments = json.loads(sys.argv[1])
    workload = on_gpu(arguments["name"], arguments["tiny"])
    if arguments["micro"] is not None and not arguments["tiny"]:
        workload = dataclasses.replace(workload, micro=arguments["micro"])
    network = workload.network
    assert isinstance(network, Transformer)
    weights = initial(network, workload.classes, workload.input_shape[0])
    adam = optax.MultiSteps(optax.adam(LEARNING_RATE), workload.factor)
    state = adam.init(weights)
    x, y = workload.examples(workload.effective)

    def cut(array: Any) -> Any:
        return array.reshape(workload.factor, workload.micro, *array.shape[1:])

    # The batch comes from the host each time, and weights are replaced in place.
    update = jax.jit(partial(_update, network, adam), donate_argnums=(0, 1))

    def step() -> Any:
        nonlocal weights, state
        weights, state, losses = update(weights, state, cut(x), cut(y))
        return losses

    rates = calls_per_second(step, jax.block_until_ready, arguments["seconds"])
    result = {
        "what": f"JAX, {workload.factor} × {workload.micro}",
        "rates": [rate * workload.effective for rate in rates],
        "note": f"jax {jax.__version__} on {jax.default_backend()}",
    }
    print(json.dumps(result), flush=True)


def _update(
    network: Transformer, adam: Any, weights: Weights, state: Any, x: Any, y: Any
) -> tuple[Weights, Any, Any]:
    """Make one update of micro-batches x and y (factor, micro-batch, length)."""

    def micro_step(carry: Any, micro_batch: Any) -> Any:
        weights, state = carry
        loss, gradients = jax.value_and_grad(_loss)(weights, network, *micro_batch)
        changes, state = adam.update(gradients, state, weights)
        return (optax.apply_updates(weights, changes), state), loss

    (weights, state), losses = jax.lax.scan(micro_step, (weights, state), (x, y))
    return weights, state, losses


def _loss(weights: Weights, network: Transformer, x: Any, y: Any) -> Any:
    logits = _logits(weights, network, x).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def _logits(weights: Weights, network: Transformer, x: Any) -> Any:
    hidden = weights["words"].astype(jnp.bfloat16)[x]
    hidden += weights["positions"].astype(jnp.bfloat16)
    for block in weights["blocks"]:
        normed = _normed(block["attention_norm"], hidden)
        hidden += _attended(block, network, normed)
        normed = _normed(block["dense_norm"], hidden)
        expanded = jax.nn.gelu(_dense(block["expand"], normed), approximate=False)
        hidden += _dense(block["contract"], expanded)
    return _dense(weights["logits"], _normed(weights["norm"], hidden))


def _attended(block: Weights, network: Transformer, normed: Any) -> Any:
    by_head = (*normed.shape[:-1], network.heads, network.width // network.heads)
    query, key, value = [
        _dense(block[name], normed).reshape(by_head)
        for name in ("query", "key", "value")
    ]
    implementation = "cudnn" if jax.default_backend() == "gpu" else "xla"
    attended = jax.nn.dot_product_attention(
        query, key, value, is_causal=True, implementation=implementation
    )
    return _dense(block["outputs"], attended.reshape(normed.shape))


def _dense(layer: Weights, inputs: Any) -> Any:
    kernel = layer["kernel"].astype(jnp.bfloat16)
    return inputs @ kernel + layer["bias"].astype(jnp.bfloat16)


def _normed(layer: Weights, inputs: Any) -> Any:
    exact = inputs.astype(jnp.float32)
    centered = exact - exact.mean(-1, keepdims=True)
    variance = jnp.square(centered).mean(-1, keepdims=True)
    normed = centered * jax.lax.rsqrt(variance + EPSILON)
    return (normed * layer["gamma"] + layer["beta"]).astype(inputs.dtype)


def initial(network: Transformer, vocabulary: int, length: int) -> Weights:
    """Return the weights of a transformer at random, in float32."""
    keys = iter(jax.random.split(jax.random.key(0), 8 * network.layers + 8))
    width = network.width

    def normal(*shape: int) -> Any:
        return 0.02 * jax.random.normal(next(keys), shape)

    def dense(inputs: int, outputs: int) -> Weights:
        return {"kernel": normal(inputs, outputs), "bias": jnp.zeros(outputs)}

    def norm() -> Weights:
        return {"gamma": jnp.ones(width), "beta": jnp.zeros(width)}

    blocks = []
    for _ in range(network.layers):
        blocks.append(
            {
                "attention_norm": norm(),
                "query": dense(width, width),
                "key": dense(width, width),
                "value": dense(width, width),
                "outputs": dense(width, width),
                "dense_norm": norm(),
                "expand": dense(width, 4 * width),
                "contract": dense(4 * width, width),
            }
        )
    return {
        "words": normal(vocabulary, width),
        "positions": normal(length, width),
        "blocks": blocks,
        "norm": norm(),
        "logits": dense(width, vocabulary),
    }


if __name__ == "__main__":
    main()

"""optax: `MultiSteps` around an optimizer, and `microbatch` around a gradient."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
import optax
from jax import numpy as jnp

from benchmarks.conformance.cases import (
    FACTOR,
    IGNORED,
    MICRO,
    RATE,
    Arrays,
    Case,
    effective_batches,
    initial_weights,
    micro_batches,
)
from benchmarks.conformance.outcome import Outcome, Way, by_weights

NO_LOG = Outcome(note="optax logs nothing")

# Called with the parameters and a batch: x, y and weights.
Gradient = Callable[[Any, Any, Any, Any], Any]


def prepare() -> None:
    """Let JAX compute in float64, on two logical devices."""
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_x64", True)


def total(parameters: Any, x: Any, y: Any, weights: Any) -> Any:
    """Return Σ w·loss over examples or tokens."""
    kernel, bias, last_kernel, last_bias = parameters
    logits = jnp.tanh(x @ kernel + bias) @ last_kernel + last_bias
    labels = jnp.where(y == IGNORED, 0, y)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.sum(jnp.where(y == IGNORED, 0, losses * weights))


def size(case: Case, y: Any, weights: Any) -> Any:
    """Return what the mean divides by."""
    if case.divided_by == "weights":
        return jnp.sum(weights)
    return jnp.sum(y != IGNORED)


def penalty(case: Case, parameters: Any) -> Any:
    """Return the term that is added to the loss."""
    return case.penalty * sum(jnp.sum(array**2) for array in parameters)


def mean_gradient(case: Case) -> Gradient:
    """Return the gradient of the mean loss of a batch."""

    def mean(parameters: Any, x: Any, y: Any, weights: Any) -> Any:
        loss = total(parameters, x, y, weights) / size(case, y, weights)
        return loss + penalty(case, parameters)

    return jax.grad(mean)


def sgd(case: Case) -> optax.GradientTransformation:
    clip = optax.identity()
    if case.clip is not None:
        clip = optax.clip_by_global_norm(case.clip)
    return optax.chain(clip, optax.sgd(optax.exponential_decay(RATE, 1, case.decay)))


def multi_steps(case: Case) -> Outcome:
    if case.logged:
        return NO_LOG

    def trained(factor: Any) -> Arrays:
        optimizer = optax.MultiSteps(
            sgd(case), every_k_schedule=factor, accumulator_dtype=jnp.float64
        )
        return _trained(case, optimizer, mean_gradient(case), micro_batches(case))

    expected = _large(case)
    with_constant = by_weights(trained(FACTOR), expected)
    factors = jnp.array([-(-size // MICRO) for size in case.sizes], jnp.int32)
    if (factors == FACTOR).all():
        return with_constant

    note = (
        "`every_k_schedule` is a function that returns 4 and 2 in turn; "
        f"with 4 throughout, the error is {with_constant.error:.2g}"
    )
    in_turn = trained(lambda update: factors[update % len(factors)])
    return by_weights(in_turn, expected, note)


def microbatch(case: Case) -> Outcome:
    if case.logged:
        return NO_LOG
    summed = optax.microbatching.microbatch(
        jax.grad(total), argnums=(1, 2, 3), microbatch_size=MICRO
    )
    penalty_gradient = jax.grad(lambda parameters: penalty(case, parameters))

    def gradient(parameters: Any, x: Any, y: Any, weights: Any) -> Any:
        divisor = size(case, y, weights)
        return jax.tree.map(
            lambda loss_part, penalty_part: loss_part / divisor + penalty_part,
            summed(parameters, x, y, weights),
            penalty_gradient(parameters),
        )

    trained = _trained(case, sgd(case), gradient, effective_batches(case))
    return by_weights(trained, _large(case))


def _large(case: Case) -> Arrays:
    """Return the weights after training on large batches."""
    return _trained(case, sgd(case), mean_gradient(case), effective_batches(case))


def _trained(
    case: Case, optimizer: Any, gradient: Gradient, batches: Iterable[Arrays]
) -> Arrays:
    parameters = tuple(map(jnp.asarray, initial_weights()))
    state = optimizer.init(parameters)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[: case.devices]), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))

    @jax.jit
    def step(parameters: Any, state: Any, *batch: Any) -> tuple[Any, Any]:
        gradients = gradient(parameters, *batch)
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state

    for x, y, *weights in batches:
        if not weights:
            weights = [np.ones(y.shape)]
        sharded = jax.device_put((x, y, *weights), sharding)
        parameters, state = step(parameters, state, *sharded)
    return tuple(map(np.asarray, parameters))


WAYS: dict[str, Way] = {"multi_steps": multi_steps, "microbatch": microbatch}

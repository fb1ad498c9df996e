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
Step = Callable[..., tuple[Any, Any]]


def prepare() -> None:
    """Let JAX compute in float64, on two logical devices."""
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_x64", True)


def total(weights: Any, x: Any, y: Any, w: Any) -> Any:
    """Return Σ w·loss over examples or tokens."""
    kernel, bias, *logits = weights
    outputs = jnp.tanh(x @ kernel + bias) @ logits[0] + logits[1]
    values = optax.softmax_cross_entropy_with_integer_labels(
        outputs, jnp.where(y == IGNORED, 0, y)
    )
    return jnp.sum(jnp.where(y == IGNORED, 0, values * w))


def size(case: Case, y: Any, w: Any) -> Any:
    """Return what the mean divides by."""
    return jnp.sum(w) if case.divided_by == "weights" else jnp.sum(y != IGNORED)


def penalty(case: Case, weights: Any) -> Any:
    return case.penalty * sum(jnp.sum(each**2) for each in weights)


def mean_gradient(case: Case) -> Callable[..., Any]:
    return jax.grad(
        lambda weights, x, y, w: (
            total(weights, x, y, w) / size(case, y, w) + penalty(case, weights)
        )
    )


def sgd(case: Case) -> optax.GradientTransformation:
    clip = (
        optax.identity() if case.clip is None else optax.clip_by_global_norm(case.clip)
    )
    return optax.chain(clip, optax.sgd(optax.exponential_decay(RATE, 1, case.decay)))


def multi_steps(case: Case) -> Outcome:
    if case.logged:
        return NO_LOG
    factors = jnp.array([-(-size // MICRO) for size in case.sizes], jnp.int32)
    constant = bool((factors == FACTOR).all())

    def trained(every: Any) -> Arrays:
        optimizer = optax.MultiSteps(
            sgd(case), every_k_schedule=every, accumulator_dtype=jnp.float64
        )
        return _trained(case, optimizer, mean_gradient(case), micro_batches(case))

    expected = _large(case)
    if constant:
        return by_weights(trained(FACTOR), expected)
    leaked = by_weights(trained(FACTOR), expected).error
    note = f"`every_k_schedule` is a function that gives 4 and 2 in turn; with 4 throughout: {leaked:.2g}"
    return by_weights(
        trained(lambda update: factors[update % len(factors)]), expected, note
    )


def microbatch(case: Case) -> Outcome:
    if case.logged:
        return NO_LOG
    summed = optax.microbatching.microbatch(
        jax.grad(total), argnums=(1, 2, 3), microbatch_size=MICRO
    )

    def gradient(weights: Any, x: Any, y: Any, w: Any) -> Any:
        added = jax.grad(lambda weights: penalty(case, weights))(weights)
        return jax.tree.map(
            lambda a, b: a / size(case, y, w) + b, summed(weights, x, y, w), added
        )

    return by_weights(
        _trained(case, sgd(case), gradient, effective_batches(case)), _large(case)
    )


def _large(case: Case) -> Arrays:
    return _trained(case, sgd(case), mean_gradient(case), effective_batches(case))


def _trained(
    case: Case, optimizer: Any, gradient: Callable[..., Any], batches: Iterable[Arrays]
) -> Arrays:
    weights = tuple(map(jnp.asarray, initial_weights()))
    state = optimizer.init(weights)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[: case.devices]), ("data",))
    shared = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))

    @jax.jit
    def step(weights: Any, state: Any, *batch: Any) -> tuple[Any, Any]:
        updates, state = optimizer.update(gradient(weights, *batch), state, weights)
        return optax.apply_updates(weights, updates), state

    for batch in batches:
        x, y, w = batch if len(batch) == 3 else (*batch, np.ones(batch[1].shape))
        weights, state = step(weights, state, *jax.device_put((x, y, w), shared))
    return tuple(map(np.asarray, weights))


WAYS: dict[str, Way] = {"multi_steps": multi_steps, "microbatch": microbatch}

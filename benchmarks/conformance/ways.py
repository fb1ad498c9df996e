"""The libraries, and how each is called: as its own documentation says, on which page."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Call:
    """A way in which a library accumulates.

    Attributes:
        name: of the function in the library's module.
        title: of its column.
        how: it is called.
        page: of the documentation that says so.
    """

    name: str
    title: str
    how: str
    page: str


@dataclass(frozen=True)
class Library:
    """A module here, what it measures, and where it runs.

    Attributes:
        module: of this package.
        packages: whose versions count.
        calls: into it.
        peer: it runs in `.venv-peers`.
        processes: it needs one for each device.
    """

    module: str
    packages: tuple[str, ...]
    calls: tuple[Call, ...]
    peer: bool = True
    processes: bool = True


LIBRARIES = (
    Library(
        "ours",
        ("tensorflow", "keras"),
        (
            Call(
                "ours",
                "ours",
                "the loop of `pipeline train` with its `Update` and recorder; its effective batches, in the order of a "
                "seed, are those of w* too",
                "design.md",
            ),
        ),
        peer=False,
        processes=False,
    ),
    Library(
        "keras_fit",
        ("keras", "tensorflow"),
        (
            Call(
                "fit",
                "Keras `fit`",
                "`compile` with an optimizer that has `gradient_accumulation_steps=4`, and `fit`",
                "https://keras.io/api/optimizers/",
            ),
        ),
        peer=False,
        processes=False,
    ),
    Library(
        "accumulating_optimizer",
        ("tensorflow", "keras"),
        (
            Call(
                "in_fit",
                "`AccumulatingOptimizer`, `fit`",
                "`compile` with `AccumulatingOptimizer(optimizer, 4)`, and `fit` with its `flush_at_epoch_end()`; it "
                "knows no size of a batch",
                "accumulation.md#in-any-loop",
            ),
            Call(
                "in_a_loop",
                "`AccumulatingOptimizer`, a loop",
                "the same by hand: `apply` with the `weight` of each micro-batch, `flush()` at the end of an epoch",
                "accumulation.md#in-any-loop",
            ),
        ),
        peer=False,
        processes=False,
    ),
    Library(
        "accelerate_loops",
        ("accelerate", "torch"),
        (
            Call(
                "accumulate",
                "Accelerate `accumulate`",
                "`with accelerator.accumulate(model)` around the loop's body; clipped where `sync_gradients` says so",
                "https://huggingface.co/docs/accelerate/usage_guides/gradient_accumulation",
            ),
            Call(
                "variable_size",
                "Accelerate, for variable size",
                "the loop that the same page writes for samples of variable size: an update's micro-batches are "
                "gathered first, and sums are divided by the number of items in all of them",
                "https://huggingface.co/docs/accelerate/usage_guides/gradient_accumulation"
                "#gradient-accumulation-on-training-samples-of-variable-size",
            ),
        ),
    ),
    Library(
        "transformers_trainer",
        ("transformers", "accelerate", "torch"),
        (
            Call(
                "own_loss",
                "Trainer, model's loss",
                "`TrainingArguments(gradient_accumulation_steps=4)`; a model of one's own returns the mean loss of its "
                "micro-batch (language models of transformers take `num_items_in_batch`, as in the next column)",
                "https://huggingface.co/docs/transformers/grad_accumulation",
            ),
            Call(
                "loss_function",
                "Trainer, `compute_loss_func`",
                "the same with `compute_loss_func`, which divides a sum by `num_items_in_batch`",
                "https://huggingface.co/docs/transformers/trainer_recipes#custom-loss-function",
            ),
        ),
    ),
    Library(
        "lightning_trainer",
        ("lightning", "torch"),
        (
            Call(
                "accumulate_grad_batches",
                "Lightning",
                '`Trainer(accumulate_grad_batches=4, precision="64-true")`; `training_step` returns the mean loss of '
                "its micro-batch",
                "https://lightning.ai/docs/pytorch/stable/common/trainer.html#accumulate-grad-batches",
            ),
        ),
    ),
    Library(
        "optax_updates",
        ("optax", "jax"),
        (
            Call(
                "multi_steps",
                "optax `MultiSteps`",
                "`optax.MultiSteps(optimizer, every_k_schedule=4, accumulator_dtype=float64)` gets the mean "
                "gradient of each micro-batch",
                "https://optax.readthedocs.io/en/latest/api/optimizer_wrappers.html",
            ),
            Call(
                "microbatch",
                "optax `microbatch`",
                "`optax.microbatching.microbatch` sums the gradients of a summed loss over an effective batch; the "
                "loop divides by its weight and adds the gradient of an added term",
                "https://optax.readthedocs.io/en/latest/api/microbatching.html",
            ),
        ),
        processes=False,
    ),
)

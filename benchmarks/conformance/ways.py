"""The libraries, and how each is called, as its own documentation says."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Call:
    """A way in which a library accumulates.

    Attributes:
        name: the name of the function in the library's module.
        title: the title of its column.
        how: what is called.
        page: the page of the documentation that describes it.
    """

    name: str
    title: str
    how: str
    page: str


@dataclass(frozen=True)
class Library:
    """A library, the module here that measures it, and where it runs.

    Attributes:
        module: the name of the module in this package.
        packages: the packages whose versions are recorded.
        calls: the ways to call the library.
        peer: whether it runs in `.venv-peers`.
        processes: whether it needs one process per device.
    """

    module: str
    packages: tuple[str, ...]
    calls: tuple[Call, ...]
    peer: bool = True
    processes: bool = True


LIBRARIES = (
    Library(
        module="ours",
        packages=("tensorflow", "keras"),
        calls=(
            Call(
                name="ours",
                title="ours",
                how=(
                    "the loop of `pipeline train` with its `Update` and recorder; w* "
                    "is computed from the same effective batches, in the same seeded order"
                ),
                page="design.md",
            ),
        ),
        peer=False,
        processes=False,
    ),
    Library(
        module="keras_fit",
        packages=("keras", "tensorflow"),
        calls=(
            Call(
                name="fit",
                title="Keras `fit`",
                how=(
                    "`compile` with an optimizer that has "
                    "`gradient_accumulation_steps=4`, and `fit`"
                ),
                page="https://keras.io/api/optimizers/",
            ),
        ),
        peer=False,
        processes=False,
    ),
    Library(
        module="accumulating_optimizer",
        packages=("tensorflow", "keras"),
        calls=(
            Call(
                name="in_fit",
                title="`AccumulatingOptimizer`, `fit`",
                how=(
                    "`compile` with `AccumulatingOptimizer(optimizer, 4)`, and `fit` "
                    "with its `flush_at_epoch_end()`; the optimizer does not know "
                    "the sizes of the batches"
                ),
                page="accumulation.md#in-any-loop",
            ),
            Call(
                name="in_a_loop",
                title="`AccumulatingOptimizer`, a loop",
                how=(
                    "`AccumulatingOptimizer(optimizer, 4)` in a hand-written loop: "
                    "`apply` with the `weight` of each micro-batch, and `flush()` at "
                    "the end of an epoch"
                ),
                page="accumulation.md#in-any-loop",
            ),
        ),
        peer=False,
        processes=False,
    ),
    Library(
        module="accelerate_loops",
        packages=("accelerate", "torch"),
        calls=(
            Call(
                name="accumulate",
                title="Accelerate `accumulate`",
                how=(
                    "`with accelerator.accumulate(model)` around the loop's body; "
                    "gradients are clipped where `sync_gradients` is true"
                ),
                page="https://huggingface.co/docs/accelerate/usage_guides/gradient_accumulation",
            ),
            Call(
                name="variable_size",
                title="Accelerate, for variable size",
                how=(
                    "the loop that the linked section gives for samples of variable "
                    "size: an update's micro-batches are gathered first, and sums are "
                    "divided by the number of items in all of them"
                ),
                page=(
                    "https://huggingface.co/docs/accelerate/usage_guides/gradient_accumulation"
                    "#gradient-accumulation-on-training-samples-of-variable-size"
                ),
            ),
        ),
    ),
    Library(
        module="transformers_trainer",
        packages=("transformers", "accelerate", "torch"),
        calls=(
            Call(
                name="own_loss",
                title="Trainer, model's loss",
                how=(
                    "`TrainingArguments(gradient_accumulation_steps=4)`; a custom "
                    "model returns the mean loss of its micro-batch (the library's "
                    "own language models divide by `num_items_in_batch` instead)"
                ),
                page="https://huggingface.co/docs/transformers/grad_accumulation",
            ),
            Call(
                name="loss_function",
                title="Trainer, `compute_loss_func`",
                how=(
                    "`TrainingArguments(gradient_accumulation_steps=4)` and a "
                    "`compute_loss_func`, which divides a sum by `num_items_in_batch`"
                ),
                page=(
                    "https://huggingface.co/docs/transformers/trainer_recipes"
                    "#custom-loss-function"
                ),
            ),
        ),
    ),
    Library(
        module="lightning_trainer",
        packages=("lightning", "torch"),
        calls=(
            Call(
                name="accumulate_grad_batches",
                title="Lightning",
                how=(
                    '`Trainer(accumulate_grad_batches=4, precision="64-true")`; '
                    "`training_step` returns the mean loss of its micro-batch"
                ),
                page=(
                    "https://lightning.ai/docs/pytorch/stable/common/trainer.html"
                    "#accumulate-grad-batches"
                ),
            ),
        ),
    ),
    Library(
        module="optax_updates",
        packages=("optax", "jax"),
        calls=(
            Call(
                name="multi_steps",
                title="optax `MultiSteps`",
                how=(
                    "`optax.MultiSteps(optimizer, every_k_schedule=4, "
                    "accumulator_dtype=float64)` gets the mean gradient of each "
                    "micro-batch"
                ),
                page="https://optax.readthedocs.io/en/latest/api/optimizer_wrappers.html",
            ),
            Call(
                name="microbatch",
                title="optax `microbatch`",
                how=(
                    "`optax.microbatching.microbatch` sums the gradients of a summed "
                    "loss over an effective batch; the loop divides by the weight of "
                    "this batch and adds the gradient of an added term"
                ),
                page="https://optax.readthedocs.io/en/latest/api/microbatching.html",
            ),
        ),
        processes=False,
    ),
)

"""Decides what can be shown of a dataset and an objective."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import tensorflow as tf

from pipeline.accumulation.internals import (
    Objective,
    Term,
    couples_examples,
    weighted_sum,
)
from pipeline.common.errors import first_line
from pipeline.dataset import tokens
from pipeline.shown.class_form import ClassForm

MOST_CLASSES = 50  # of a confusion matrix
# Numbers of channels of a picture: gray, RGB, and RGB with transparency.
_CHANNELS = (1, 3, 4)


@dataclass(frozen=True)
class Settings:
    """The config key `tracking.show`.

    Attributes:
        examples: how many of the split's first examples are shown, and how many of its
            worst ones.
        confusion: whether to show a confusion matrix.
        reliability: whether to show a reliability curve.
    """

    examples: int = 16
    confusion: bool = True
    reliability: bool = True


NOTHING = Settings(examples=0, confusion=False, reliability=False)


class InputKind(Enum):
    """How the input of an example is shown."""

    PICTURE = "picture"
    TOKENS = "tokens"
    NUMBERS = "numbers"


@dataclass(frozen=True)
class ShownInput:
    """The part of the input that is shown.

    Attributes:
        position: its position among the parts of the input.
        kind: how it is shown.
        padding: the value that `dataset.pad` adds at its end, or None.
        decode: turns the tokens of an example into text, or None if unknown.
    """

    position: int
    kind: InputKind
    padding: float | None = None
    decode: Callable[[Any], str] | None = None


@dataclass(frozen=True)
class ShownPlan:
    """Decides which pictures and tables show each evaluation of a run.

    Attributes:
        settings: the values of `tracking.show`, without those that do not apply.
        shown_input: the part of the input that is shown.
        form: the classes of the only output, or None.
        has_losses: whether a single example has a loss.
        notes: lines about what cannot be shown.
    """

    settings: Settings
    shown_input: ShownInput
    form: ClassForm | None
    has_losses: bool
    notes: list[str] = field(default_factory=list)

    @property
    def observes(self) -> bool:
        """Whether the evaluation has to observe its examples."""
        return self.settings != NOTHING


def input_to_show(
    inputs: Any,
    padding: float | None = None,
    decode: Callable[[Any], str] | None = None,
) -> ShownInput:
    """Return which part of the input is shown, and how.

    Pictures are preferred to tokens and texts, which are preferred to numbers.

    Args:
        inputs: the spec of the inputs of an example.
        padding: the value that `dataset.pad` adds, or None.
        decode: turns tokens into text, or None.
    """
    specs = tf.nest.flatten(inputs)
    for position, spec in enumerate(specs):
        if _is_picture(spec):
            return ShownInput(position, InputKind.PICTURE)
    for position, spec in enumerate(specs):
        if spec.dtype == tf.string or tokens.is_token_sequence(spec):
            return ShownInput(position, InputKind.TOKENS, padding, decode)
    return ShownInput(0, InputKind.NUMBERS, padding)


def settings_of(node: Mapping[str, Any] | None) -> Settings:
    """Return the settings of `tracking.show`. A missing key has its default."""
    if node is None:
        return NOTHING
    return Settings(**node)


def make_plan(
    settings: Settings,
    objective: Objective,
    y: Any,
    outputs: Mapping[str, Any],
    shown_input: ShownInput,
) -> ShownPlan:
    """Return what can be shown of a model with this objective.

    Args:
        settings: what the config asks for.
        objective: the losses.
        y: labels of a few examples.
        outputs: the model's outputs for these examples, by name.
        shown_input: the part of the input that is shown.
    """
    notes = []
    terms = objective.terms(y, outputs)
    why_no_losses = _why_no_losses(objective, terms)
    if settings.examples and why_no_losses:
        notes.append(f"the worst examples: {why_no_losses}")

    form = None
    if len(terms) == 1:
        form = ClassForm.of_term(terms[0])
    confusion = settings.confusion
    if confusion and (form is None or form.classes > MOST_CLASSES):
        confusion = False
        notes.append(f"the confusion matrix: {_why_no_matrix(form, len(terms))}")
    reliability = settings.reliability
    if reliability and (form is None or form.from_logits is None):
        reliability = False
        notes.append(f"the reliability curve: {_why_no_curve(form, len(terms))}")
    return ShownPlan(
        settings=Settings(settings.examples, confusion, reliability),
        shown_input=shown_input,
        form=form,
        has_losses=not why_no_losses,
        notes=[f"tracking.show leaves out {note}" for note in notes],
    )


def _why_no_losses(objective: Objective, terms: Sequence[Term]) -> str:
    """Return why a single example has no loss, or "" if it has one."""
    if not terms or objective.over_batch:
        return "a single example has no loss of its own"
    for term in terms:
        if couples_examples(term.loss):
            return "a single example has no loss of its own"
        try:
            sums = weighted_sum(term.loss, term.y, term.output)
        except ValueError as error:
            return first_line(error)
        if sums.values is None:
            return "the loss is ragged"
    return ""


def _why_no_matrix(form: ClassForm | None, terms: int) -> str:
    if form is None:
        return _why_no_classes(terms)
    return f"there are {form.classes} classes, and it shows at most {MOST_CLASSES}"


def _why_no_curve(form: ClassForm | None, terms: int) -> str:
    if form is None:
        return _why_no_classes(terms)
    return "the loss has no from_logits to say whether outputs are probabilities"


def _why_no_classes(terms: int) -> str:
    if terms > 1:
        return f"it needs one output with a loss, and there are {terms}"
    return "the labels are not classes"


def _is_picture(spec: Any) -> bool:
    """Return whether a part of the input is a picture of (height, width, channels)."""
    if not isinstance(spec, tf.TensorSpec) or spec.shape.rank != 3:
        return False
    if spec.dtype == tf.string:
        return False
    height, width, channels = spec.shape.as_list()
    is_large = height not in (0, 1) and width not in (0, 1)
    return is_large and channels in _CHANNELS

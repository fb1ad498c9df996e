"""The decoder of `experiment=text` in PyTorch, and a collate function for texts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from benchmarks.pytorch.networks import TransformerModel
from benchmarks.texts import CLASSES, DECODER, Case, Texts

IGNORED = -100  # the label of padding; PyTorch's default

Example = dict[str, Any]  # the arguments of `TextModel.forward` for one text


class TextModel(nn.Module):
    """The decoder, which returns its loss as the models of transformers do.

    Args:
        case: names the longest text.
        accepts_loss_kwargs: the Trainer passes `num_items_in_batch`, the labels in all
            micro-batches of an update, as to the language models of transformers.

    Attributes:
        computed: the indices of the texts of each forward pass since it was cleared.
    """

    def __init__(self, case: Case, accepts_loss_kwargs: bool = True):
        super().__init__()
        self.decoder = TransformerModel(DECODER, CLASSES, case.longest)
        self.accepts_loss_kwargs = accepts_loss_kwargs
        self.computed: list[int] = []

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor,
        indices: Tensor,
        num_items_in_batch: Tensor | None = None,
    ) -> dict[str, Tensor]:
        self.computed += indices.tolist()
        logits = self.decoder(input_ids)
        if num_items_in_batch is None:
            return {"loss": functional.cross_entropy(logits, labels)}
        total = functional.cross_entropy(logits, labels, reduction="sum")
        return {"loss": total / num_items_in_batch}


def dataset(texts: Texts) -> list[Example]:
    """Return an example for each text."""
    examples = []
    for index, text in enumerate(texts):
        tokens = torch.from_numpy(text).long()
        examples.append(
            {"input_ids": tokens[:-1], "labels": tokens[1:], "indices": index}
        )
    return examples


def collate(examples: list[Example]) -> dict[str, Tensor]:
    """Pad texts to the longest of them."""
    inputs = [example["input_ids"] for example in examples]
    labels = [example["labels"] for example in examples]
    return {
        "input_ids": pad_sequence(inputs, batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORED),
        "indices": torch.tensor([example["indices"] for example in examples]),
    }

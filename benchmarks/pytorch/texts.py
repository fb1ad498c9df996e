"""python -m benchmarks.pytorch.texts LOOP CASE THREADS: a loop over texts, with AdamW.

It is a contender, see `child.Child`. LOOP is a name in `benchmarks.texts`, and CASE is
JSON.
"""

from __future__ import annotations

import sys

from benchmarks.child import Child
from benchmarks.texts import (
    LEARNING_RATE,
    PYTORCH,
    UPDATES,
    WEIGHT_DECAY,
    Case,
    read,
    token_count,
)

EPOCHS = 10**6  # more than are ever trained


def main() -> None:
    # Before the libraries are imported, which may print.
    child = Child()
    import torch

    from benchmarks.pytorch import text_loops
    from benchmarks.pytorch.text_model import TextModel, dataset

    loop, case_json, threads = sys.argv[1:]
    case = Case.from_json(case_json)
    texts = read(case)
    torch.set_num_threads(int(threads))
    torch.manual_seed(0)
    model = TextModel(case)
    weights = sum(parameter.numel() for parameter in model.parameters())

    def updated() -> None:
        tokens = token_count([texts[index] for index in model.computed])
        model.computed.clear()
        child.updated(tokens)

    child.ready(weights=weights)
    if loop == PYTORCH:
        adam = torch.optim.AdamW(
            model.parameters(), LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True
        )
        examples = dataset(texts[: UPDATES * case.effective])
        while True:
            text_loops.pytorch(case, examples, model, adam, updated)
    text_loops.trainer_by_length(
        case,
        dataset(texts),
        model,
        updated,
        learning_rate=LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
        num_train_epochs=EPOCHS,
    )


if __name__ == "__main__":
    main()

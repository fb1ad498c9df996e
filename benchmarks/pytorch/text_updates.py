"""python -m benchmarks.pytorch.text_updates LOOP CASE WEIGHTS OUTPUT: single updates.

Each update of an epoch is a step of SGD with a learning rate of 1, from the WEIGHTS in
a .npz file. Written are the indices of its texts, and weights before − weights after,
with a first axis of updates. LOOP is a name in `benchmarks.texts`, and CASE is JSON.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.pytorch import text_loops
from benchmarks.pytorch.text_model import TextModel, dataset
from benchmarks.texts import PYTORCH, TRAINER_BY_LENGTH, Case, read


class SingleUpdates:
    """Records each update of a model, and takes it back.

    Attributes:
        changes: weights before − weights after, by the name of the parameter.
        texts: the indices of the texts of each update.
    """

    def __init__(self, model: TextModel):
        self._model = model
        self._initial: dict[str, torch.Tensor] = {}
        self.changes: dict[str, list[np.ndarray]] = {}
        for name, parameter in model.decoder.named_parameters():
            self._initial[name] = parameter.detach().clone()
            self.changes[name] = []
        self.texts: list[list[int]] = []

    def updated(self) -> None:
        self.texts.append(list(self._model.computed))
        self._model.computed.clear()
        with torch.no_grad():
            for name, parameter in self._model.decoder.named_parameters():
                change = self._initial[name] - parameter
                self.changes[name].append(change.numpy())
                parameter.copy_(self._initial[name])


def main() -> None:
    loop, case_json, weights, output = sys.argv[1:]
    case = Case.from_json(case_json)
    torch.manual_seed(0)
    model = TextModel(case, accepts_loss_kwargs=loop == TRAINER_BY_LENGTH)
    with np.load(weights) as arrays:
        values = {name: torch.from_numpy(array) for name, array in arrays.items()}
    model.decoder.load_state_dict(values)

    single = SingleUpdates(model)
    examples = dataset(read(case))
    if loop == PYTORCH:
        sgd = torch.optim.SGD(model.parameters(), 1.0)
        text_loops.pytorch(case, examples, model, sgd, single.updated)
    else:
        text_loops.trainer_by_length(
            case,
            examples,
            model,
            single.updated,
            optim="sgd",
            learning_rate=1.0,
            num_train_epochs=1,
        )
    results: dict[str, Any] = {"texts": np.array(single.texts)}
    for name, changes in single.changes.items():
        results[name] = np.stack(changes)
    np.savez(Path(output), **results)


if __name__ == "__main__":
    main()

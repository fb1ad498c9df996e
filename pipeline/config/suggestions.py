"""Suggests what a user may have meant by an unknown key."""

from difflib import get_close_matches

from pipeline.config.schema import Config, keys_in

# Names in other tools, and the keys of this project with the same meaning.
_ELSEWHERE = {
    "accumulate_grad_batches": "accumulation.factor",
    "accumulation_steps": "accumulation.factor",
    "batch_size": "accumulation.effective_batch_size",
    "gradient_accumulation_steps": "accumulation.factor",
    "learning_rate": "optimizer.learning_rate",
    "lr": "optimizer.learning_rate",
    "max_epochs": "training.epochs",
    "max_steps": "training.updates",
    "mixed_precision": "hardware.precision",
    "num_train_epochs": "training.epochs",
    "per_device_train_batch_size": "accumulation.micro_batch_size",
    "steps": "training.updates",
    "train_batch_size": "accumulation.effective_batch_size",
    "wd": "optimizer.weight_decay",
    "weight_decay": "optimizer.weight_decay",
}
_SIMILARITY = 0.75  # minimum similarity of two names, between 0 and 1


def key_elsewhere(name: str) -> str | None:
    """Return the key in another group for which a name may stand.

    This is the key for which another tool uses this name, or else a key whose last
    part is the same or similar. Return None if there is no such key.
    """
    if name in _ELSEWHERE:
        return _ELSEWHERE[name]
    keys_by_name: dict[str, str] = {}
    for key in keys_in(Config):
        if not key.field.metadata["facts"].set_by_a_sweep:
            keys_by_name.setdefault(key.name.rpartition(".")[2], key.name)
    matches = get_close_matches(name, keys_by_name, n=1, cutoff=_SIMILARITY)
    if not matches:
        return None
    return keys_by_name[matches[0]]

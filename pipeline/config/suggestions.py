"""Suggests what a user may have meant by an unknown key."""

from difflib import get_close_matches

from pipeline.config.schema import Config, keys_in

# Names in other tools, and the keys of this project with the same meaning.
_ELSEWHERE = {
    "accelerator": "hardware.device",
    "accumulate_grad_batches": "accumulation.factor",
    "accumulation_steps": "accumulation.factor",
    "batch_size": "accumulation.effective_batch_size",
    "check_val_every_n_epoch": "training.evaluate_every",
    "ckpt_path": "start.run",
    "data": "dataset",
    "datamodule": "dataset",
    "default_root_dir": "hydra.run.dir",
    "devices": "hardware.replicas",
    "eval_steps": "training.evaluate_every",
    "gpus": "hardware.replicas",
    "gradient_accumulation_steps": "accumulation.factor",
    "gradient_clip_val": "optimizer.global_clipnorm",
    "learning_rate": "optimizer.learning_rate",
    "log_every_n_steps": "tracking.log_every",
    "logger": "tracking.uri",
    "logging_steps": "tracking.log_every",
    "lr": "optimizer.learning_rate",
    "max_epochs": "training.epochs",
    "max_grad_norm": "optimizer.global_clipnorm",
    "max_steps": "training.updates",
    "mixed_precision": "hardware.precision",
    "num_nodes": "hardware.workers",
    "num_train_epochs": "training.epochs",
    "output_dir": "hydra.run.dir",
    "per_device_train_batch_size": "accumulation.micro_batch_size",
    "precision": "hardware.precision",
    "resume_from_checkpoint": "start.run",
    "save_steps": "training.checkpoint_every",
    "seed_everything": "seed",
    "steps": "training.updates",
    "task_name": "tracking.experiment",
    "train_batch_size": "accumulation.effective_batch_size",
    "trainer": "training",
    "val_check_interval": "training.evaluate_every",
    "wd": "optimizer.weight_decay",
    "weight_decay": "optimizer.weight_decay",
}
_SIMILARITY = 0.75  # minimum similarity of two names, between 0 and 1


def key_of_another_tool(key: str) -> str | None:
    """Return the key here with the meaning of another tool's, or None if not known.

    Args:
        key: the dotted name, whose first part is a name in another tool, such as
            `lr`, `trainer.max_epochs` or `logger.wandb.project`.
    """
    first = key.partition(".")[0]
    last = key.rpartition(".")[2]
    if first not in _ELSEWHERE:
        return None
    return key_elsewhere(last) or _ELSEWHERE[first]


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

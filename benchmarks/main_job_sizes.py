"""The sizes of the README's main job, for the same job by other means."""

EPOCHS = 10
MICRO = 32
FACTOR = 4
TRAINING_EXAMPLES = 1437
VALIDATION_EXAMPLES = 180

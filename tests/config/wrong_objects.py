"""Command lines that are rejected before a run is created, and the line of each.

TensorFlow, TFDS, Keras or MLflow has to look at the objects to find what is wrong. The
module `mine` is the `USER_MODULE` of test_bad_input.py. `…` stands for any text, and a
name in braces for what the test fills in.
"""

from __future__ import annotations

NOT_PREPARED = "dataset=tfds dataset.name=mnist dataset.data_dir={elsewhere}"
NO_LOGITS = "~training.loss.from_logits"
ONE_HOT = (
    "dataset._target_=mine.one_hot +model.classes=3 "
    "training.loss._target_=keras.losses.CategoricalCrossentropy"
)
SCHEDULER = (
    "'+training.callbacks.rate={_target_: keras.callbacks.LearningRateScheduler, "
    "schedule: 1}'"
)
MLP = "model=mlp"  # builds in no time
TWO = "--config-dir mine model=two objective=two dataset._target_=mine.of_two"

# One of each kind.
PREPARED = {
    "train -m hardware.device=cpu,gpu": (
        "hardware.device must be a device of this machine, which has no GPU. Received: "
        "'gpu'. Choices: auto, cpu."
    ),
    "train hardware.fused_attention=true": (
        "hardware.fused_attention must be false or auto: it needs all GPUs to "
        "be of NVIDIA's Hopper generation. Received: true."
    ),
    "train accumulation.effective_batch_size=1438": (
        "accumulation.effective_batch_size must be at most the 1437 examples of the "
        "training split. Received: 1438."
    ),
    "train dataset=tfds dataset.name=mnits": (
        "dataset.name must be a TFDS dataset (…). Received: 'mnits'."
    ),
    f"train {NOT_PREPARED} dataset.download=false": (
        "dataset.data_dir must contain mnist/…, already prepared; dataset.download=true … "
        "Received: '…'."
    ),
    f"train {NOT_PREPARED}": (
        "dataset could not be downloaded and prepared in … (…). Received: 'mnist/…'."
    ),
    "train dataset._target_=mine.not_a_dataset": (
        "dataset._target_ must return (train, validation[, test]) as tf.data.Datasets, "
        "or a pipeline.dataset.Data. Received: 'int'."
    ),
    "train 'dataset.augment={_target_: mine.one_argument, _partial_: true}'": (
        "dataset.augment must give examples (TypeError: one_argument() takes 1 "
        "positional argument but 2 were given). Received: 'mine.one_argument'."
    ),
    "train dataset._target_=mine.unreadable": (
        "dataset must give examples (the data cannot be read: example 3 of the train "
        "split, counted from 0: …). Received: 'mine.unreadable'."
    ),
    "train experiment=text training.loss.reduction=sum_over_batch_size": (
        "training.loss.reduction must be mean_with_sample_weight or sum if dataset.pad "
        "pads the labels and the model has no mask: other reductions also count the "
        "padding. Received: 'sum_over_batch_size'."
    ),
    "train accumulation.micro_batch_tokens=512": (
        "accumulation.micro_batch_tokens must come with dataset.pad, such as "
        "{multiple: 8, value: 0}, and with inputs of unequal length in each split: the "
        "lengths of dense inputs are not known. Give the examples without padding, or "
        "set dataset.lengths, such as {length: x.length, parts: [x.tokens, y]}, or cut "
        "by accumulation.micro_batch_size. Received: 512."
    ),
    "train 'dataset.lengths={length: x.length, parts: [x]}'": (
        "dataset.lengths.length must be a part of an example of the train split, or a "
        "node with a _target_. Received: 'x.length'. Choices: x, y."
    ),
    "train experiment=text model._target_=mine.pooled accumulation.micro_batch_tokens=9": (
        "accumulation.micro_batch_tokens must be null, as padding would change the "
        "update (with micro_batch_tokens, model must give the same outputs when an "
        "example is padded at its end: mask the padding, as Masking or "
        "Embedding(mask_zero=True) does, or cut padded batches by micro_batch_size "
        "alone. Received: …). Received: 9."
    ),
    "train model._target_=mine.recurrent accumulation.same_noise=true": (
        "accumulation.same_noise must be false or auto: some layers can only draw "
        "noise per micro-batch. Received: 'lstm'."
    ),
    (
        "train experiment=quick training.loss._target_=keras.losses.Circle "
        "~training.loss.from_logits"
    ): (
        "training.loss_over must be effective_batch: circle is a loss that compares "
        "examples. Received: 'example'."
    ),
    "train model=mlp model.dropout=0.1 training.loss_over=effective_batch": (
        "accumulation.same_noise must be True if loss_over is effective_batch, and "
        "layers must be able to draw noise for each example, because both passes over "
        "the batch need the same noise. Received: …"
    ),
    "train model._target_=mine.not_a_modle": (
        "model._target_ must name something that exists (…). Received: "
        "'mine.not_a_modle'. Did you mean 'mine.not_a_model'?"
    ),
    f"train {MLP} +model.clases=3": (
        "model.clases must be an argument of pipeline.components.model.mlp. Received: "
        "'clases'. Choices: input_shape, classes, hidden, dropout, l2. Did you mean "
        "'classes'?"
    ),
    f"train {MLP} model.dropout=1": (
        "model is rejected by pipeline.components.model.mlp (ValueError: dropout "
        "must be at least 0 and below 1. Received: 1.0). Received: …"
    ),
    "train model._target_=mine.one_argument": (
        "model.filters must be an argument of mine.one_argument; a model of your own "
        "belongs in a complete file, conf/model/NAME.yaml, which --config-dir "
        "conf model=NAME selects. Received: 'filters'. Choices: x."
    ),
    "train dataset=tfds dataset.name=null": (
        "dataset must give exactly one of name and builder. Received: {…}."
    ),
    f"train {MLP} model._target_=mine.not_a_model": (
        "model._target_ must return a keras.Model. Received: 'int'."
    ),
    f"train {MLP} +optimizer.nope=4": (
        "optimizer is rejected by keras.optimizers.AdamW (ValueError: Argument(s) "
        "not recognized: {'nope': 4}). Received: {…, nope: 4}."
    ),
    f"train {MLP} +optimizer.gradient_accumulation_steps=4": (
        "optimizer.gradient_accumulation_steps must be left out: the pipeline "
        "accumulates; set accumulation.factor. Received: 4."
    ),
    f"train {MLP} schedule.warmup_steps=150%": (
        "schedule.warmup_steps must be from 0% to 100%. Received: '150%'."
    ),
    f"train {MLP} schedule=piecewise schedule.boundaries=[90%,10%]": (
        "schedule.boundaries must rise. Received: ['90%', '10%']."
    ),
    f"train {MLP} training.loss._target_=keras.losses.MeanSquaredError": (
        "training.loss.from_logits must be an argument of "
        "keras.losses.MeanSquaredError; an objective of your own belongs in a complete "
        "file, conf/objective/NAME.yaml, which … Received: 'from_logits'. "
        "Choices: reduction, name, dtype."
    ),
    f"train {MLP} +model.classes=9": (
        "training.loss must fit … outputs (32, 9) float32 (label 9 is outside the 9 "
        "outputs). Received: 'sparse_categorical_crossentropy'."
    ),
    f"train {MLP} training.loss.from_logits=false": (
        "training.loss must fit … (the outputs are not probabilities; for logits, set "
        "from_logits=true). Received: 'sparse_categorical_crossentropy'."
    ),
    f"train {MLP} +training.loss.reduction=none": (
        "training.loss.reduction must be a mean or a sum. Received: 'none'."
    ),
    f"train {TWO} '+training.loss.c=null'": (
        "training.loss must fit labels … (an entry of loss must have the name of an "
        "output, one of a, b. Received: c). Received: …"
    ),
    f"train {TWO} 'training.class_weight={{0: 1}}'": (
        "training.class_weight needs examples (x, y), where y has the labels of one "
        "output, all of the same length; for other examples, use sample weights. "
        "Received: …"
    ),
    f"train {MLP} dataset._target_=mine.batched +model.classes=3": (
        "dataset._target_ must yield single examples in its train split, not batches: "
        "leave `batch` out; if these are single examples, set their shape with "
        "tf.ensure_shape. Received: …"
    ),
    (
        f"train {MLP} "
        "training.loss._target_=keras.losses.sparse_categorical_crossentropy "
        f"{NO_LOGITS}"
    ): (
        "training.loss.y_true must be given: "
        "keras.losses.sparse_categorical_crossentropy has no default for it; if the "
        "function itself is meant, set training.loss._partial_ to true."
    ),
    f"train {MLP} dataset._target_=mine.unlabelled +model.classes=3": (
        "training.loss needs labels, but the dataset has none: set it to null if the "
        "model adds its own loss."
    ),
    f"train {MLP} training.loss=null": (
        "training.loss must be given for a model that adds no loss by itself. "
        "Received: 'mlp'."
    ),
    (
        f"train {MLP} training.loss._target_=mine.column_loss {NO_LOGITS} "
        "+training.loss._partial_=true"
    ): (
        "training.loss must fit … (The loss must have the examples on axis 0 of its "
        "values…). Received: …"
    ),
    (
        f"train {MLP} training.loss._target_=mine.flat_loss {NO_LOGITS} "
        "+training.loss._partial_=true"
    ): (
        "training.loss must depend on the model's outputs: no gradient reaches them. "
        "Received: …"
    ),
    (
        f"train {MLP} '+training.callbacks.stop={{_target_: "
        "keras.callbacks.EarlyStopping, patienc: 3}'"
    ): (
        "training.callbacks.stop.patienc must be an argument of "
        "keras.callbacks.EarlyStopping. Received: 'patienc'. Choices: monitor, "
        "min_delta, patience, … Did you mean 'patience'?"
    ),
    f"train {MLP} {SCHEDULER}": (
        "training.callbacks.rate must be able to run (it sets the learning "
        "rate, which only schedule=constant allows). Received: 'LearningRateScheduler'."
    ),
    f"train {MLP} '+training.callbacks.own={{_target_: mine.keeping}}'": (
        "training.callbacks.own must be able to run (TypeError: the state of "
        "own/seen must be JSON values and NumPy arrays. Received: set). Received: …"
    ),
    (
        f"train {MLP} '+training.callbacks.backup={{_target_: "
        "keras.callbacks.BackupAndRestore, backup_dir: there}'"
    ): (
        "training.callbacks.backup._target_ must be left out: "
        "training.checkpoint_every replaces it, and pipeline resume continues from the "
        "last checkpoint. Received: 'BackupAndRestore'."
    ),
    "ui --port {open}": (
        "--port must be a free port: choose another with --port (…). Received: {open}."
    ),
    f"train {MLP} tracking.uri=sqlite:///other.db": (
        "tracking.uri must be a store that answers (…/other.db is a database of "
        "something other than MLflow). Received: 'sqlite:///other.db'."
    ),
    f"train {MLP} tracking.uri=http://127.0.0.1:{{closed}}": (
        "tracking.uri must be a store that answers (127.0.0.1:{closed}: Connection "
        "refused), or tracking.when_unreachable must be offline or wait. "
        "Received: 'http://127.0.0.1:{closed}'."
    ),
}

# Other values of the same keys, and stores, each of which another process opens.
PREPARED_TOO = {
    "train 'dataset.augment={_target_: mine.cropped, _partial_: true}'": (
        "dataset.augment must keep the shape and dtype of an input, … Received: "
        "'…(None, 4, 8, 1)…'."
    ),
    "train 'dataset.augment={_target_: mine.counted, _partial_: true}'": (
        "dataset.augment must keep the shape and dtype of an input, … Received: "
        "'…tf.int32…'."
    ),
    "train experiment=text dataset.pad.value=102": (
        "dataset must give examples (the data cannot be read: dataset.pad.value must "
        "not occur in the inputs, because a mask could not tell it from padding: 102). "
        "Received: 'pipeline.dataset.topics'."
    ),
    "train experiment=text model.width=66": (
        "model is rejected by pipeline.components.model.decoder (ValueError: width "
        "must be a multiple of heads, 4. Received: 66). Received: …"
    ),
    "train model=tabular": (
        "model is rejected by pipeline.components.model.tabular (ValueError: "
        "input_shape must be (measurements,). Received: (8, 8, 1)). Received: …"
    ),
    "train model=resnet50 model.name=save": (
        "model is rejected by pipeline.components.model.application (ValueError: "
        "name must be a model of keras.applications. Received: save). Received: …"
    ),
    "train model._target_=not_there.model": (
        "model._target_ must name something that exists (ModuleNotFoundError: No "
        "module named 'not_there'). Received: 'not_there.model'."
    ),
    f"train {MLP} training.loss._target_=keras.losses.Huberr": (
        "training.loss._target_ must name something that exists (…). Received: "
        "'keras.losses.Huberr'. Did you mean 'keras.losses.Huber'?"
    ),
    f"train {MLP} training.loss._target_=math.pi": (
        "training.loss._target_ must name something that can be called. Received: "
        "'math.pi'."
    ),
    f"train {MLP} model.dropout=2": (
        "model is rejected by pipeline.components.model.mlp (ValueError: …). "
        "Received: {hidden: [128, 128], dropout: 2, l2: 0.0}."
    ),
    f"train {MLP} model.hidden=[true]": (
        "model is rejected by pipeline.components.model.mlp (ValueError: hidden: "
        "each size must be a whole number of at least 1. Received: [True]). Received: …"
    ),
    "train model.kernel_size=0": (
        "model is rejected by pipeline.components.model.cnn (ValueError: "
        "kernel_size: each size must be a whole number of at least 1. Received: [0]). "
        "Received: …"
    ),
    f"train {MLP} model.l2=-1": (
        "model is rejected by pipeline.components.model.mlp (ValueError: l2 must "
        "be a number of at least 0. Received: -1.0). Received: …"
    ),
    "train dataset=tfds dataset.name=null +dataset.builder=mine.Vector": (
        "dataset.builder must be a tfds.core.DatasetBuilder. Received: 'mine.Vector'."
    ),
    f"train {MLP} optimizer.epsilon=null": (
        "optimizer.epsilon must be a number of at least 0. Received: null."
    ),
    f"train {MLP} +optimizer.loss_scale_factor=much": (
        "optimizer must be able to apply a gradient (…). Received: 'AdamW'."
    ),
    f"train {MLP} schedule.warmup_steps=x%": (
        "schedule.warmup_steps must be a share of the horizon such as 5%. Received: "
        "'x%'."
    ),
    f"train {MLP} schedule.warmup_steps=-1": (
        "schedule.warmup_steps must be a whole number of updates from 0 to the "
        "horizon's 120. Received: -1."
    ),
    f"train {MLP} schedule.warmup_steps=0.1": (
        "schedule.warmup_steps must be a whole number … Received: 0.1."
    ),
    f"train {MLP} schedule.warmup_steps=1e20": (
        "schedule.warmup_steps must be a whole number … Received: 1e+20."
    ),
    f"train {MLP} schedule.warmup_steps=121": (
        "schedule.warmup_steps must be a whole number … Received: 121."
    ),
    f"train {MLP} schedule.decay_steps=0": (
        "schedule.decay_steps must be a whole number of updates from 1 on. Received: 0."
    ),
    f"train {MLP} scaling=linear scaling.warmup=121": (
        "scaling.warmup must be a whole number of updates from 0 to the horizon's 120. "
        "Received: 121."
    ),
    f"train {MLP} schedule.decay_steps=long": (
        "schedule is rejected by keras.optimizers.schedules.CosineDecay (…). "
        "Received: {…decay_steps: 'long'…}."
    ),
    f"train {MLP} training.loss._target_=keras.losses.MeanSquaredError {NO_LOGITS}": (
        "training.loss must fit labels (32,) int64 and outputs (32, 10) float32 (the "
        "shapes differ). Received: 'mean_squared_error'."
    ),
    f"train {MLP} training.loss._target_=keras.losses.CategoricalCrossentropy": (
        "training.loss must fit labels (32,) int64 and outputs (32, 10) float32 (the "
        "shapes differ). Received: 'categorical_crossentropy'."
    ),
    f"train {TWO} '~training.loss.b'": (
        "training.loss must fit … (loss must name every output, with null for one "
        "without a loss. Missing: b). Received: …"
    ),
    f"train {TWO} 'training.loss_weights={{c: 1}}'": (
        "training.loss_weights must fit the outputs (an entry of loss_weights must have "
        "the name of an output, one of a, b. Received: c). Received: {c: 1.0}."
    ),
    f"train {TWO} '+training.metrics={{c: {{m: {{_target_: keras.metrics.AUC}}}}}}'": (
        "training.metrics.c.m must fit … (metrics must belong to an output, one of a, b. "
        "Received: c). Received: 'AUC'."
    ),
    f"train {MLP} 'training.class_weight={{10: 2}}'": (
        "training.class_weight must name classes from 0 to 9. Received: 10."
    ),
    f"train {MLP} dataset._target_=mine.weighted +model.classes=3": (
        "training.loss must fit … (sample weights of shape (32, 3) do not fit values "
        "of shape (32,)). Received: …"
    ),
    f"train {MLP} dataset._target_=mine.negative +model.classes=3": (
        "training.loss must fit … (label -1 is outside the 3 outputs). Received: …"
    ),
    f"train {MLP} model._target_=mine.bare": (
        "model.hidden must be an argument of mine.bare; a model of your own belongs "
        "in a complete file, conf/model/NAME.yaml, … Received: 'hidden'. Choices: none."
    ),
    (
        f"train {MLP} training.loss._target_=mine.scalar_loss {NO_LOGITS} "
        "+training.loss._partial_=true"
    ): (
        "training.loss must fit … (The loss must give one value per example, not a "
        "scalar…). Received: …"
    ),
    (
        f"train {MLP} training.loss._target_=mine.branching_loss {NO_LOGITS} "
        "+training.loss._partial_=true"
    ): (
        "training.loss must fit … (it branches in Python on the value of a tensor: use "
        "keras.ops.where …). Received: …"
    ),
    f"train {MLP} +training.metrics.m._target_=mine.Branching": (
        "training.metrics.m must fit … (it branches in Python on the value of a "
        "tensor: use keras.ops.where …). Received: 'Branching'."
    ),
    (
        f"train {MLP} "
        "training.metrics.accuracy._target_=keras.metrics.CategoricalAccuracy"
    ): (
        "training.metrics.accuracy must fit labels (32,) int64 and outputs (32, 10) "
        "float32 (the shapes differ). Received: 'CategoricalAccuracy'."
    ),
    f"train {MLP} +training.loss.ignore_class=3 +model.classes=9": (
        "training.loss must fit … (label 9 is outside the 9 outputs). Received: …"
    ),
    f"train {MLP} training.metrics.accuracy._target_=mine.Vector {ONE_HOT}": (
        "training.metrics.accuracy must fit … (its result is not one number; "
        "with average=macro, it is one number). "
        "Received: 'F1Score'."
    ),
    f"train {MLP} training.metrics.accuracy._target_=keras.losses.Huber": (
        "training.metrics.accuracy._target_ must build a keras.metrics.Metric. "
        "Received: 'Huber'."
    ),
    f"train {MLP} training.loss.from_logits=abc": (
        "training.loss.from_logits must be true or false. Received: 'abc'."
    ),
    f"train {MLP} model._target_=mine.flagged +model.norm=1": (
        "model.norm must be true or false. Received: 1."
    ),
    (
        f"train {MLP} '+training.callbacks.stop={{_target_: "
        "keras.callbacks.EarlyStopping, monitor: nope}'"
    ): (
        "training.callbacks.stop.monitor must be a name in the logs of Keras' callbacks. "
        "Received: 'nope'. Choices: val_loss, val_accuracy, loss, accuracy, "
        "gradient_norm, learning_rate."
    ),
    f"train {MLP} schedule=constant {SCHEDULER}": (
        "training.callbacks.rate must be able to run (TypeError: 'int' object "
        "is not callable). Received: 'LearningRateScheduler'."
    ),
    f"train {MLP} +training.callbacks.stop._target_=keras.losses.Huber": (
        "training.callbacks.stop._target_ must build a keras.callbacks.Callback. "
        "Received: 'Huber'."
    ),
    f"train {MLP} +training.shown.mine._target_=builtins.dict": (
        "training.shown.mine._target_ must give a function of (x, y, outputs), with "
        "_partial_: true. Received: 'dict'."
    ),
    f"train {MLP} tracking.uri=sqlite:///file/mlflow.db": (
        "tracking.uri must be a store that answers (…/file is not a folder that can be "
        "written). Received: 'sqlite:///file/mlflow.db'."
    ),
    f"train {MLP} tracking.uri=sqlite:////proc/nope/mlflow.db": (
        "tracking.uri must be a store that answers (/proc is not a folder that can be "
        "written…). Received: 'sqlite:////proc/nope/mlflow.db'."
    ),
    f"train {MLP} tracking.uri=sqlite:///mine": (
        "tracking.uri must be a store that answers (…/mine: unable to open database "
        "file). Received: 'sqlite:///mine'."
    ),
    f"train {MLP} tracking.uri=sqlite:///file": (
        "tracking.uri must be a store that answers (…/file: file is not a database). "
        "Received: 'sqlite:///file'."
    ),
    f"train {MLP} tracking.uri=http://me:secret@127.0.0.1:{{open}}": (
        "tracking.uri must be a store that answers (…), or tracking.when_unreachable "
        "must be offline or wait. Received: 'http://***@127.0.0.1:{open}'."
    ),
    f"train {MLP} tracking.uri=sqlite:///store.db tracking.experiment=old": (
        "tracking.experiment is deleted; restore it or choose another name. Received: "
        "'old'."
    ),
}

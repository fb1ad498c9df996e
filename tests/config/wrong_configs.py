"""Command lines that are rejected for the config alone, and the line that each gets.

Neither TensorFlow nor MLflow is imported for them. `…` stands for any text.
"""

from __future__ import annotations

NAMED = "a mapping of name → _target_; … removes an entry"
ONE_CONFIG = (
    "must be left out: this command reads a single config; use `pipeline train` to "
    "print configs or to sweep over them."
)
CONFIG = {
    # keys and groups
    "train accumulation.facto=4": (
        "accumulation.facto must be a key of accumulation. Received: 'facto'. Choices: "
        "effective_batch_size, factor, … Did you mean 'factor'?"
    ),
    "train experimnt=quick": (
        "experimnt must be a key of the config. Received: 'experimnt'. Choices: "
        "accumulation, dataset, experiment, … Did you mean 'experiment'?"
    ),
    "train model.hiden=[8]": (
        "model.hiden must be a key of model; a new one is added with "
        "+model.hiden=VALUE. Received: 'hiden'. Choices: _target_, filters, "
        "kernel_size, hidden, dropout, l2. Did you mean 'hidden'?"
    ),
    "train +note=1": (
        "note must be a key of the config. Received: 'note'. Choices: accumulation, "
        "dataset, …"
    ),
    "train +hardware.devise=gpu": (
        "hardware.devise must be a key of hardware. Received: 'devise'. Choices: "
        "device, … Did you mean 'device'?"
    ),
    "train optimizer=adamww": (
        "optimizer must name one of the options of this group. Received: 'adamww'. "
        "Choices: adafactor, adam, adamw, lion, momentum, muon, rmsprop, sgd. Did you "
        "mean 'adamw'?"
    ),
    "train dataset=3": (
        "dataset must name one of the options of this group. Received: 3. Choices: "
        "…digits…tfds…"
    ),
    "train hydra/launcher=nope": (
        "hydra/launcher must name one of the options of this group. Received: 'nope'. "
        "Choices: basic…"
    ),
    "train model@mine=mlp": (
        "model@mine must be a group of the defaults list. Received: 'model@mine=mlp'."
    ),
    "train ~model": "model must be given.",
    "train ~seed": "seed must be given.",
    "train ~nope": "nope must be in the config to be deleted. Received: '~nope'.",
    "train dataset=tfds": "dataset.name must be given.",
    # removed
    "train scaling=adascale": (
        "scaling=adascale was removed in version 0.2.0: use scaling=linear, "
        "scaling=sqrt or another rule."
    ),
    "train scaling.rule=adascale": (
        "scaling.rule=adascale was removed in version 0.2.0: use scaling=linear, …"
    ),
    "train accumulation.schedule=seesaw": (
        "accumulation.batch_schedule=seesaw was removed in version 0.2.0: use a list "
        "of stages, with schedule.clock=examples."
    ),
    "train +accumulation.seesaw_max=512": (
        "accumulation.seesaw_max was removed in version 0.2.0: give the effective "
        "batch size of each stage."
    ),
    "train accumulation.scale_rate=false": (
        "accumulation.scale_rate was removed in version 0.2.0: the scaling rule "
        "follows the stages; use scaling=none for a learning rate that does not."
    ),
    "train --config-dir mine scaling=gone": (
        "scaling.rule=adascale was removed in version 0.2.0: use …"
    ),
    # types
    "train accumulation.factor=four": (
        "accumulation.factor must be an integer, or null. Received: 'four'."
    ),
    "train training.epochs=1e1": (
        "training.epochs must be an integer, or null. Received: 10.0."
    ),
    "train hardware.replicas=null": (
        "hardware.replicas must be an integer. Received: null."
    ),
    "train hardware.xla=maybe": (
        "hardware.xla must be true, false, auto or fastest. Received: 'maybe'."
    ),
    "train hardware.xla=2": (
        "hardware.xla must be true, false, auto or fastest. Received: 2."
    ),
    "train hardware.xla=fastest hardware.replicas=2": (
        "hardware.xla must be true, false or auto with 2 replicas: updates are timed "
        "only with one. "
        "Received: 'fastest'."
    ),
    "train hardware.xla=fastest dataset.batched=true": (
        "hardware.xla must be auto or false with dataset.batched=true: … "
        "Received: 'fastest'."
    ),
    "train hardware.xla=fastest hardware.fused_attention=true": (
        "hardware.fused_attention must be false or auto with hardware.xla=fastest. "
        "Received: true."
    ),
    "verify hardware.xla=fastest": (
        "hardware.xla must be true, false or auto, because verify does not time "
        "anything. Received: 'fastest'."
    ),
    "train hardware.fused_attention=fast": (
        "hardware.fused_attention must be true, false or auto. Received: 'fast'."
    ),
    "train hardware.fused_attention=true hardware.xla=false": (
        "hardware.fused_attention must be false or auto with hardware.xla=false. "
        "Received: true."
    ),
    "train hardware.fused_attention=true hardware.deterministic=true": (
        "hardware.fused_attention must be false or auto with "
        "hardware.deterministic=true: one of its gradients is not deterministic. "
        "Received: true."
    ),
    "train hardware.fused_attention=true hardware.device=cpu": (
        "hardware.fused_attention must be false or auto with hardware.device=cpu. "
        "Received: true."
    ),
    "train hardware.tf32=1": "hardware.tf32 must be true or false. Received: 1.",
    "train tracking.log_model=5": (
        "tracking.log_model must be true or false. Received: 5."
    ),
    "train schedule=exponential schedule.decay_rate=-1": (
        "schedule.decay_rate must be a positive number. Received: -1."
    ),
    "train schedule=exponential schedule.decay_rate=0": (
        "schedule.decay_rate must be a positive number. Received: 0."
    ),
    "train training.added_losses=max": (
        "training.added_losses must be one of its choices. Received: 'max'. Choices: "
        "mean, sum."
    ),
    "train training.loss_over=batch": (
        "training.loss_over must be one of its choices. Received: 'batch'. Choices: "
        "example, effective_batch."
    ),
    "train hardware.device=tpu": (
        "hardware.device must be one of its choices. Received: 'tpu'. Choices: auto, "
        "cpu, gpu."
    ),
    "train hardware.precision=float16": (
        "hardware.precision must be one of its choices. Received: 'float16'. Choices: "
        "float32, float64, mixed_bfloat16, mixed_float16. Did you mean 'float64'?"
    ),
    "train hardware.precision=2": (
        "hardware.precision must be one of its choices. Received: 2. Choices: float32, "
        "float64, mixed_bfloat16, mixed_float16."
    ),
    "train hardware.device=gpu": (
        "hardware.device must be a device of this machine, which has no GPU. Received: "
        "'gpu'. Choices: auto, cpu."
    ),
    "train training.loss=[]": (
        "training.loss must be a mapping, like the value that it is merged with; to "
        "set a list, put training.loss=null before it. Received: []."
    ),
    "train 'training.metrics=[{_target_: keras.metrics.AUC}]'": (
        f"training.metrics must be {NAMED}. Received: [{{_target_: "
        "'keras.metrics.AUC'}]."
    ),
    "train training.weighted_metrics=accuracy": (
        f"training.weighted_metrics must be {NAMED}. Received: 'accuracy'."
    ),
    "train '+training.metrics.a=[{_target_: keras.metrics.AUC}]'": (
        f"training.metrics.a must be {NAMED}. Received: [{{_target_: "
        "'keras.metrics.AUC'}]."
    ),
    "train --config-dir mine objective=listed": (
        f"training.metrics must be {NAMED} (in objective/listed). Received: "
        "['accuracy']."
    ),
    "train --config-dir mine objective=off": (
        "training.metrics must have text as its keys (in objective/off). Received: "
        "false."
    ),
    "train --config-dir mine training=listed": (
        f"training.weighted_metrics must be {NAMED} (in training/listed). Received: "
        "['accuracy']."
    ),
    "train ~training.callbacks": (
        "training.callbacks must be given; '~training.callbacks.NAME' removes an entry."
    ),
    "train training.metrics={}": (
        "training.metrics must have its entries removed one by one, because {} is "
        "merged with them: '~training.metrics.accuracy'. Received: {}."
    ),
    "train training.callbacks=null": (
        "training.callbacks must be a mapping of name → _target_; "
        "'~training.callbacks.NAME' removes an entry. Received: null."
    ),
    "train training.callbacks=[]": (
        f"training.callbacks must be {NAMED}. Received: []."
    ),
    "train model.hidden={}": (
        "model.hidden must be a list, like the value that it is merged with; to set a "
        "mapping, put model.hidden=null before it. Received: {}."
    ),
    "train training.loss=mse": (
        "training.loss._target_ must be the dotted name of the code that builds the "
        "object. Received: "
        "'mse'."
    ),
    "train training.loss_weights=abc": (
        "training.loss_weights must be null, or a number for each output. Received: "
        "'abc'."
    ),
    "train 'training.class_weight={a: 1}'": (
        "training.class_weight must be null, or a number of at least 0 for each class; "
        "classes are whole numbers. Received: {a: 1}."
    ),
    "train +training.class_weight.one=5": (
        "training.class_weight must be null, or a number … Received: {one: 5}."
    ),
    "train training.class_weight.one=5": (
        "training.class_weight.one must be the weight of a class, by its index, as in "
        "training.class_weight.1=5. Received: 'one'. Choices: none."
    ),
    "train 'training.class_weight={0: 1}' ~training.class_weight.0": (
        "training.class_weight.0 must be set to 1, which has no effect, as Hydra "
        "cannot delete a number. Received: '~training.class_weight.0'."
    ),
    "train 'training.class_weight={0: -1}'": (
        "training.class_weight must be null, or a number … Received: {0: -1}."
    ),
    "train '+training.weighted_metrics={accuracy: {_target_: keras.metrics.AUC}}'": (
        "training.metrics.accuracy must have a name … and those of other metrics. "
        "Received: 'accuracy'."
    ),
    "train '+training.metrics.a={loss: {_target_: keras.metrics.AUC}}'": (
        "training.metrics.a.loss must have a name … Received: 'a_loss'."
    ),
    "train seed=${training.loss._target_}": (
        "seed must be an integer. Received: 'keras.losses.…'."
    ),
    # sizes and horizons
    "train accumulation.factor=0": (
        "accumulation.factor must be at least 1. Received: 0."
    ),
    "train accumulation.micro_batch_size=-8": (
        "accumulation.micro_batch_size must be at least 1. Received: -8."
    ),
    "train accumulation.effective_batch_size=0": (
        "accumulation.effective_batch_size must be at least 1. Received: 0."
    ),
    "train accumulation.factor=null": (
        "accumulation must give two of effective_batch_size, factor, micro_batch_size. "
        "Received: {…}."
    ),
    (
        "train accumulation.effective_batch_size=128 accumulation.factor=4 "
        "accumulation.micro_batch_size=16"
    ): (
        "accumulation.factor must agree with effective batch 128 and micro-batch 16… "
        "Received: 4. Choices: 8."
    ),
    "train accumulation.effective_batch_size=64 accumulation.micro_batch_size=65": (
        "accumulation.micro_batch_size must be at most the 64 examples … Received: 65."
    ),
    "train accumulation.micro_batch_size=most": (
        "accumulation.micro_batch_size must be an integer, auto or auto_fastest, or "
        "null. Received: 'most'."
    ),
    "train accumulation.same_noise=maybe": (
        "accumulation.same_noise must be true, false or auto. Received: 'maybe'."
    ),
    "train accumulation.moving_statistics=none": (
        "accumulation.moving_statistics must be one of its choices. Received: 'none'. "
        "Choices: effective, micro."
    ),
    "train accumulation.micro_batch_tokens=0": (
        "accumulation.micro_batch_tokens must be at least 1, or null. Received: 0."
    ),
    "train accumulation.micro_batch_tokens=512 accumulation.factor=4": (
        "accumulation.factor must be left out with accumulation.micro_batch_tokens, "
        "which determines the factor. Received: 4."
    ),
    "train accumulation.micro_batch_tokens=512 accumulation.micro_batch_size=auto": (
        "accumulation.micro_batch_size cannot be searched for with "
        "accumulation.micro_batch_tokens: set it to a number of examples or to null, "
        "or set accumulation.micro_batch_tokens to null. Received: 'auto'."
    ),
    (
        "train accumulation.micro_batch_tokens=512 "
        "accumulation.effective_batch_size=null"
    ): (
        "accumulation.effective_batch_size must be given with "
        "accumulation.micro_batch_tokens."
    ),
    "train accumulation.micro_batch_tokens=512 hardware.xla=fastest": (
        "hardware.xla must be auto or false with accumulation.micro_batch_tokens, "
        "unless hardware.xla_lengths is auto or a list: XLA would compile once for "
        "each length. Received: 'fastest'."
    ),
    "train hardware.xla_lengths=[64,128]": (
        "hardware.xla_lengths must be auto or null without "
        "accumulation.micro_batch_tokens. Received: [64, 128]."
    ),
    (
        "train experiment=text accumulation.micro_batch_tokens=512 "
        "hardware.xla_lengths=[20,128]"
    ): (
        "hardware.xla_lengths must be multiples of dataset.pad.multiple, 16. "
        "Received: [20, 128]."
    ),
    "train accumulation.micro_batch_tokens=512 hardware.xla_lengths=[128,64]": (
        "hardware.xla_lengths must be auto, null, or a list of at most 32 increasing "
        "whole numbers of at least 1. Received: [128, 64]."
    ),
    "train accumulation.micro_batch_tokens=512 hardware.fused_attention=true": (
        "hardware.fused_attention must be false or auto with "
        "accumulation.micro_batch_tokens: micro-batches have several sizes. "
        "Received: true."
    ),
    "train accumulation.micro_batch_tokens=512 dataset.batched=true": (
        "accumulation.micro_batch_tokens must be null with dataset.batched=true, whose "
        "batches are padded already. Received: 512."
    ),
    "train accumulation.micro_batch_tokens=512 'tracking.show={}'": (
        "tracking.show must be null with accumulation.micro_batch_tokens, which "
        "evaluates examples in the order of their lengths; use training.shown to log "
        "pictures and tables of your own. Received: {}."
    ),
    (
        "train experiment=text accumulation.micro_batch_tokens=512 "
        "dataset.pad.value=300"
    ): (
        "dataset.pad.value must be 0 with accumulation.micro_batch_tokens. "
        "Received: 300."
    ),
    "train accumulation.micro_batch_size=auto accumulation.factor=4": (
        "accumulation.factor cannot be set with accumulation.micro_batch_size=auto, as "
        "the effective batch would depend on the machine: set "
        "accumulation.effective_batch_size, and this key to null. Received: 4."
    ),
    (
        "train accumulation.micro_batch_size=auto_fastest "
        "accumulation.effective_batch_size=null"
    ): (
        "accumulation.effective_batch_size must be given with "
        "accumulation.micro_batch_size=auto_fastest."
    ),
    "train hardware.memory=much": (
        "hardware.memory must be a size such as 8GiB, or null. Received: 'much'."
    ),
    "verify accumulation.micro_batch_size=auto": (
        "accumulation.micro_batch_size must be a number, because verify does not search "
        "for a size. Received: 'auto'."
    ),
    "train hardware.gpu_memory=half": (
        "hardware.gpu_memory must be a size such as 8GiB, or null. Received: 'half'."
    ),
    "train hardware.jobs_per_gpu=0": (
        "hardware.jobs_per_gpu must be at least 1. Received: 0."
    ),
    "train hardware.gpu=first": (
        "hardware.gpu must be the index of a GPU, counted from 0, or a list of "
        "distinct indices, or null. Received: 'first'."
    ),
    "train hardware.gpu=-1": (
        "hardware.gpu must be the index of a GPU, counted from 0, or a list of "
        "distinct indices, or null. Received: -1."
    ),
    "train hardware.gpu=[1,1]": (
        "hardware.gpu must be the index of a GPU, counted from 0, or a list of "
        "distinct indices, or null. Received: [1, 1]."
    ),
    "train hardware.gpu=[]": (
        "hardware.gpu must be the index of a GPU, counted from 0, or a list of "
        "distinct indices, or null. Received: []."
    ),
    "train hardware.gpu=[0,1]": (
        "hardware.gpu must name 1 GPU, one for each replica on this machine. "
        "Received: [0, 1]."
    ),
    "train hardware.gpu=0 hardware.replicas=2": (
        "hardware.gpu must name 2 GPUs, one for each replica on this machine. "
        "Received: 0."
    ),
    "train hardware.gpu=0 hardware.device=cpu": (
        "hardware.gpu selects GPUs, but hardware.device=cpu uses none. Received: 0."
    ),
    "train -m hardware.gpu=0,1": (
        "hardware.gpu must be left out in a sweep, which assigns GPUs to its jobs: "
        "select the sweep's GPUs with CUDA_VISIBLE_DEVICES. Received: 0."
    ),
    "train hardware.memory=0": (
        "hardware.memory must be a size such as 8GiB, or null. Received: 0."
    ),
    "train training.epochs=0": "training.epochs must be at least 1. Received: 0.",
    "train training.epochs=null": (
        "training must set exactly one of epochs, updates, examples. Received: "
        "{epochs: null, updates: null, examples: null}."
    ),
    "train training.epochs=2 training.updates=9": (
        "training must set exactly one of epochs, updates, examples. Received: "
        "{epochs: 2, updates: 9, examples: null}."
    ),
    "train training.evaluate_every=often": (
        "training.evaluate_every must be a positive number of updates, 'epoch', or a "
        "part of it such as 'epoch/4'. Received: 'often'."
    ),
    "train training.evaluate_at_start=1": (
        "training.evaluate_at_start must be true or false. Received: 1."
    ),
    "train dataset.validations=test": (
        "dataset.validations must be null, or a mapping of name → split or node. "
        "Received: 'test'."
    ),
    "train 'dataset.validations={late: 5}'": (
        "dataset.validations.late must be a split of the dataset, as text or as "
        "{split: …, every: …}, or the node of another dataset, with a _target_. "
        "Received: 5."
    ),
    "train 'dataset.validations={late: {split: test, evry: 3}}'": (
        "dataset.validations.late must be a split of the dataset, …"
    ),
    "train 'dataset.validations={late: {split: test, every: 0}}'": (
        "dataset.validations.late.every must be a positive number of updates, 'epoch', "
        "or a part of it such as 'epoch/4'. Received: 0."
    ),
    "train 'dataset.validations={accuracy: test}'": (
        "dataset.validations.accuracy must have another name: a metric of the "
        "validation split already has this one. Received: 'accuracy'."
    ),
    "train 'dataset.validations={examples_seen: test}'": (
        "dataset.validations.examples_seen must have another name: …"
    ),
    "train 'dataset.validations={loss: test}'": (
        "dataset.validations.loss must have another name: …"
    ),
    "train 'dataset.validations={a-b: test}'": (
        "dataset.validations.a-b must have a plain word as its name: letters, digits "
        "and _. Received: 'a-b'."
    ),
    "train 'dataset.validations={late: {_target_: pipeline.dataset.digits, pad: 4}}'": (
        "dataset.validations.late.pad must have the dataset's value, None, or be left "
        "out. Received: 4."
    ),
    "train training.evaluate_every=0": (
        "training.evaluate_every must be a positive number of updates, 'epoch', or a "
        "part of it such as 'epoch/4'. Received: 0."
    ),
    "train training.evaluate_every=epoch/0": (
        "training.evaluate_every must be a positive number of updates, 'epoch', or a "
        "part of it such as 'epoch/4'. Received: 'epoch/0'."
    ),
    "train training.checkpoint_every=0": (
        "training.checkpoint_every must be a positive number of updates, 'epoch', "
        "'auto' or null. Received: 0."
    ),
    "train training.checkpoint_every=5m": (
        "training.checkpoint_every must be a positive number of updates, 'epoch', "
        "'auto' or null. Received: '5m'."
    ),
    "train training.checkpoint_every=true": (
        "training.checkpoint_every must be … Received: true."
    ),
    "train training.updates=99999999999999999999": (
        "training.updates must be at most 2147483647. Received: 99999999999999999999."
    ),
    "train accumulation.factor=4294967296": (
        "accumulation.factor must be at most 2147483647. Received: 4294967296."
    ),
    "train +dataset.shuffle_buffer=2147483648": (
        "dataset.shuffle_buffer must be at most 2147483647. Received: 2147483648."
    ),
    "train dataset.in_memory=most": (
        "dataset.in_memory must be true, false or auto. Received: 'most'."
    ),
    "train dataset.shuffle_files=1": (
        "dataset.shuffle_files must be true or false. Received: 1."
    ),
    "train dataset.checksum=half": (
        "dataset.checksum must be full or none. Received: 'half'."
    ),
    "train dataset.pad={multiple:0,value:0}": (
        "dataset.pad must be null, or a multiple of at least 1 and a value: {multiple: "
        "8, value: 0}. Received: {multiple: 0, value: 0}."
    ),
    "train 'dataset.lengths={length: x.length, parts: x}'": (
        "dataset.lengths must be null, or a length and the parts of an example that "
        "have it: {length: x.length, parts: [x.tokens, y]}, or a list of these. "
        "Received: {length: 'x.length', parts: 'x'}."
    ),
    "train 'dataset.lengths=[{length: {size: 3}, parts: [x]}]'": (
        "dataset.lengths must be null, or a length and the parts of an example that "
        "have it: {length: x.length, parts: [x.tokens, y]}, or a list of these. "
        "Received: [{length: {size: 3}, parts: ['x']}]."
    ),
    "train dataset.pad=8": (
        "dataset.pad must be null, or a multiple of at least 1 and a value: {multiple: "
        "8, value: 0}. Received: 8."
    ),
    "train hardware.profile={start:0,updates:5}": (
        "hardware.profile must be null, or the first update and the number of updates: "
        "{start: 10, "
        "updates: 5}. Received: {start: 0, updates: 5}."
    ),
    "train tracking.show={examples:65}": (
        "tracking.show must be null, or any of {examples: 16, confusion: true, "
        "reliability: true}, with at most 64 examples. Received: {examples: 65}."
    ),
    "train tracking.show={example:1}": (
        "tracking.show must be null, or any of {examples: 16, confusion: true, "
        "reliability: true}, with at most 64 examples. Received: {example: 1}."
    ),
    "train tracking.show=true": (
        "tracking.show must be null, or any of {examples: 16, confusion: true, "
        "reliability: true}, with at most 64 examples. Received: true."
    ),
    "train training.shown=[]": f"training.shown must be {NAMED}. Received: [].",
    "train +training.shown.mine=early": (
        "training.shown.mine._target_ must be the dotted name of the code that builds "
        "the object. "
        "Received: 'early'."
    ),
    "train +training.shown.worst._target_=builtins.dict": (
        "training.shown must have names of up to 60 letters, digits, _, -, . and "
        "blanks, other than examples, fixed, worst, confusion, reliability. Received: "
        "'worst'."
    ),
    "train tracking.log_every=0": "tracking.log_every must be at least 1. Received: 0.",
    f"train seed={'9' * 5000}": (
        "arguments cannot be read by Hydra (…4300 digits…). Received: 'seed=99…9…."
    ),
    f"train -m seed={'9' * 5000},1": (
        "arguments cannot be read by Hydra (…4300 digits…). Received: 'seed=99…9…."
    ),
    "train seed=-1": "seed must be from 0 to 4294967295. Received: -1.",
    "train optimizer.learning_rate=0": (
        "optimizer.learning_rate must be a positive number. Received: 0."
    ),
    "train optimizer.learning_rate=-0.1": (
        "optimizer.learning_rate must be a positive number. Received: -0.1."
    ),
    "train optimizer.learning_rate=fast": (
        "optimizer.learning_rate must be a positive number. Received: 'fast'."
    ),
    "train optimizer.global_clipnorm=-1": (
        "optimizer.global_clipnorm must be a positive number, or null. Received: -1."
    ),
    "train +optimizer.clipvalue=0": (
        "optimizer.clipvalue must be a positive number, or null. Received: 0."
    ),
    "train +optimizer.clipnorm=tight": (
        "optimizer.clipnorm must be a positive number, or null. Received: 'tight'."
    ),
    "train optimizer.beta_1=-1": (
        "optimizer.beta_1 must be at least 0 and below 1. Received: -1."
    ),
    "train optimizer.beta_1=2": (
        "optimizer.beta_1 must be at least 0 and below 1. Received: 2."
    ),
    "train optimizer.beta_1=nan": (
        "optimizer.beta_1 must be at least 0 and below 1. Received: nan."
    ),
    "train optimizer.beta_1=inf": (
        "optimizer.beta_1 must be at least 0 and below 1. Received: inf."
    ),
    "train optimizer.beta_1=fast": (
        "optimizer.beta_1 must be at least 0 and below 1. Received: 'fast'."
    ),
    "train optimizer.beta_2=1": (
        "optimizer.beta_2 must be at least 0 and below 1. Received: 1."
    ),
    "train optimizer=rmsprop optimizer.rho=1.5": (
        "optimizer.rho must be at least 0 and below 1. Received: 1.5."
    ),
    "train optimizer=momentum optimizer.momentum=-0.9": (
        "optimizer.momentum must be at least 0 and below 1. Received: -0.9."
    ),
    "train optimizer.epsilon=-1": (
        "optimizer.epsilon must be a number of at least 0. Received: -1."
    ),
    "train optimizer.weight_decay=inf": (
        "optimizer.weight_decay must be a number of at least 0, or null. Received: inf."
    ),
    "train hardware.replicas=0": "hardware.replicas must be at least 1. Received: 0.",
    "train hardware.workers=0": (
        "hardware.workers must be at least 1, or null to read TF_CONFIG or the "
        "Slurm step. …"
    ),
    "train hardware=multi_worker": (
        "hardware.workers must be a number if neither TF_CONFIG nor a step of a "
        "Slurm job (srun) names the workers. Received: null."
    ),
    "train hardware.workers=200": (
        "accumulation.effective_batch_size must be at least the number of replicas, "
        "200. …"
    ),
    (
        "train hardware.device=cpu hardware.replicas=1000 "
        "accumulation.effective_batch_size=1000"
    ): ("hardware.replicas must be at most … on a CPU. Received: 1000."),
    # what a run begins with, and what is kept of it
    "train start.run=nowhere": (
        "start.run must be one run directory, or the start of the ID of one run whose "
        "directory lies below …. Received: 'nowhere'."
    ),
    "train start.run=1e10": (
        "start.run must be one run directory, or … Received: '1e10'."
    ),
    "train start.run=12345678@9": (
        "start.run must be one run directory, or … Received: '12345678'."
    ),
    "train start.run=used@9": (
        "start.run must be a run with a checkpoint: see training.checkpoint_every. "
        "Received: 'used@9'."
    ),
    "train start.run=[used]": "start.run must be text, or null. Received: ['used'].",
    "train start.weights_only=true": (
        "start.weights_only must come with start.run, which provides the weights. "
        "Received: true."
    ),
    "train training.keep_best.metric=loss": (
        "training.keep_best.metric must be a metric of the validation split, such as "
        "val/loss or val/accuracy. Received: 'loss'."
    ),
    "train training.keep_best.metric=val/loss": (
        "training.keep_best.mode must say whether the smallest or the largest val/loss "
        "is best. Received: null. "
        "Choices: min, max. Did you mean 'min'?"
    ),
    "train training.keep_best.metric=val/late/accuracy": (
        "training.keep_best.mode must say whether the smallest or the largest "
        "val/late/accuracy is best. Received: "
        "null. Choices: min, max. Did you mean 'max'?"
    ),
    "train training.keep_best.metric=val/quality": (
        "training.keep_best.mode must say whether the smallest or the largest "
        "val/quality is best. Received: null. "
        "Choices: min, max."
    ),
    "train training.keep_best.mode=most": (
        "training.keep_best.mode must be one of its choices, or null. Received: "
        "'most'. Choices: min, max."
    ),
    # targets and names
    "train model._target_=7": (
        "model._target_ must be the dotted name of the code that builds the object. "
        "Received: 7."
    ),
    "train +training.callbacks.stop=early": (
        "training.callbacks.stop._target_ must be the dotted name of the code that "
        "builds the object. "
        "Received: 'early'."
    ),
    "train +training.metrics.loss._target_=keras.metrics.MeanSquaredError": (
        "training.metrics.loss must have a name that MLflow accepts … other than …loss… "
        "Received: 'loss'."
    ),
    (
        "train "
        "+training.metrics.gradient_square._target_=keras.metrics.MeanSquaredError"
    ): (
        "training.metrics.gradient_square must have a name … other than "
        "…gradient_square… Received: 'gradient_square'."
    ),
    "train '+training.metrics={a//b: {_target_: keras.metrics.MeanSquaredError}}'": (
        "training.metrics.a//b must have a name that MLflow accepts (…that is empty, . "
        "or ..) other than … Received: 'a//b'."
    ),
    "train '+training.metrics={..: {_target_: keras.metrics.MeanSquaredError}}'": (
        "training.metrics... must have a name that MLflow accepts (…) other than … "
        "Received: '..'."
    ),
    (
        f"train '+training.metrics={{{'a' * 244}: {{_target_: "
        "keras.metrics.MeanSquaredError}}'"
    ): (
        "training.metrics.aa…a._target_ must be a name that MLflow accepts for a param: "
        "… Received: '…."
    ),
    "train '+training.callbacks={a//b: {_target_: keras.callbacks.History}}'": (
        "training.callbacks.a//b._target_ must be a name that MLflow accepts for a "
        "param: … Received: '…'."
    ),
    "train +tracking.tags.stop=now": (
        "tracking.tags.stop must be left out: this tag ends the run that has it. "
        "Received: 'now'."
    ),
    "train tracking.uri=mlruns": (
        "tracking.uri must be an MLflow tracking URI of a known scheme. Received: "
        "'mlruns'. Choices: sqlite, http, https, postgresql, mysql, mssql."
    ),
    "train tracking.uri=sqlite:///:memory:": (
        "tracking.uri must name a file: sqlite:///PATH. Received: 'sqlite:…"
    ),
    "train tracking.uri=ftp://me:secret@host/": (
        "tracking.uri must be … Received: 'ftp://***@host/'. Choices: …"
    ),
    "train tracking.experiment=''": (
        "tracking.experiment must be a name of 1 to 250 characters. Received: ''."
    ),
    # interpolations, and Hydra's own grammar and options
    "train model.dropout=${nope}": (
        "model.dropout must refer to a key that exists. Received: '${nope}'."
    ),
    "train model.dropout=${nope:1}": (
        "model.dropout must use a resolver that exists. Received: '${nope:1}'."
    ),
    "train model.dropout=${oc.env:NOT_THERE}": (
        "model.dropout must have a value (Environment variable 'NOT_THERE' not found). "
        "Received: '${oc.env:NOT_THERE}'."
    ),
    "train training.epochs=${training.updates} training.updates=${training.epochs}": (
        "training.epochs must have a value (Recursive interpolation detected). "
        "Received: '${training.updates}'."
    ),
    "train hydra.run.dir=${nope}": (
        "hydra.run.dir must refer to a key that exists. Received: '${nope}'."
    ),
    "train hydra.run.dir=used": (
        "hydra.run.dir must be a folder without a run in it; …"
    ),
    "train hydra.run.dir=/proc/nope": (
        "hydra.run.dir must be a folder that can be created (…). Received: '/proc/nope'."
    ),
    "train hydra.run.dir=file/x": (
        "hydra.run.dir must be a folder that can be created (Not a directory). Received: "
        "'…file/x'."
    ),
    "train -m hydra.sweep.dir=file/x seed=1,2": (
        "hydra.sweep.dir must be a folder that can be created (Not a directory). "
        "Received: 'file/x'."
    ),
    "train -m hydra.sweep.dir=file seed=1,2": (
        "hydra.sweep.dir must be a folder that can be created (File exists). Received: "
        "'file'."
    ),
    "train seed": "seed must be given as KEY=VALUE. Received: 'seed'.",
    "train =3": (
        "arguments cannot be read by Hydra (Config group override must be …). "
        "Received: '=3'."
    ),
    "train 'dataset.train_split=train[:90%]'": (
        "dataset.train_split must follow Hydra's grammar (…); quote text that has "
        "brackets: 'dataset.train_split=\"train[:90%]\"'. Received: "
        "'dataset.train_split=train[:90%]'."
    ),
    "sweep seeds --again": (
        "arguments of pipeline sweep cannot be read (argument --again: expected one "
        "argument): see pipeline sweep --help."
    ),
    "sweep seeds --cfg job": (
        "--cfg must be left out of a sweep, which has a config for each job: --dry lists "
        "the jobs, and `pipeline train OVERRIDES --cfg job` prints the config of one."
    ),
    "sweep search_learning_rate --dry": (
        "--dry must be left out of a search, whose jobs are chosen by the results of "
        "earlier jobs."
    ),
    "sweep seeds --config-dir nope": (
        "--config-dir must be a folder that exists. Received: 'nope'."
    ),
    "train seed=[1": (
        "seed must follow Hydra's grammar (no viable alternative at input '[1'). "
        "Received: 'seed=[1'."
    ),
    "train seed=1,2": (
        "seed must be one value; --multirun sweeps over several. Received: '1,2'."
    ),
    "train +seed=1": "seed must be named without + to be changed. Received: '+seed=1'.",
    "train --fast": (
        "arguments cannot be read by Hydra (unrecognized arguments: --fast). "
        "Received: '--fast'."
    ),
    "train --cfg everything": (
        "arguments cannot be read by Hydra (argument --cfg/-c: invalid choice: "
        "'everything' (choose from …)). Received: '--cfg everything'."
    ),
    "train -m seed=1,2 --cfg job": (
        "arguments cannot be read by Hydra (Only one of …). Received: 'seed=1,2'."
    ),
    "train --resolve": (
        "arguments cannot be read by Hydra (The --resolve flag can only be used …). "
        "Received: ''."
    ),
    "train --config-dir nowhere": (
        "--config-dir must be a folder that exists. Received: 'nowhere'."
    ),
    "train --config-name nope": (
        "--config-name must be a config that exists in ./conf or in the folder of "
        "--config-dir. Received: 'nope'. Choices: config."
    ),
    "trian": (
        "VERB must be a verb of pipeline. Received: 'trian'. Choices: train, … Did you "
        "mean 'train'?"
    ),
    "ui --port many": "--port must be from 1 to 65535. Received: 'many'.",
    "ui tracking.ur=x": (
        "tracking.ur must be a key of tracking. Received: 'ur'. Choices: uri, … Did "
        "you mean 'uri'?"
    ),
    # what belongs to a store and its records
    "train schema=1": "schema must be 3, the schema version of this program. Received: 1.",
    "train tracking.sweep=nope": (
        "tracking.sweep must be left out of a single run: it is for a multirun. "
        "Received: 'nope'."
    ),
    "train 'trust.allow=[a b]'": (
        "trust.allow must list dotted names, such as mypkg.models, and places, such as "
        "/folder or https://host/path. Received: 'a b'."
    ),
    "train 'model.dropout=${times:ab,3}'": (
        "model.dropout …must be given numbers… Received: '${times:ab,3}'."
    ),
    # a user's own config files
    "train --config-dir mine model=latin": (
        "…/mine/model/latin.yaml cannot be read by Hydra ('utf-8' codec can't decode "
        "byte 0xe9 …)."
    ),
    "train --config-dir mine model=broken": (
        "…/mine/model/broken.yaml:2 must be YAML (expected ',' or ']', but got ':'). "
        "Received: 'hidden: 3'."
    ),
    "train --config-dir mine model=scalar": (
        "…/mine/model/scalar.yaml cannot be read by Hydra (…)."
    ),
    "train --config-dir mine model=empty": (
        "model._target_ must be the dotted name of the code that builds the object. "
        "Received: null."
    ),
    "train --config-dir mine model=orphan": (
        "model must be a config that exists (named in model/orphan). Received: 'nope'."
    ),
    "train --config-dir mine training=typo": (
        "training.epoch must be a key of training (in training/typo). Received: "
        "'epoch'. Choices: epochs, … Did you mean 'epochs'?"
    ),
    "train --config-dir mine training=wrong": (
        "training.epochs must be an integer, or null (in training/wrong). Received: "
        "'many'."
    ),
    # options of Hydra that print configs or sweep over several, where one is read
    "ui --cfg job": f"--cfg {ONE_CONFIG}",
    # It would start the jobs of a sweep.
    "verify -m model=mlp,cnn": f"--multirun {ONE_CONFIG}",
    "report abc --info": f"--info {ONE_CONFIG}",
    "report": (
        "SWEEP or RUN must name a sweep, two sweeps or runs in the store. Received: ''."
    ),
    "report abc --filter tags.a=1": (
        "SWEEP or RUN must be left out with --filter, which selects runs. Received: "
        "['abc']."
    ),
}

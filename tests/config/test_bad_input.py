"""Wrong input: exit status 2, one line with key, rule, value and choices, and nothing is created.

Each row is a command line and the line that it gets; … stands for any text. All rows of a table run in one process
(see refused.py), in a folder that is compared before and after.
"""

from __future__ import annotations

import re
import shutil
import socket
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from pipeline.config.compose import Session
from tests.running import Store, one_process, pipeline, start
from tests.shared import migrated_store, place_store

NAMED = "a mapping of name → _target_, empty for none"
ONE_CONFIG = "must be left out: this reads one config; `pipeline train` prints configs and sweeps over them."
# Refused from the command line and the config alone: neither TensorFlow nor MLflow is imported.
CONFIG = {
    # keys and groups
    "train accumulation.facto=4": "accumulation.facto must be a key of accumulation. Received: 'facto'. "
    "Choices: effective_batch_size, factor, … Did you mean 'factor'?",
    "train experimnt=quick": "experimnt must be a key of the config. Received: 'experimnt'. "
    "Choices: accumulation, dataset, experiment, … Did you mean 'experiment'?",
    "train model.hiden=[8]": "model.hiden must be a key of model; a new one is added with +model.hiden=VALUE. "
    "Received: 'hiden'. "
    "Choices: _target_, filters, kernel_size, hidden, dropout, l2. Did you mean 'hidden'?",
    "train +note=1": "note must be a key of the config. Received: 'note'. Choices: accumulation, dataset, …",
    "train +hardware.devise=gpu": "hardware.devise must be a key of hardware. Received: 'devise'. "
    "Choices: device, … Did you mean 'device'?",
    "train optimizer=adamww": "optimizer must be an option of its group. Received: 'adamww'. "
    "Choices: adam, adamw, lion, momentum, rmsprop, sgd. Did you mean 'adamw'?",
    "train dataset=3": "dataset must be the name of an option of its group. Received: 3. Choices: …digits…tfds…",
    "train hydra/launcher=nope": "hydra/launcher must be an option of its group. Received: 'nope'. Choices: basic…",
    "train model@mine=mlp": "model@mine must be a group of the defaults list. Received: 'model@mine=mlp'.",
    "train ~model": "model must be given.",
    "train ~seed": "seed must be given.",
    "train ~nope": "nope must be in the config to be deleted. Received: '~nope'.",
    "train dataset=tfds": "dataset.name must be given.",
    # removed
    "train scaling=adascale": "scaling=adascale was removed in version 0.2.0: use scaling=linear, scaling=sqrt or "
    "another rule.",
    "train scaling.rule=adascale": "scaling.rule=adascale was removed in version 0.2.0: use scaling=linear, …",
    "train accumulation.schedule=seesaw": "accumulation.batch_schedule=seesaw was removed in version 0.2.0: use a list "
    "of stages, with schedule.clock=examples.",
    "train +accumulation.seesaw_max=512": "accumulation.seesaw_max was removed in version 0.2.0: give each stage of "
    "the effective batch its size.",
    "train accumulation.scale_rate=false": "accumulation.scale_rate was removed in version 0.2.0: the scaling rule "
    "follows the stages; use scaling=none for a rate that does not.",
    "train --config-dir mine scaling=gone": "scaling.rule=adascale was removed in version 0.2.0: use …",
    # types
    "train accumulation.factor=four": "accumulation.factor must be an integer, or null. Received: 'four'.",
    "train training.epochs=1e1": "training.epochs must be an integer, or null. Received: 10.0.",
    "train hardware.replicas=null": "hardware.replicas must be an integer. Received: null.",
    "train hardware.xla=maybe": "hardware.xla must be true, false or auto. Received: 'maybe'.",
    "train hardware.xla=2": "hardware.xla must be true, false or auto. Received: 2.",
    "train hardware.tf32=1": "hardware.tf32 must be true or false. Received: 1.",
    "train tracking.log_model=5": "tracking.log_model must be true or false. Received: 5.",
    "train schedule=exponential schedule.decay_rate=-1": "schedule.decay_rate must be a positive number. Received: -1.",
    "train schedule=exponential schedule.decay_rate=0": "schedule.decay_rate must be a positive number. Received: 0.",
    "train training.added_losses=max": "training.added_losses must be one of its choices. Received: 'max'. "
    "Choices: mean, sum.",
    "train training.loss_over=batch": "training.loss_over must be one of its choices. Received: 'batch'. "
    "Choices: example, effective_batch.",
    "train hardware.device=tpu": "hardware.device must be one of its choices. Received: 'tpu'. "
    "Choices: auto, cpu, gpu.",
    "train hardware.precision=float16": "hardware.precision must be one of its choices. Received: 'float16'. "
    "Choices: float32, float64, mixed_bfloat16, mixed_float16. Did you mean 'float64'?",
    "train hardware.device=gpu": "hardware.device must be a device of this machine, which has no GPU. "
    "Received: 'gpu'. Choices: auto, cpu.",
    "train training.loss=[]": "training.loss must be a mapping.",
    "train 'training.metrics=[{_target_: keras.metrics.AUC}]'": f"training.metrics must be {NAMED}. "
    "Received: '[{_target_: keras.metrics.AUC}]'.",
    "train training.weighted_metrics=accuracy": f"training.weighted_metrics must be {NAMED}. Received: 'accuracy'.",
    "train '+training.metrics.a=[{_target_: keras.metrics.AUC}]'": f"training.metrics.a must be {NAMED}. "
    "Received: [{_target_: 'keras.metrics.AUC'}].",
    "train --config-dir mine objective=listed": f"training.metrics must be {NAMED} (in objective/listed). "
    "Received: ['accuracy'].",
    "train --config-dir mine objective=off": "training.metrics must have text for its keys (in objective/off). "
    "Received: false.",
    "train --config-dir mine training=listed": f"training.weighted_metrics must be {NAMED} (in training/listed). "
    "Received: ['accuracy'].",
    "train training.callbacks=[]": f"training.callbacks must be {NAMED}. Received: '[]'.",
    "train model.hidden={}": "model.hidden must be a list.",
    "train training.loss=mse": "training.loss._target_ must be the dotted name of what builds it. Received: 'mse'.",
    "train training.loss_weights=abc": "training.loss_weights must be null, or a number for each output. "
    "Received: 'abc'.",
    "train 'training.class_weight={a: 1}'": "training.class_weight must be null, or a number of at least 0 for each "
    "class, a whole number. Received: {a: 1}.",
    "train 'training.class_weight={0: -1}'": "training.class_weight must be null, or a number … Received: {0: -1}.",
    "train '+training.weighted_metrics={accuracy: {_target_: keras.metrics.AUC}}'": "training.metrics.accuracy must "
    "have a name … and those of other metrics. Received: 'accuracy'.",
    "train '+training.metrics.a={loss: {_target_: keras.metrics.AUC}}'": "training.metrics.a.loss must have a name … "
    "Received: 'a_loss'.",
    "train seed=${training.loss._target_}": "seed must be an integer. Received: 'keras.losses.…'.",
    # sizes and horizons
    "train accumulation.factor=0": "accumulation.factor must be at least 1. Received: 0.",
    "train accumulation.micro_batch_size=-8": "accumulation.micro_batch_size must be at least 1. Received: -8.",
    "train accumulation.effective_batch_size=0": "accumulation.effective_batch_size must be at least 1. Received: 0.",
    "train accumulation.factor=null": "accumulation must give two of effective_batch_size, factor, "
    "micro_batch_size. Received: {…}.",
    "train accumulation.effective_batch_size=128 accumulation.factor=4 accumulation.micro_batch_size=16": (
        "accumulation.factor must agree with effective batch 128 and micro-batch 16… Received: 4. Choices: 8."
    ),
    "train accumulation.effective_batch_size=64 accumulation.micro_batch_size=65": (
        "accumulation.micro_batch_size must be at most the 64 examples … Received: 65."
    ),
    "train accumulation.micro_batch_size=most": "accumulation.micro_batch_size must be an integer, auto or "
    "auto_fastest, or null. Received: 'most'.",
    "train accumulation.same_noise=maybe": "accumulation.same_noise must be true, false or auto. Received: 'maybe'.",
    "train accumulation.moving_statistics=none": "accumulation.moving_statistics must be one of its choices. "
    "Received: 'none'. Choices: effective, micro.",
    "train accumulation.micro_batch_size=auto accumulation.factor=4": (
        "accumulation.factor must be null with accumulation.micro_batch_size=auto, else the effective batch would "
        "depend on the machine. Received: 4."
    ),
    "train accumulation.micro_batch_size=auto_fastest accumulation.effective_batch_size=null": (
        "accumulation.effective_batch_size must be given with accumulation.micro_batch_size=auto_fastest."
    ),
    "train hardware.memory=much": "hardware.memory must be a size such as 8GiB, or null. Received: 'much'.",
    "verify accumulation.micro_batch_size=auto": "accumulation.micro_batch_size must be a number: what is verified "
    "is that cut, in float64. Received: 'auto'.",
    "train hardware.gpu_memory=half": "hardware.gpu_memory must be a size such as 8GiB, or null. Received: 'half'.",
    "train hardware.jobs_per_gpu=0": "hardware.jobs_per_gpu must be at least 1. Received: 0.",
    "train hardware.gpu=first": "hardware.gpu must be the index of a GPU from 0 on, or a list of different ones, or "
    "null. Received: 'first'.",
    "train hardware.gpu=-1": "hardware.gpu must be the index of a GPU from 0 on, or a list of different ones, or null. "
    "Received: -1.",
    "train hardware.gpu=[1,1]": "hardware.gpu must be the index of a GPU from 0 on, or a list of different ones, or "
    "null. Received: [1, 1].",
    "train hardware.gpu=[]": "hardware.gpu must be the index of a GPU from 0 on, or a list of different ones, or null. "
    "Received: [].",
    "train hardware.gpu=[0,1]": "hardware.gpu must name one GPU for each of the 1 replicas here. Received: [0, 1].",
    "train hardware.gpu=0 hardware.replicas=2": "hardware.gpu must name one GPU for each of the 2 replicas here. "
    "Received: 0.",
    "train hardware.gpu=0 hardware.device=cpu": "hardware.gpu must be null with hardware.device=cpu. Received: 0.",
    "train -m hardware.gpu=0,1": "hardware.gpu must be null in a sweep, which gives each job its GPUs: "
    "CUDA_VISIBLE_DEVICES says which it has. Received: 0.",
    "train hardware.memory=0": "hardware.memory must be a size such as 8GiB, or null. Received: 0.",
    "train training.epochs=0": "training.epochs must be at least 1. Received: 0.",
    "train training.epochs=null": "training must set exactly one of epochs, updates, examples. "
    "Received: {epochs: null, updates: null, examples: null}.",
    "train training.epochs=2 training.updates=9": "training must set exactly one of epochs, updates, examples. "
    "Received: {epochs: 2, updates: 9, examples: null}.",
    "train training.evaluate_every=often": "training.evaluate_every must be a positive number of updates, "
    "'epoch', or a part of it such as 'epoch/4'. Received: 'often'.",
    "train training.evaluate_every=0": "training.evaluate_every must be a positive number of updates, 'epoch', "
    "or a part of it such as 'epoch/4'. Received: 0.",
    "train training.evaluate_every=epoch/0": "training.evaluate_every must be a positive number of updates, 'epoch', "
    "or a part of it such as 'epoch/4'. Received: 'epoch/0'.",
    "train training.checkpoint_every=0": "training.checkpoint_every must be a positive number of updates, 'epoch', "
    "'auto' or null. Received: 0.",
    "train training.checkpoint_every=5m": "training.checkpoint_every must be a positive number of updates, 'epoch', "
    "'auto' or null. Received: '5m'.",
    "train training.checkpoint_every=true": "training.checkpoint_every must be … Received: true.",
    "train training.updates=99999999999999999999": "training.updates must be at most 2147483647. "
    "Received: 99999999999999999999.",
    "train accumulation.factor=4294967296": "accumulation.factor must be at most 2147483647. Received: 4294967296.",
    "train +dataset.shuffle_buffer=2147483648": "dataset.shuffle_buffer must be at most 2147483647. "
    "Received: 2147483648.",
    "train dataset.in_memory=most": "dataset.in_memory must be true, false or auto. Received: 'most'.",
    "train dataset.shuffle_files=1": "dataset.shuffle_files must be true or false. Received: 1.",
    "train dataset.checksum=half": "dataset.checksum must be full or none. Received: 'half'.",
    "train dataset.pad={multiple:0,value:0}": "dataset.pad must be null, or a multiple of at least 1 and a value: "
    "{multiple: 8, value: 0}. Received: {multiple: 0, value: 0}.",
    "train dataset.pad=8": "dataset.pad must be null, or a multiple of at least 1 and a value: "
    "{multiple: 8, value: 0}. Received: 8.",
    "train hardware.profile={start:0,updates:5}": "hardware.profile must be null, or the first update and how many: "
    "{start: 10, updates: 5}. Received: {start: 0, updates: 5}.",
    "train tracking.log_every=0": "tracking.log_every must be at least 1. Received: 0.",
    f"train seed={'9' * 5000}": "arguments must be what Hydra takes (…4300 digits…). Received: 'seed=99…9….",
    f"train -m seed={'9' * 5000},1": "arguments must be what Hydra takes (…4300 digits…). Received: 'seed=99…9….",
    "train seed=-1": "seed must be from 0 to 4294967295. Received: -1.",
    "train optimizer.learning_rate=0": "optimizer.learning_rate must be a positive number. Received: 0.",
    "train optimizer.learning_rate=-0.1": "optimizer.learning_rate must be a positive number. Received: -0.1.",
    "train optimizer.learning_rate=fast": "optimizer.learning_rate must be a positive number. Received: 'fast'.",
    "train optimizer.global_clipnorm=-1": "optimizer.global_clipnorm must be a positive number, or null. Received: -1.",
    "train +optimizer.clipvalue=0": "optimizer.clipvalue must be a positive number, or null. Received: 0.",
    "train +optimizer.clipnorm=tight": "optimizer.clipnorm must be a positive number, or null. Received: 'tight'.",
    "train optimizer.beta_1=-1": "optimizer.beta_1 must be from 0 to below 1. Received: -1.",
    "train optimizer.beta_1=2": "optimizer.beta_1 must be from 0 to below 1. Received: 2.",
    "train optimizer.beta_1=nan": "optimizer.beta_1 must be from 0 to below 1. Received: nan.",
    "train optimizer.beta_1=inf": "optimizer.beta_1 must be from 0 to below 1. Received: inf.",
    "train optimizer.beta_1=fast": "optimizer.beta_1 must be from 0 to below 1. Received: 'fast'.",
    "train optimizer.beta_2=1": "optimizer.beta_2 must be from 0 to below 1. Received: 1.",
    "train optimizer=rmsprop optimizer.rho=1.5": "optimizer.rho must be from 0 to below 1. Received: 1.5.",
    "train optimizer=momentum optimizer.momentum=-0.9": "optimizer.momentum must be from 0 to below 1. Received: -0.9.",
    "train optimizer.epsilon=-1": "optimizer.epsilon must be a number of at least 0. Received: -1.",
    "train optimizer.weight_decay=inf": "optimizer.weight_decay must be a number of at least 0, or null. "
    "Received: inf.",
    "train hardware.replicas=0": "hardware.replicas must be at least 1. Received: 0.",
    "train hardware.workers=0": "hardware.workers must be at least 1, or null for what TF_CONFIG or Slurm says. …",
    "train hardware=multi_worker": "hardware.workers must be a number where neither TF_CONFIG nor a step of a Slurm "
    "job (srun) says which workers there are. Received: null.",
    "train hardware.workers=200": "accumulation.effective_batch_size must be at least the number of replicas, 200. …",
    "train hardware.device=cpu hardware.replicas=1000 accumulation.effective_batch_size=1000": (
        "hardware.replicas must be at most … on a CPU. Received: 1000."
    ),
    # what a run begins with, and what is kept of it
    "train start.run=nowhere": "start.run must be one run directory, or the start of the ID of one run whose directory "
    "lies below this one. Received: 'nowhere'.",
    "train start.run=1e10": "start.run must be one run directory, or … Received: '1e10'.",
    "train start.run=12345678@9": "start.run must be one run directory, or … Received: '12345678'.",
    "train start.run=used@9": "start.run must be a run with a checkpoint: see training.checkpoint_every. "
    "Received: 'used@9'.",
    "train start.run=[used]": "start.run must be text, or null. Received: ['used'].",
    "train start.weights_only=true": "start.weights_only must come with start.run, whose weights are meant. "
    "Received: true.",
    "train training.keep_best.metric=loss": "training.keep_best.metric must be a metric of the validation split, such "
    "as val/loss or val/accuracy. Received: 'loss'.",
    "train training.keep_best.metric=val/loss": "training.keep_best.mode must say which val/loss is best. "
    "Received: null. Choices: min, max.",
    "train training.keep_best.mode=most": "training.keep_best.mode must be one of its choices, or null. "
    "Received: 'most'. Choices: min, max.",
    # targets and names
    "train model._target_=7": "model._target_ must be the dotted name of what builds it. Received: 7.",
    "train +training.callbacks.stop=early": "training.callbacks.stop._target_ must be the dotted name of what builds "
    "it. Received: 'early'.",
    "train +training.metrics.loss._target_=keras.metrics.MeanSquaredError": (
        "training.metrics.loss must have a name that MLflow takes … other than …loss… Received: 'loss'."
    ),
    "train +training.metrics.gradient_square._target_=keras.metrics.MeanSquaredError": (
        "training.metrics.gradient_square must have a name … other than …gradient_square… Received: 'gradient_square'."
    ),
    "train '+training.metrics={a//b: {_target_: keras.metrics.MeanSquaredError}}'": (
        "training.metrics.a//b must have a name that MLflow takes (…without empty or dotted parts) other than … "
        "Received: 'a//b'."
    ),
    "train '+training.metrics={..: {_target_: keras.metrics.MeanSquaredError}}'": (
        "training.metrics... must have a name that MLflow takes (…) other than … Received: '..'."
    ),
    f"train '+training.metrics={{{'a' * 244}: {{_target_: keras.metrics.MeanSquaredError}}}}'": (
        "training.metrics.aa…a._target_ must be a name that MLflow takes for a param: … Received: '…."
    ),
    "train '+training.callbacks={a//b: {_target_: keras.callbacks.History}}'": (
        "training.callbacks.a//b._target_ must be a name that MLflow takes for a param: … Received: '…'."
    ),
    "train tracking.uri=mlruns": "tracking.uri must be an MLflow tracking URI of a known scheme. "
    "Received: 'mlruns'. Choices: sqlite, http, https, postgresql, mysql, mssql.",
    "train tracking.uri=sqlite:///:memory:": "tracking.uri must name a file: sqlite:///PATH. Received: 'sqlite:…",
    "train tracking.uri=ftp://me:secret@host/": "tracking.uri must be … Received: 'ftp://***@host/'. Choices: …",
    "train tracking.experiment=''": "tracking.experiment must be a name of 1 to 250 characters. Received: ''.",
    # interpolations, and Hydra's own grammar and options
    "train model.dropout=${nope}": "model.dropout must refer to a key that exists. Received: '${nope}'.",
    "train model.dropout=${nope:1}": "model.dropout must use a resolver that exists. Received: '${nope:1}'.",
    "train model.dropout=${oc.env:NOT_THERE}": "model.dropout must have a value (Environment variable 'NOT_THERE' "
    "not found). Received: '${oc.env:NOT_THERE}'.",
    "train training.epochs=${training.updates} training.updates=${training.epochs}": (
        "training.epochs must have a value (Recursive interpolation detected). Received: '${training.updates}'."
    ),
    "train hydra.run.dir=${nope}": "hydra.run.dir must refer to a key that exists. Received: '${nope}'.",
    "train hydra.run.dir=used": "hydra.run.dir must be a folder without a run in it. Received: '…/used'.",
    "train hydra.run.dir=/proc/nope": "hydra.run.dir must be a folder that can be made (…). Received: '/proc/nope'.",
    "train hydra.run.dir=file/x": "hydra.run.dir must be a folder that can be made (Not a directory). "
    "Received: '…file/x'.",
    "train -m hydra.sweep.dir=file/x seed=1,2": "hydra.sweep.dir must be a folder that can be made (Not a directory). "
    "Received: 'file/x'.",
    "train -m hydra.sweep.dir=file seed=1,2": "hydra.sweep.dir must be a folder that can be made (File exists). "
    "Received: 'file'.",
    "train seed": "seed must be given as KEY=VALUE. Received: 'seed'.",
    "train =3": "arguments must be what Hydra takes (Config group override must be …). Received: '=3'.",
    "train 'dataset.train_split=train[:90%]'": "dataset.train_split must be of Hydra's grammar (…); text with brackets "
    "has quotes of its own: 'dataset.train_split=\"train[:90%]\"'. Received: 'dataset.train_split=train[:90%]'.",
    "sweep seeds --again": "arguments must be as pipeline sweep --help says (argument --again: expected one argument).",
    "sweep seeds --config-dir nope": "--config-dir must be a folder that exists. Received: 'nope'.",
    "train seed=[1": "seed must be of Hydra's grammar (no viable alternative at input '[1'). Received: 'seed=[1'.",
    "train seed=1,2": "seed must be one value; --multirun sweeps over several. Received: '1,2'.",
    "train +seed=1": "seed must be named without + to be changed. Received: '+seed=1'.",
    "train --fast": "arguments must be what Hydra takes (unrecognized arguments: --fast). Received: '--fast'.",
    "train --cfg everything": "arguments must be what Hydra takes (argument --cfg/-c: invalid choice: "
    "'everything' (choose from …)). Received: '--cfg everything'.",
    "train -m seed=1,2 --cfg job": "arguments must be what Hydra takes (Only one of …). Received: 'seed=1,2'.",
    "train --resolve": "arguments must be what Hydra takes (The --resolve flag can only be used …). Received: ''.",
    "train --config-dir nowhere": "--config-dir must be a folder that exists. Received: 'nowhere'.",
    "train --config-name nope": "--config-name must be a config that exists. Received: 'nope'.",
    "trian": "VERB must be a verb of pipeline. Received: 'trian'. Choices: train, … Did you mean 'train'?",
    "ui --port many": "--port must be from 1 to 65535. Received: 'many'.",
    "ui tracking.ur=x": "tracking.ur must be a key of tracking. Received: 'ur'. Choices: uri, … Did you mean 'uri'?",
    # what belongs to a store and its records
    "train schema=1": "schema must be 3, the one of this program. Received: 1.",
    "train tracking.sweep=nope": "tracking.sweep must be left out of a single run: it is of a multirun. "
    "Received: 'nope'.",
    "train 'trust.allow=[a b]'": "trust.allow must list dotted names, such as mypkg.models, and places, such as "
    "/folder or https://host/path. Received: 'a b'.",
    "train 'model.dropout=${times:ab,3}'": "model.dropout …must be given numbers… Received: '${times:ab,3}'.",
    # a user's own config files
    "train --config-dir mine model=latin": "…/mine/model/latin.yaml must be what Hydra takes "
    "('utf-8' codec can't decode byte 0xe9 …).",
    "train --config-dir mine model=broken": "…/mine/model/broken.yaml:2 must be YAML (expected ',' or ']', but got "
    "':'). Received: 'hidden: 3'.",
    "train --config-dir mine model=scalar": "…/mine/model/scalar.yaml must be what Hydra takes (…).",
    "train --config-dir mine model=empty": "model._target_ must be the dotted name of what builds it. Received: null.",
    "train --config-dir mine model=orphan": "model must be a config that exists (in model/orphan). Received: 'nope'.",
    "train --config-dir mine training=typo": "training.epoch must be a key of training (in training/typo). "
    "Received: 'epoch'. Choices: epochs, … Did you mean 'epochs'?",
    "train --config-dir mine training=wrong": "training.epochs must be an integer, or null (in training/wrong). "
    "Received: 'many'.",
    # options of Hydra that print configs or sweep over several, where one is read
    "ui --cfg job": f"--cfg {ONE_CONFIG}",
    "verify -m model=mlp,cnn": f"--multirun {ONE_CONFIG}",  # it would start the jobs of a sweep
    "report abc --info": f"--info {ONE_CONFIG}",
}

NOT_PREPARED = "dataset=tfds dataset.name=mnist dataset.data_dir={elsewhere}"
NO_LOGITS = "~training.loss.from_logits"
ONE_HOT = "dataset._target_=mine.one_hot +model.classes=3 training.loss._target_=keras.losses.CategoricalCrossentropy"
SCHEDULER = "'+training.callbacks.rate={_target_: keras.callbacks.LearningRateScheduler, schedule: 1}'"
MLP = "model=mlp"  # builds in no time
TWO = "--config-dir mine model=two objective=two dataset._target_=mine.of_two"

# Refused by what TensorFlow, TFDS, Keras or MLflow say of it, one of each kind: no run has been created by then.
PREPARED = {
    "train -m hardware.device=cpu,gpu": "hardware.device must be a device of this machine, which has no GPU. "
    "Received: 'gpu'. Choices: auto, cpu.",
    "train accumulation.effective_batch_size=1438": "accumulation.effective_batch_size must be at most the 1437 "
    "examples of the training split. Received: 1438.",
    "train dataset=tfds dataset.name=mnits": "dataset.name must be a TFDS dataset (…). Received: 'mnits'.",
    f"train {NOT_PREPARED} dataset.download=false": "dataset.data_dir must hold mnist/…, prepared; "
    "dataset.download=true … Received: '…'.",
    f"train {NOT_PREPARED}": "dataset could not be downloaded and prepared in … (…). Received: 'mnist/…'.",
    "train dataset._target_=mine.not_a_dataset": "dataset._target_ must give (train, validation[, test]) "
    "as tf.data.Datasets, or a pipeline.dataset.Data. Received: 'int'.",
    "train 'dataset.augment={_target_: mine.one_argument, _partial_: true}'": "dataset.augment must give examples "
    "(TypeError: one_argument() takes 1 positional argument but 2 were given). Received: 'mine.one_argument'.",
    "train dataset._target_=mine.unreadable": "dataset must give examples (the data cannot be read: example 3 of the "
    "train split, counted from 0: …). "
    "Received: 'mine.unreadable'.",
    "train experiment=text training.loss.reduction=sum_over_batch_size": "training.loss.reduction must be "
    "mean_with_sample_weight or sum where dataset.pad pads the labels and the model has no mask: this one divides by "
    "the padding as well. Received: 'sum_over_batch_size'.",
    "train model._target_=mine.recurrent accumulation.same_noise=true": "accumulation.same_noise must be auto, which "
    "names them, or false: some layers can only draw for each micro-batch. Received: 'lstm'.",
    "train experiment=quick training.loss._target_=keras.losses.Circle ~training.loss.from_logits": "training.loss_over"
    " must be effective_batch: circle is a loss of several examples at once. Received: 'example'.",
    "train model=mlp model.dropout=0.1 training.loss_over=effective_batch": "accumulation.same_noise must be True, "
    "and layers must be able to draw for each example, as both passes need the same noise where loss_over is "
    "effective_batch. Received: …",
    "train model._target_=mine.not_a_modle": "model._target_ must name something that exists (…). "
    "Received: 'mine.not_a_modle'. Did you mean 'mine.not_a_model'?",
    f"train {MLP} +model.clases=3": "model.clases must be an argument of pipeline.components.model.mlp. Received: "
    "'clases'. "
    "Choices: input_shape, classes, hidden, dropout, l2. Did you mean 'classes'?",
    f"train {MLP} model.dropout=1": "model must be what pipeline.components.model.mlp takes (ValueError: dropout "
    "must be from 0 "
    "to below 1. Received: 1). Received: …",
    "train model._target_=mine.one_argument": "model.filters must be an argument of mine.one_argument; a model of your "
    "own stands whole in a file, conf/model/NAME.yaml, and is taken with --config-dir conf model=NAME. "
    "Received: 'filters'. Choices: x.",
    "train dataset=tfds dataset.name=null": "dataset must give one of name and builder. Received: {…}.",
    f"train {MLP} model._target_=mine.not_a_model": "model._target_ must give a keras.Model. Received: 'int'.",
    f"train {MLP} +optimizer.nope=4": "optimizer must be what keras.optimizers.AdamW takes (ValueError: Argument(s) "
    "not recognized: {'nope': 4}). Received: {…, nope: 4}.",
    f"train {MLP} +optimizer.gradient_accumulation_steps=4": "optimizer.gradient_accumulation_steps must be left out: "
    "the pipeline accumulates; set accumulation.factor. Received: 4.",
    f"train {MLP} schedule.warmup_steps=150%": "schedule.warmup_steps must be from 0% to 100%. Received: '150%'.",
    f"train {MLP} schedule=piecewise schedule.boundaries=[90%,10%]": "schedule.boundaries must rise. "
    "Received: ['90%', '10%'].",
    f"train {MLP} training.loss._target_=keras.losses.MeanSquaredError": "training.loss.from_logits must be an "
    "argument of keras.losses.MeanSquaredError; an objective of your own stands whole in a file, "
    "conf/objective/NAME.yaml, and is taken with … Received: 'from_logits'. Choices: reduction, name, dtype.",
    f"train {MLP} +model.classes=9": "training.loss must fit … outputs (32, 9) float32 (label 9 is outside of the 9 "
    "outputs). Received: 'sparse_categorical_crossentropy'.",
    f"train {MLP} training.loss.from_logits=false": "training.loss must fit … (the outputs are no probabilities; for "
    "logits, set from_logits=true). Received: 'sparse_categorical_crossentropy'.",
    f"train {MLP} +training.loss.reduction=none": "training.loss.reduction must be a mean or a sum. Received: 'none'.",
    f"train {TWO} '+training.loss.c=null'": "training.loss must fit labels … (must be named as an output, one of a, "
    "b. Received: c). Received: …",
    f"train {TWO} 'training.class_weight={{0: 1}}'": "training.class_weight must be null where an example is not (x, "
    "y) with labels of one output, and of one length. Received: …",
    f"train {MLP} dataset._target_=mine.batched +model.classes=3": "dataset._target_ must give single examples in its "
    "train split, not batches: leave `batch` out. Received: …",
    f"train {MLP} training.loss._target_=keras.losses.sparse_categorical_crossentropy {NO_LOGITS}": (
        "training.loss.y_true must be given: keras.losses.sparse_categorical_crossentropy has no default for it; where "
        "the function itself is meant, training.loss._partial_ is true."
    ),
    f"train {MLP} dataset._target_=mine.unlabelled +model.classes=3": "training.loss must be null: the dataset has no "
    "labels.",
    f"train {MLP} training.loss=null": "training.loss must be given for a model that adds no loss by itself. Received: "
    "'mlp'.",
    f"train {MLP} training.loss._target_=mine.flat_loss {NO_LOGITS} +training.loss._partial_=true": (
        "training.loss must depend on the model's outputs: no gradient reaches any. Received: …"
    ),
    f"train {MLP} '+training.callbacks.stop={{_target_: keras.callbacks.EarlyStopping, patienc: 3}}'": (
        "training.callbacks.stop.patienc must be an argument of keras.callbacks.EarlyStopping. Received: 'patienc'. "
        "Choices: monitor, min_delta, patience, … Did you mean 'patience'?"
    ),
    f"train {MLP} {SCHEDULER}": "training.callbacks.rate must be able to do its work (it sets the learning rate, which "
    "only schedule=constant allows). Received: 'LearningRateScheduler'.",
    f"train {MLP} '+training.callbacks.own={{_target_: mine.keeping}}'": "training.callbacks.own must be able to do "
    "its work (TypeError: the state of own/seen must be JSON values and NumPy arrays. Received: set). Received: …",
    f"train {MLP} '+training.callbacks.backup={{_target_: keras.callbacks.BackupAndRestore, backup_dir: there}}'": (
        "training.callbacks.backup._target_ must be left out: training.checkpoint_every is for that, and pipeline "
        "resume goes on from there. Received: 'BackupAndRestore'."
    ),
    "ui --port {open}": "--port must be a port that is free: choose another with --port (…). Received: {open}.",
    f"train {MLP} tracking.uri=sqlite:///other.db": "tracking.uri must be a store that answers (…/other.db is a "
    "database of something other than MLflow). Received: 'sqlite:///other.db'.",
    f"train {MLP} tracking.uri=http://127.0.0.1:{{closed}}": "tracking.uri must be a store that answers "
    "(127.0.0.1:{closed}: Connection refused). Received: 'http://127.0.0.1:{closed}'.",
}
# Other values of what is refused above, and stores, each of which another process opens.
PREPARED_TOO = {
    "train 'dataset.augment={_target_: mine.cropped, _partial_: true}'": "dataset.augment must keep the shape and "
    "dtype of an input, … Received: '…(None, 4, 8, 1)…'.",
    "train 'dataset.augment={_target_: mine.counted, _partial_: true}'": "dataset.augment must keep the shape and "
    "dtype of an input, … Received: '…tf.int32…'.",
    "train experiment=text dataset.pad.value=102": "dataset must give examples (the data cannot be read: "
    "dataset.pad.value must not be a value of the inputs, which a mask could not tell from it: 102). Received: "
    "'pipeline.dataset.topics'.",
    "train experiment=text model.width=66": "model must be what pipeline.components.model.decoder takes (ValueError: "
    "width must "
    "be a multiple of heads, 4. Received: 66). Received: …",
    "train model=tabular": "model must be what pipeline.components.model.tabular takes (ValueError: input_shape must "
    "be "
    "(measurements,). Received: (8, 8, 1)). Received: …",
    "train model=resnet50 model.name=save": "model must be what pipeline.components.model.application takes "
    "(ValueError: name "
    "must be a model of keras.applications. Received: save). Received: …",
    "train model._target_=not_there.model": "model._target_ must name something that exists (ModuleNotFoundError: "
    "No module named 'not_there'). Received: 'not_there.model'.",
    f"train {MLP} training.loss._target_=keras.losses.Huberr": "training.loss._target_ must name something that exists "
    "(…). Received: 'keras.losses.Huberr'. Did you mean 'keras.losses.Huber'?",
    f"train {MLP} training.loss._target_=math.pi": "training.loss._target_ must name something that can be called. "
    "Received: 'math.pi'.",
    f"train {MLP} model.dropout=2": "model must be what pipeline.components.model.mlp takes (ValueError: …). "
    "Received: {hidden: [128, 128], dropout: 2, l2: 0.0}.",
    f"train {MLP} model.hidden=[true]": "model must be what pipeline.components.model.mlp takes (ValueError: hidden: "
    "each size "
    "must be a whole number of at least 1. Received: [True]). Received: …",
    "train model.kernel_size=0": "model must be what pipeline.components.model.cnn takes (ValueError: kernel_size: "
    "each size must "
    "be a whole number of at least 1. Received: [0]). Received: …",
    f"train {MLP} model.l2=-1": "model must be what pipeline.components.model.mlp takes (ValueError: l2 must be a "
    "number of at "
    "least 0. Received: -1). Received: …",
    "train dataset=tfds dataset.name=null +dataset.builder=mine.Vector": "dataset.builder must be a "
    "tfds.core.DatasetBuilder. Received: 'mine.Vector'.",
    f"train {MLP} optimizer.epsilon=null": "optimizer.epsilon must be a number of at least 0. Received: null.",
    f"train {MLP} +optimizer.loss_scale_factor=much": "optimizer must be able to apply a gradient (…). "
    "Received: 'AdamW'.",
    f"train {MLP} schedule.warmup_steps=x%": "schedule.warmup_steps must be a share of the horizon such as 5%. "
    "Received: 'x%'.",
    f"train {MLP} schedule.warmup_steps=-1": "schedule.warmup_steps must be a whole number of updates from 0 to the "
    "horizon's 120. Received: -1.",
    f"train {MLP} schedule.warmup_steps=0.1": "schedule.warmup_steps must be a whole number … Received: 0.1.",
    f"train {MLP} schedule.warmup_steps=1e20": "schedule.warmup_steps must be a whole number … Received: 1e+20.",
    f"train {MLP} schedule.warmup_steps=121": "schedule.warmup_steps must be a whole number … Received: 121.",
    f"train {MLP} schedule.decay_steps=0": "schedule.decay_steps must be a whole number of updates from 1 on. "
    "Received: 0.",
    f"train {MLP} scaling=linear scaling.warmup=121": "scaling.warmup must be a whole number of updates from 0 to the "
    "horizon's 120. Received: 121.",
    f"train {MLP} schedule.decay_steps=long": "schedule must be what keras.optimizers.schedules.CosineDecay takes (…). "
    "Received: {…decay_steps: 'long'…}.",
    f"train {MLP} training.loss._target_=keras.losses.MeanSquaredError {NO_LOGITS}": "training.loss must fit labels "
    "(32,) int64 and outputs (32, 10) float32 (the shapes differ). Received: 'mean_squared_error'.",
    f"train {MLP} training.loss._target_=keras.losses.CategoricalCrossentropy": "training.loss must fit labels (32,) "
    "int64 and outputs (32, 10) float32 (the shapes differ). Received: 'categorical_crossentropy'.",
    f"train {TWO} '~training.loss.b'": "training.loss must fit … (must name every output, with null for one without a "
    "loss. Missing: b). Received: …",
    f"train {TWO} 'training.loss_weights={{c: 1}}'": "training.loss_weights must fit the outputs (must be named as an "
    "output, one of a, b. Received: c). Received: {c: 1.0}.",
    f"train {TWO} '+training.metrics={{c: {{m: {{_target_: keras.metrics.AUC}}}}}}'": "training.metrics.c.m must fit … "
    "(must be of an output, one of a, b. Received: c). Received: 'AUC'.",
    f"train {MLP} 'training.class_weight={{10: 2}}'": "training.class_weight must name classes from 0 to 9. "
    "Received: 10.",
    f"train {MLP} dataset._target_=mine.weighted +model.classes=3": "training.loss must fit … (sample "
    "weights of shape (32, 3) do not fit values of shape (32,)). Received: …",
    f"train {MLP} dataset._target_=mine.negative +model.classes=3": "training.loss must fit … (label -1 is "
    "outside of the 3 outputs). Received: …",
    f"train {MLP} model._target_=mine.bare": "model.hidden must be an argument of mine.bare; a model of your own "
    "stands whole in a file, conf/model/NAME.yaml, … Received: 'hidden'. Choices: none.",
    f"train {MLP} training.loss._target_=mine.scalar_loss {NO_LOGITS} +training.loss._partial_=true": (
        "training.loss must fit … (The loss must give one value per example, not a scalar…). Received: …"
    ),
    f"train {MLP} training.loss._target_=mine.branching_loss {NO_LOGITS} +training.loss._partial_=true": (
        "training.loss must fit … (it branches in Python by the value of a tensor: use keras.ops.where …). Received: …"
    ),
    f"train {MLP} +training.metrics.m._target_=mine.Branching": "training.metrics.m must fit … (it branches in Python "
    "by the value of a tensor: use keras.ops.where …). Received: 'Branching'.",
    f"train {MLP} training.metrics.accuracy._target_=keras.metrics.CategoricalAccuracy": "training.metrics.accuracy "
    "must fit labels (32,) int64 and outputs (32, 10) float32 (the shapes differ). Received: 'CategoricalAccuracy'.",
    f"train {MLP} +training.loss.ignore_class=3 +model.classes=9": "training.loss must fit … (label 9 is outside of "
    "the 9 outputs). Received: …",
    f"train {MLP} training.metrics.accuracy._target_=mine.Vector {ONE_HOT}": (
        "training.metrics.accuracy must fit … (its result is not one number). Received: 'F1Score'."
    ),
    f"train {MLP} training.metrics.accuracy._target_=keras.losses.Huber": "training.metrics.accuracy._target_ must "
    "give a keras.metrics.Metric. Received: 'Huber'.",
    f"train {MLP} training.loss.from_logits=abc": "training.loss.from_logits must be true or false. Received: 'abc'.",
    f"train {MLP} model._target_=mine.flagged +model.norm=1": "model.norm must be true or false. Received: 1.",
    f"train {MLP} '+training.callbacks.stop={{_target_: keras.callbacks.EarlyStopping, monitor: nope}}'": (
        "training.callbacks.stop must be able to do its work (EarlyStopping callback received monitor=nope, but …). "
        "Received: 'EarlyStopping'."
    ),
    f"train {MLP} schedule=constant {SCHEDULER}": "training.callbacks.rate must be able to do its work (TypeError: "
    "'int' object is not callable). Received: 'LearningRateScheduler'.",
    f"train {MLP} +training.callbacks.stop._target_=keras.losses.Huber": "training.callbacks.stop._target_ must give "
    "a keras.callbacks.Callback. Received: 'Huber'.",
    f"train {MLP} tracking.uri=sqlite:///file/mlflow.db": "tracking.uri must be a store that answers (…/file is not "
    "a folder that can be written). Received: 'sqlite:///file/mlflow.db'.",
    f"train {MLP} tracking.uri=sqlite:////proc/nope/mlflow.db": "tracking.uri must be a store that answers (/proc is "
    "not a folder that can be written…). Received: 'sqlite:////proc/nope/mlflow.db'.",
    f"train {MLP} tracking.uri=sqlite:///mine": "tracking.uri must be a store that answers (…/mine: unable to open "
    "database file). Received: 'sqlite:///mine'.",
    f"train {MLP} tracking.uri=sqlite:///file": "tracking.uri must be a store that answers (…/file: file is not a "
    "database). Received: 'sqlite:///file'.",
    f"train {MLP} tracking.uri=http://me:secret@127.0.0.1:{{open}}": "tracking.uri must be a store that answers (…). "
    "Received: 'http://***@127.0.0.1:{open}'.",
    f"train {MLP} tracking.uri=sqlite:///store.db tracking.experiment=old": "tracking.experiment is deleted; restore "
    "it or choose another name. Received: 'old'.",
}

USER_MODULE = """
def not_a_dataset(data_dir):
    return 3

def not_a_model(**anything):
    return 3

def recurrent(input_shape, **anything):
    import keras
    layers = [keras.layers.Reshape((8, 8)), keras.layers.LSTM(2, dropout=0.5, name="lstm"), keras.layers.Dense(10)]
    return keras.Sequential([keras.Input(input_shape), *layers])

def flagged(norm: "bool" = None, hidden=(), dropout=0, l2=0):
    return 3

def one_argument(x):
    return x

def keeping():
    import keras
    class Keeping(keras.callbacks.Callback):
        get_state, set_state = (lambda self: {"seen": {1}}), None
    return Keeping()

def cropped(x, seed):
    return x[:4]

def counted(x, seed):
    import tensorflow as tf
    return tf.cast(x, tf.int32)

def unreadable(data_dir):
    import tensorflow as tf
    examples = tf.data.Dataset.range(200).map(lambda n: (tf.cast(n, tf.float32), n))
    return examples.map(lambda x, y: (tf.debugging.check_numerics(x / (x - 3), "a hole"), y)), None

def sliced(*parts):
    import tensorflow as tf
    return tf.data.Dataset.from_tensor_slices(parts if len(parts) > 1 else parts[0]), None

def weighted(data_dir):
    import numpy as np
    return sliced(np.ones((200, 4)), np.zeros(200, int), np.ones((200, 3)))

def negative(data_dir):
    import numpy as np
    return sliced(np.ones((200, 4)), np.arange(200) % 3 - 1)

def bare():
    return 3

def batched(data_dir):
    import numpy as np
    return sliced(np.ones((200, 4)), np.zeros(200, int))[0].batch(32), None

def unlabelled(data_dir):
    import numpy as np
    return sliced(np.ones((200, 4)))

def of_two(data_dir):
    import numpy as np
    return sliced(np.ones((200, 4)), {"a": np.ones(200), "b": np.ones(200)})

def two(input_shape):
    import keras
    inputs = keras.Input(input_shape)
    return keras.Model(inputs, {name: keras.layers.Dense(1, name=name)(inputs) for name in "ab"})

def one_hot(data_dir):
    import tensorflow as tf
    examples = tf.data.Dataset.range(200).map(lambda n: (tf.ones(4), tf.one_hot(n % 3, 3)))
    return examples, None

class Vector:
    def __new__(cls, name):
        import keras
        return keras.metrics.F1Score(name=name)

def scalar_loss(y, outputs):
    import keras
    return keras.ops.mean(outputs)

def branching_loss(y, outputs):
    import keras
    values = keras.losses.sparse_categorical_crossentropy(y, outputs, from_logits=True)
    return values if keras.ops.mean(values) > 0 else 2 * values

class Branching:
    def __new__(cls, name):
        import keras
        class Metric(keras.metrics.Mean):
            def update_state(self, y, outputs, sample_weight=None):
                if keras.ops.mean(outputs) > 0:
                    super().update_state(outputs)
        made = Metric(name=name)
        type(made).__name__ = "Branching"
        return made

def flat_loss(y, outputs):
    import keras
    return keras.ops.cast(keras.ops.argmax(outputs, -1), "float32")
"""

USER_CONFIGS = {
    "model/latin.yaml": b"# caf\xc3\xa9\n_target_: mine.model\nname: caf\xe9\n",
    "model/broken.yaml": b"filters: [1\nhidden: 3\n",
    "model/scalar.yaml": b"3\n",
    "model/empty.yaml": b"",
    "model/orphan.yaml": b"defaults: [nope]\n",
    "model/two.yaml": b"_target_: mine.two\n",
    "objective/two.yaml": b"# @package training\nloss:\n  a: {_target_: keras.losses.Huber}\n"
    b"  b: {_target_: keras.losses.Huber}\nloss_weights: null\nmetrics: {}\n",
    "objective/listed.yaml": b"# @package training\nloss: {_target_: keras.losses.Huber}\nmetrics: [accuracy]\n",
    "objective/off.yaml": b"# @package training\nloss: {_target_: keras.losses.Huber}\n"
    b"metrics: {off: {_target_: keras.metrics.AUC}}\n",
    "scaling/gone.yaml": b"rule: adascale\nreference_batch_size: 16\n",
    "training/listed.yaml": b"epochs: 1\nweighted_metrics: [accuracy]\n",
    "training/typo.yaml": b"epoch: 3\n",
    "training/wrong.yaml": b"epochs: many\n",
}


class NotMLflow(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_error(404)

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Somebody's working folder, with things in it that are not what they should be."""
    folder = tmp_path_factory.mktemp("bad input")
    (folder / "outputs").mkdir()  # somebody's own, and empty: it stays
    (folder / "file").write_text("text, and no database")
    (folder / "used").mkdir()
    (folder / "used" / "journal.jsonl").write_text('{"start":{}}\n')
    (folder / "mine.py").write_text(USER_MODULE)
    for name, content in USER_CONFIGS.items():
        (folder / "mine" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "mine" / name).write_bytes(content)
    with sqlite3.connect(folder / "other.db") as connection:
        connection.execute("CREATE TABLE songs (name TEXT)")
    connection.close()
    return folder


def pattern(expected: str) -> str:
    return ".*".join(re.escape(part) for part in f"pipeline: {expected}\n".split("…"))


def check(said: dict[str, dict], expected: dict[str, str]) -> None:
    differences = []
    for line, message in expected.items():
        answer = said[line]
        right = (
            answer["status"] == 2 and answer["out"] == "" and answer["changed"] == []
        )
        if not (right and re.fullmatch(pattern(message), answer["err"])):
            differences.append(f"$ pipeline {line}\n  wanted: {message}\n  {answer}")
    assert not differences, "\n" + "\n".join(differences)


def some(lines: dict[str, str], step: int) -> dict[str, str]:
    """Return the second line and each `step`th after it, where 4 or 8 leave out those that prepare a dataset."""
    return dict(list(lines.items())[1::step])


@pytest.mark.parametrize(
    "lines",
    [some(CONFIG, 4), pytest.param(CONFIG, marks=pytest.mark.soak)],
    ids=["every fourth", "all"],
)
def test_a_wrong_config_is_refused_without_tensorflow_and_mlflow(folder, lines):
    said = one_process(dict(zip(lines, lines, strict=True)), folder, warm=False)
    check(said, lines)
    assert [line for line in lines if said[line]["loaded"]] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "lines",
    [
        PREPARED,
        pytest.param(PREPARED_TOO, marks=pytest.mark.soak),
    ],
    ids=["one of each kind", "more"],
)
def test_what_only_tensorflow_or_the_store_can_refuse_creates_nothing_either(
    folder, tmp_path, lines
):
    from mlflow.tracking import MlflowClient

    shutil.copyfile(migrated_store(), folder / "store.db")
    client = MlflowClient(f"sqlite:///{folder}/store.db")
    if client.get_experiment_by_name("old") is None:
        client.delete_experiment(
            client.create_experiment("old", (folder / "artifacts").as_uri())
        )
    server = ThreadingHTTPServer(("127.0.0.1", 0), NotMLflow)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with server, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and not listening: whoever connects is refused
        ports = {
            "closed": closed.getsockname()[1],
            "open": server.server_port,
            "elsewhere": tmp_path / "elsewhere",
        }

        def filled(text: str) -> str:
            for name, value in ports.items():
                text = text.replace(f"{{{name}}}", str(value))
            return text

        expected = {filled(line): filled(message) for line, message in lines.items()}
        said = one_process(
            dict(zip(expected, expected, strict=True)),
            folder,
            CUDA_VISIBLE_DEVICES="-1",
            HTTPS_PROXY=f"http://127.0.0.1:{ports['closed']}",
        )
        server.shutdown()
    check(said, expected)
    assert (
        client.search_runs(
            [experiment.experiment_id for experiment in client.search_experiments()]
        )
        == []
    )


def test_the_whole_traceback_comes_before_the_line_where_it_is_asked_for(folder):
    line = "training.epochs must be an integer, or null. Received: 'many'."
    short = pipeline(
        "train", "training.epochs=many", cwd=folder, status=2, HYDRA_FULL_ERROR="0"
    )
    full = pipeline(
        "train", "training.epochs=many", cwd=folder, status=2, HYDRA_FULL_ERROR="1"
    )
    assert short.stderr == f"pipeline: {line}\n"
    assert full.stderr.startswith("Traceback (most recent call last):")
    assert "omegaconf.errors.ValidationError" in full.stderr
    assert full.stderr.endswith(f"\npipeline: {line}\n")


@pytest.mark.parametrize(
    ("raised", "line"),
    [
        ("UnicodeError('late')", "UnicodeError: late"),
        ("SystemExit(0)", "RunError: code of the run has called exit(0)"),
    ],
)
@pytest.mark.slow
def test_an_error_of_the_users_own_code_while_running_is_no_config_error(
    tmp_path, raised, line
):
    (tmp_path / "late.py").write_text(
        "import keras\n"
        "class Late(keras.callbacks.Callback):\n"
        "    def on_train_batch_end(self, batch, logs=None):\n"
        f"        raise {raised}\n"
    )
    done = pipeline(
        *(
            "train",
            "model=mlp",
            "training.updates=2",
            "tracking.log_model=false",
            "tracking.system_metrics=false",
        ),
        "+training.callbacks.late._target_=late.Late",
        cwd=tmp_path,
        status=1,
    )
    last, file = re.fullmatch(
        r"pipeline: (.*) \(traceback in (.+)\)", done.stderr.splitlines()[-1]
    ).groups()
    assert last == line
    assert Store(tmp_path).run().info.status == "FAILED"
    assert "Traceback" not in done.stderr
    assert Path(file).parent == next((tmp_path / "outputs").glob("*/*"))
    assert "on_train_batch_end" in Path(file).read_text()


def test_two_runs_that_are_refused_at_once_remove_the_folders_of_both(tmp_path):
    """As two workers do that begin in one second, with the default run directory."""
    inner, outer = made = [
        tmp_path / "2026-11-26" / "10-00-00",
        tmp_path / "2026-11-26",
    ]

    def refuse(_):
        for _ in range(300):
            with suppress(OSError):  # another one removes them meanwhile
                inner.mkdir(parents=True, exist_ok=True)
            Session(made=made).remove_empty_folders()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(refuse, range(4)))
    assert not outer.exists()


@pytest.mark.slow
def test_of_two_runs_at_once_in_one_folder_the_second_is_refused(tmp_path):
    line = (
        "train",
        "model=mlp",
        "training.updates=2",
        "tracking.log_model=false",
        "tracking.system_metrics=false",
    )
    place_store(tmp_path)  # so that both are ready at nearly the same moment
    both = [start(*line, "hydra.run.dir=same", cwd=tmp_path) for _ in range(2)]
    answers = sorted((run.wait(timeout=300), run.stderr.read()) for run in both)
    assert [status for status, _ in answers] == [0, 2]
    assert answers[1][1] == (
        f"pipeline: hydra.run.dir must be a folder without a run in it. Received: '{tmp_path / 'same'}'.\n"
    )
    assert [run.info.status for run in Store(tmp_path).runs()] == ["FINISHED"]

# An image with the locked environment; what runs in it is `pipeline`.
#
#   docker build -t pipeline .
#   docker build -t pipeline --build-arg LOCK=requirements-gpu.lock .      # with TensorFlow's CUDA libraries
#   docker run --rm -v "$PWD/mlruns:/pipeline/mlruns" pipeline train
#   docker run --rm --gpus all pipeline train hardware.device=gpu          # the host needs NVIDIA's container toolkit
FROM python:3.11-slim

WORKDIR /pipeline
COPY . .
ARG LOCK=requirements.lock
RUN python3 -m venv --without-pip .venv
RUN python3 -m pip --python .venv/bin/python install --quiet --disable-pip-version-check --require-hashes -r $LOCK
RUN .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
RUN cat $(ls requirements.lock $LOCK | sort -u) > .venv/$LOCK.installed

ENTRYPOINT [".venv/bin/pipeline"]

"""The URIs of models in MLflow's registry, such as `models:/NAME@ALIAS`."""

import re

_NAME = r"[A-Za-z0-9_][\w.-]{0,99}"
MODEL_NAME = re.compile(_NAME, re.ASCII)
# Matches models:/NAME@ALIAS and models:/NAME/VERSION.
MODEL = re.compile(
    rf"models:/(?P<name>{_NAME})(@(?P<alias>\w[\w.-]*)|/(?P<version>\d{{1,9}}))",
    re.ASCII,
)

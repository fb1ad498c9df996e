"""A secret in an override of a sweep: it reaches the jobs whole, or is rejected."""

from __future__ import annotations

import os

import pytest

from pipeline.common.errors import ConfigError
from pipeline.launch import hydra_job

KEY = "tracking.uri"


def moved(override):
    """Return the override as Hydra writes it to files, and the value in its place."""
    parsed = hydra_job.OverridesParser.create().parse_overrides([override])
    (text,) = hydra_job._by_environment(parsed)
    name = text.partition("${oc.env:")[2].rstrip("}")
    return text, os.environ[name]


@pytest.fixture(autouse=True)
def password(monkeypatch):
    monkeypatch.setenv("PIPELINE_SECRET_0", "")
    monkeypatch.setenv("PW", "hunter2")


@pytest.mark.parametrize(
    "typed", ["http://me:hunter2@host:9", "http://me:${oc.env:PW}@host:9"]
)
def test_a_secret_reaches_the_jobs_whole(typed):
    text, value = moved(f'{KEY}="{typed}"')
    assert value == "http://me:hunter2@host:9"
    assert "hunter2" not in text


@pytest.mark.parametrize(
    "override",
    [
        "tracking.uri='http://me:${seed}@host'",
        "+tracking.tags={page: 'http://me:hunter2@host'}",
    ],
)
def test_a_secret_that_cannot_be_moved_is_rejected(override):
    with pytest.raises(ConfigError, match="entirely from the environment") as error:
        moved(override)
    assert "hunter2" not in str(error.value)


def test_what_is_no_secret_stays_where_it_is():
    override = "model.hidden=[64,64]"
    parsed = hydra_job.OverridesParser.create().parse_overrides([override])
    assert hydra_job._by_environment(parsed) == [override]

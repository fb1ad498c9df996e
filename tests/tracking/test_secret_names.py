"""Which environment variables hold secrets, by their names: their values stand nowhere."""

from __future__ import annotations

import pytest

from pipeline.common.secrets import HIDDEN, mask

VALUE = "hunter2-hunter2"


@pytest.mark.parametrize(
    "name",
    [
        "MY_API_KEY_PROD",
        "SESSION_COOKIE",
        "COOKIE_OF_SESSION",
        "KEY_1",
        "KEYS_PROD",
        "DB_PASS_STAGING",
        "GITHUB_PAT_2",
        "BASIC_AUTH_HEADER",
        "AWS_ACCESS_KEY_ID",
        "SENTRY_DSN",
        "SERVICE_JWT",
        "JWT",
        "DSN",
        "myApiKeyProd",
        "API_KEY",
        "MY_TOKEN_FILE",
        "API_TOKENS",
    ],
)
def test_the_value_is_masked(monkeypatch, name):
    monkeypatch.setenv(name, VALUE)
    assert mask(f"a: {VALUE}") == f"a: {HIDDEN}"


@pytest.mark.parametrize(
    "name",
    [
        "SSH_AUTH_SOCK",
        "KEY_TYPE",
        "KEYBOARD",
        "MONKEY",
        "PATH",
        "PWD",
        "OLDPWD",
        "AUTHOR",
        "SORT_KEY_NAME",
        "COMPASS_MODE",
        "XAUTHORITY",
        "TOKENIZER_DIR",
    ],
)
def test_another_value_is_not(monkeypatch, name):
    """Its text may be that of a config, which has to stay readable."""
    monkeypatch.setenv(name, VALUE)
    assert mask(f"a: {VALUE}") == f"a: {VALUE}"


@pytest.mark.parametrize("name", ["MAX_TOKENS", "TOKENS_PER_BATCH"])
def test_a_number_of_tokens_is_not_a_secret(monkeypatch, name):
    monkeypatch.setenv(name, "100000")
    assert mask("shuffle_buffer: 100000") == "shuffle_buffer: 100000"


def test_a_secret_that_is_a_number_is_masked(monkeypatch):
    monkeypatch.setenv("DEVICE_TOKEN", "100000")
    assert mask("100000") == HIDDEN

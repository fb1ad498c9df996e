"""Decides which failed requests to a store are worth repeating.

A failure is of one of three kinds:

- temporary: the store is unreachable or busy, or has an internal error.
- rejected: the store has rejected the request because of its content.
- other: for example, a password has changed, or a server does not know the request.

The purpose of a request decides after which failures it is repeated:

- Points, params, tags, inputs, files and the end of a run are required. Their requests
  are repeated until the caller's patience has run out, whatever the failure is: nothing
  may be missing unnoticed, and the user may repair the store. There is one exception. A
  tag, an input or a file that was rejected several times is left out, and is named in
  the tag `not_shipped`, so that the run can still be ended. Points and params are never
  left out.
- The creation of the run itself is tried a few times, but not again once the store
  rejects it. If it fails, the trainer decides what to do.
- A model is optional, and so is the tag that names a fork in the run from which it was
  forked. Their requests are repeated only after a temporary failure.
"""

from http import HTTPStatus
from typing import Any

import requests
from mlflow.exceptions import MlflowException

# MLflow's error codes, by the kind of the failure.
_TEMPORARY = ("INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED")
_REJECTED = (
    "INVALID_PARAMETER_VALUE",
    "BAD_REQUEST",
    "RESOURCE_ALREADY_EXISTS",
    "INVALID_STATE",
)
# HTTP status codes below 500 that indicate a temporary failure.
_TEMPORARY_STATUS = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS)


def is_temporary(error: Exception) -> bool:
    """Return whether the store was unreachable, busy, or had an internal error."""
    if isinstance(error, MlflowException):
        return error.error_code in _TEMPORARY
    status = status_code(error)
    if status is not None:
        is_server_error = status >= HTTPStatus.INTERNAL_SERVER_ERROR
        return is_server_error or status in _TEMPORARY_STATUS
    return isinstance(error, requests.RequestException)


def is_rejected(error: Exception) -> bool:
    """Return whether the store has rejected a request because of its content."""
    return isinstance(error, MlflowException) and error.error_code in _REJECTED


def is_answer(error: Exception) -> bool:
    """Return whether the store has answered a request, if only with an error."""
    return isinstance(error, MlflowException) or status_code(error) is not None


def status_code(error: Exception) -> int | None:
    """Return the HTTP status of the response that an exception holds, or None.

    The clients of object stores keep the response in `response`, too: Amazon's as a
    dict, all others as an object.
    """
    response: Any = getattr(error, "response", None)
    if isinstance(response, dict):
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    else:
        status = getattr(response, "status_code", None)
    return status if isinstance(status, int) else None

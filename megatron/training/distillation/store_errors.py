# SPDX-License-Identifier: Apache-2.0
"""What the multi-storage client raises, and what that means for whoever asked it.

The client names the errors of a store by its own kinds, lets others through as they are, and wraps
some in RuntimeError: the answer of the store is found along the chain of causes.
"""

import errno
from collections.abc import Iterator

_RETRIED_STATUS = (408, 429)
"""HTTP answers below 500 that ask for another attempt: timeout, too many requests."""
_REFUSED_STATUS = (416, 501)
"""HTTP answers that deny a range: not within the object, not implemented."""
_CORRECT_PROFILE = "Correct it in the file that MSC_CONFIG names"


def unusable_profile(error: Exception, url: str) -> OSError:
    """Return an OSError that says what is wrong with a configuration, without the values in it."""
    cause = error.args[1] if len(error.args) > 1 else None
    where = getattr(cause, "json_path", None)
    problem = _one_line(error)
    if where is not None:
        problem = f"its {where} breaks the rule {getattr(cause, 'validator', '')!r}"
    return OSError(
        errno.EINVAL,
        f"the multi-storage client cannot use this profile: {problem}. {_CORRECT_PROFILE}",
        url,
    )


def client_errors() -> tuple[type[Exception], ...]:
    """Return all that the client raises for a store it cannot work with."""
    from multistorageclient.types import PreconditionFailedError, RetryableError

    return (
        *(OSError, RuntimeError, ValueError, PreconditionFailedError, RetryableError),
        *_botocore_errors(),
    )


def _botocore_errors() -> tuple[type[Exception], ...]:
    """Return the errors of the S3 client, which a listing lets through; none without it."""
    try:
        from botocore.exceptions import BotoCoreError, ClientError
    except ModuleNotFoundError:
        return ()
    return BotoCoreError, ClientError


def is_transient(error: Exception) -> bool:
    """Return whether the same operation may succeed in a moment: the store is away or overloaded.

    What the store refuses (credentials, permissions, names) or what is wrong on this side stays
    wrong. An error that tells neither is tried again.
    """
    if isinstance(error, ValueError):  # what the client was asked for makes no sense to it
        return False
    for link in _chain(error):
        status = _http_status(link)
        if status is not None:
            return status in _RETRIED_STATUS or (status >= 500 and status != 501)
        if isinstance(link, FileNotFoundError | PermissionError | NotImplementedError):
            return False
        if isinstance(link, OSError) and link.errno in (errno.EBADF, errno.EINVAL, errno.ESTALE):
            return False
        if isinstance(link, _botocore_errors()):
            return _lies_on_the_way(link)
    return True


def _lies_on_the_way(error: BaseException) -> bool:
    """Return whether the store was not reached, or its answer came cut or altered."""
    from botocore.exceptions import (
        ConnectionError,
        FlexibleChecksumError,
        HTTPClientError,
        IncompleteReadError,
    )

    return isinstance(
        error, ConnectionError | FlexibleChecksumError | HTTPClientError | IncompleteReadError
    )


def refuses_ranges(error: Exception) -> bool:
    """Return whether a store cannot give a part of an object, or the client cannot take it.

    Some stores send the checksum of the whole object with a part of it.
    """
    return any(
        _http_status(link) in _REFUSED_STATUS
        or isinstance(link, NotImplementedError)
        or (isinstance(link, _botocore_errors()) and _is_checksum_error(link))
        for link in _chain(error)
    )


def _is_checksum_error(error: BaseException) -> bool:
    from botocore.exceptions import FlexibleChecksumError

    return isinstance(error, FlexibleChecksumError)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield *error* and what it was raised from."""
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _http_status(error: BaseException) -> int | None:
    """Return the status of the answer that an S3 client error stands for."""
    response = getattr(error, "response", None)
    if not isinstance(response, dict):
        return None
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return status if isinstance(status, int) else None


def located(error: Exception, what: str, url: str) -> OSError:
    """Return an OSError of the right kind that says what failed, why, where and what to do."""
    kind = _kind(error)
    advice = {
        errno.EACCES: "Check the credentials of its profile in the file that MSC_CONFIG names, and "
        "what they permit",
        errno.ENOENT: "Check that the bucket of its profile exists, and the path in it",
        errno.ESTALE: "A teacher has written it again; start the run again",
        errno.EINVAL: _CORRECT_PROFILE,
    }.get(kind, "Check that the store can be reached, and start the run again")
    return OSError(kind, f"cannot {what}: {reason(error)}. {advice}", url)


def _kind(error: Exception) -> int:
    for link in _chain(error):
        status = _http_status(link)
        if status in (401, 403) or isinstance(link, PermissionError):
            return errno.EACCES
        if status == 404 or isinstance(link, FileNotFoundError):
            return errno.ENOENT
        if isinstance(link, OSError) and link.errno in (errno.EBADF, errno.EINVAL, errno.ESTALE):
            return link.errno
        if isinstance(link, _botocore_errors()) and status is None and not _lies_on_the_way(link):
            return errno.EINVAL  # no credentials, no region
    return errno.EIO


def reason(error: Exception) -> str:
    """Return the store's own words where there are some."""
    known = _botocore_errors()
    return _one_line(next((link for link in _chain(error) if isinstance(link, known)), error))


def _one_line(error: BaseException) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split()).rstrip(".") or type(error).__name__

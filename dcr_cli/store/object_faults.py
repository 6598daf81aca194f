"""What an error of obstore says, as a fault: by its class, and by the status, code and message that it quotes.

Its text holds addresses, headers and bodies, so nothing else of it is passed on.
"""

from __future__ import annotations

import re

from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    InvalidPathError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)

from dcr_cli.store.backend import (
    AbsentError,
    DeniedError,
    FaultError,
    MissingRootError,
    OutsideError,
    PermanentError,
    TransientError,
)
from dcr_cli.store.told import code_in, told_in

_STATUS = re.compile(r"status code: (\d{3})")
# The services that machines of a cloud get credentials from: asked when there are no others.
_METADATA = re.compile(r"169\.254\.169\.254|169\.254\.170\.2|metadata\.google\.internal")
# What an address says is no news of what happened: a name in it may be any word.
_ADDRESS = re.compile(r"[a-z]+://[^\s\"'()<>]*")
_NO_CREDENTIALS = "set those of the cloud; of a public bucket --storage-option anon=true, at Google token=anon"
_NO_ROOT = frozenset(("NoSuchBucket", "ContainerNotFound"))
_NOT_OUR_KEY = frozenset(
    (
        "ExpiredToken",
        "InvalidAccessKeyId",
        "InvalidToken",
        "AuthenticationFailed",
        "AuthorizationFailure",
        "QuotaExceeded",
        "RequestTimeTooSkewed",
        "SignatureDoesNotMatch",
    )
)
_TRANSIENT = frozenset((408, 409, 429, 500, 502, 503, 504))
_MAY_PASS = frozenset(
    ("NoSuchUpload", "InternalError", "RequestTimeout", "ServiceUnavailable", "SlowDown", "OperationAborted")
)
_HINTS = {
    "ExpiredToken": "get new credentials",
    "RequestTimeTooSkewed": "set this machine's clock",
    "QuotaExceeded": "make room in the store",
}


class TakenError(FaultError):
    """The condition of a put was not met."""


class RangeIgnoredError(FaultError):
    """A range was asked for, and the whole object came."""


def fault_of(error: BaseError | FileNotFoundError) -> FaultError:
    """The fault that an error of obstore is."""
    text = str(error)
    match = _STATUS.search(text)
    status, code = int(match[1]) if match else 0, code_in(text)
    reason = " ".join(filter(None, (f"status {status}" if status else "", told_in(text))))
    if _METADATA.search(text):
        return PermanentError("found no credentials", hint=_NO_CREDENTIALS)
    if isinstance(error, AlreadyExistsError | PreconditionError):
        return TakenError(reason)
    if code in _NO_ROOT:
        return MissingRootError("there is no such bucket")
    if isinstance(error, FileNotFoundError):
        return AbsentError()
    if code in _NOT_OUR_KEY or isinstance(error, UnauthenticatedError):
        return PermanentError(f"refuses: {reason}", hint=_HINTS.get(code, "check the credentials"))
    if isinstance(error, InvalidPathError):
        return PermanentError(
            "holds an object whose name cannot be listed",
            hint="remove what has // or a component . or .. in its name",
        )
    if isinstance(error, PermissionDeniedError):
        return DeniedError(reason)
    return _other_fault(_ADDRESS.sub("", text), status, code, reason)


def _other_fault(text: str, status: int, code: str, reason: str) -> FaultError:
    if status == 403:
        # To a listing, the library has no class for it.
        return DeniedError(reason)
    if status == 416 or "Wanted range starting at" in text:
        return OutsideError("ends before the range that was asked for")
    if "non-partial response" in text or "CONTENT_RANGE header" in text:
        return RangeIgnoredError("ignores ranges")
    if code in _MAY_PASS or status in _TRANSIENT:
        return TransientError(f"answers with {reason}")
    if status in (301, 307) or "redirect" in text:
        return PermanentError("the bucket is in another region", hint="name it: storage option region")
    if status:
        return PermanentError(f"answers with {reason}")
    if "certificate" in text.lower():
        return PermanentError("its certificate is not to be trusted")
    if "HTTP error" in text or "HttpError" in text:
        return TransientError("did not answer" if "TimedOut" in text else "the connection broke")
    return PermanentError("answers with what is no answer of an object store")

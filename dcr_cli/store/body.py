"""What an answer's body is worth: that it starts where it should, and that all of it came.

Of sizes that others know, a manifest or an earlier answer, nothing is known here.
"""

from __future__ import annotations

from collections.abc import Iterator

from dcr_cli.store.backend import Answer, PermanentError, TransientError

# Of a body that does not start where it was asked to, how much is read and thrown away.
MOST_SKIPPED_BYTES = 64 << 20


def body(answer: Answer, begin: int, end: int | None) -> Iterator[bytes]:
    """Yield the bytes from `begin` to `end` of the object, or to the end of the body where nobody knows that.

    A body that ends early is TransientError, one that says nothing of its end PermanentError.
    """
    skip = begin - answer.begin
    if skip < 0:
        raise PermanentError(f"bytes from {begin} on were asked for, the answer starts at {answer.begin}")
    if skip > MOST_SKIPPED_BYTES:
        raise PermanentError(f"the remote ignores ranges, and {begin} bytes are too many to read for nothing")
    if end is None and answer.announced is None:
        raise PermanentError("the answer does not say how long it is")
    at, body_bytes = answer.begin, 0
    for chunk in answer.chunks:
        body_bytes += len(chunk)
        first = min(max(begin - at, 0), len(chunk))
        last = len(chunk) if end is None else min(max(end - at, 0), len(chunk))
        at += len(chunk)
        if first < last:
            yield chunk[first:last]
        if end is not None and at >= end:
            return
    announced = answer.announced if end is None else end - answer.begin
    if announced is not None and body_bytes < announced:
        raise TransientError(f"the answer ended after {body_bytes} of {announced} bytes")

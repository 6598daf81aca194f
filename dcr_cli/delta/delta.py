"""A delta's folder, opened: its commit, manifest and digests, read and checked against each other.

Payloads are PayloadReader's matter; a base is needed for nothing here.
"""

from __future__ import annotations

import os
import shlex
import stat
from dataclasses import dataclass
from pathlib import Path

from dcr_cli.arguments import check_path
from dcr_cli.checkpoint.digest import object_digest
from dcr_cli.checkpoint.file_kinds import file_kind
from dcr_cli.checkpoint.folder import Files, identity_of
from dcr_cli.delta.commit import decode_commit
from dcr_cli.delta.document import COPY_DELTA
from dcr_cli.delta.documents import OBJECT_LIMIT, Documents, decode_documents
from dcr_cli.delta.line import COMMIT_LIMIT
from dcr_cli.delta.output import COMMIT_NAME, DIGESTS_NAME, MANIFEST_NAME, PAYLOADS_NAME
from dcr_cli.errors import DamagedError, LocalError, NotFoundError, hint_of

# What lies in a remote that is a folder.
REMOTE_NAME = "dcr.json"
_MAKE = "dcr diff BASE TARGET -o DELTA makes one"


@dataclass(frozen=True, slots=True)
class Delta(Documents):
    """The documents of the delta in a folder."""

    folder: Path
    commit_blake3: bytes
    document_bytes: int


def open_delta(folder: str | os.PathLike[str], *, if_checkpoint: str = _MAKE) -> Delta:
    """Read the documents of the delta in `folder` and check that they belong together and describe its target.

    `if_checkpoint` is the hint for somebody who gives a checkpoint instead.

    Raises NotFoundError when there is no delta, DamagedError when it is incomplete or malformed, UnsupportedError when
    it needs a newer dcr.
    """
    check_path(folder, "delta")
    root = Path(folder)
    _check_folder(root, if_checkpoint)
    commit_object = _read(root, COMMIT_NAME, COMMIT_LIMIT)
    commit = decode_commit(commit_object, str(root / COMMIT_NAME))
    manifest, digests = ((str(root / name), _read(root, name, OBJECT_LIMIT)) for name in (MANIFEST_NAME, DIGESTS_NAME))
    documents = decode_documents(commit, manifest, digests)
    size = len(commit_object) + len(manifest[1]) + len(digests[1])
    return Delta(commit, documents.manifest, documents.digests, root, object_digest(commit_object), size)


def _check_folder(root: Path, if_checkpoint: str) -> None:
    try:
        names = os.listdir(root)
    except FileNotFoundError as error:
        raise NotFoundError(str(root), "no such delta", hint=_MAKE) from error
    except NotADirectoryError as error:
        raise NotFoundError(str(root), "is not a folder; a delta is one", hint=_MAKE) from error
    except OSError as error:
        raise LocalError(str(root), f"cannot be listed: {error.strerror}", hint=hint_of(error)) from error
    if COMMIT_NAME in names:
        return
    if MANIFEST_NAME in names or DIGESTS_NAME in names or PAYLOADS_NAME in names:
        facts = f"has no {COMMIT_NAME}: the delta in it is incomplete"
        raise DamagedError(str(root), facts, hint="run the dcr diff that writes it again")
    facts, hint = f"holds no delta: it has no {COMMIT_NAME}", _MAKE
    if any(name.endswith(".safetensors") for name in names):
        facts, hint = f"{facts}; it is a checkpoint", if_checkpoint
    elif REMOTE_NAME in names:
        facts, hint = f"{facts}; it is a remote", f"dcr show {shlex.quote(str(root))}@N shows its version N"
    raise NotFoundError(str(root), facts, hint=hint)


def _read(root: Path, name: str, limit: int) -> bytes:
    what = str(root / name)
    try:
        status = os.stat(what)
    except FileNotFoundError as error:
        raise DamagedError(what, "is missing; the delta is incomplete", hint=COPY_DELTA) from error
    except OSError as error:
        raise LocalError(what, f"cannot be read: {error.strerror}", hint=hint_of(error)) from error
    if not stat.S_ISREG(status.st_mode):
        raise DamagedError(what, f"is {file_kind(status.st_mode)}, not a file")
    if status.st_size > limit:
        raise DamagedError(what, f"has {status.st_size} bytes, at most {limit} are allowed")
    with Files(root, {name: identity_of(status)}) as files:
        return files.read_file(name)

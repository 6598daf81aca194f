"""Signed documents (FORMAT 13.3): a line, and lines below it that sign it with Ed25519 keys.

What a line says is its document's matter; who is trusted, the caller's.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dcr_cli.arguments import check_path
from dcr_cli.checkpoint.names import shown
from dcr_cli.delta.document import refuse_answer
from dcr_cli.delta.line import COMMIT_LIMIT
from dcr_cli.errors import DamagedError, LocalError, UnsupportedError, UsageError, WrongBaseError, hint_of, install_hint

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

MAX_SIGNATURES = 16
# Of all lines below the first together; who writes a first line leaves them room.
MAX_SIGNATURES_BYTES = 16 << 10
_KEY_BYTES = 32
_MAX_KEY_FILE_BYTES = 1 << 14
_LINE = re.compile(r"[a-z][a-z0-9-]{0,31}:[!-~]{1,1024}")
_SIGNATURE = re.compile(r"ed25519:([0-9a-f]{64}):([0-9a-f]{128})")
_PUBLIC_TEXT = re.compile(r"(?:ed25519:)?([0-9a-f]{64})")
# No key in one word has a dot or a slash.
_PATH = re.compile(r"\S*[./]\S*")
_PUBLIC_PEM = re.compile(r"-----BEGIN PUBLIC KEY-----\s+([A-Za-z0-9+/=\s]+?)\s+-----END PUBLIC KEY-----")
# What stands before the key in the two forms that tools write: of its type, and of its length.
_PEM_HEAD = bytes.fromhex("302a300506032b6570032100")
_SSH_TYPE = "ssh-ed25519"
_SSH_HEAD = len(_SSH_TYPE).to_bytes(4, "big") + _SSH_TYPE.encode() + _KEY_BYTES.to_bytes(4, "big")
_NEEDS = "signatures need cryptography, which is not installed"
_MAY_BE_ANYBODYS = "whoever may write to the remote may have made it"
_TO_SIGN = (
    "have its publisher sign with --sign-key KEY; or leave --trusted-key out, if whoever may write there is trusted"
)
_MAKE_KEY = "ssh-keygen -t ed25519 -N '' -f KEY makes one"


@dataclass(frozen=True, slots=True)
class Signed:
    """A document's line, with its newline, and the signatures below it, as (key, signature)."""

    line: bytes
    signatures: tuple[tuple[bytes, bytes], ...]


def split_signed(data: bytes, what: str, *, limit: int = COMMIT_LIMIT) -> Signed:
    """Cut a signed document, of at most `limit` bytes, into its line and its signatures.

    Those of an unknown kind are passed over. Whether the line is a document is its decoder's matter.
    """
    refuse_answer(data, what)
    if len(data) > limit:
        raise DamagedError(what, f"has {len(data)} bytes, at most {limit} are allowed")
    at = data.find(b"\n") + 1
    if at in (0, len(data)):
        return Signed(data, ())
    if len(data) - at > MAX_SIGNATURES_BYTES:
        facts = f"has {len(data) - at} bytes below its first line, at most {MAX_SIGNATURES_BYTES} are allowed"
        raise DamagedError(what, facts)
    if not data.endswith(b"\n"):
        raise DamagedError(what, "its last line has no newline at its end: it was cut short, or something was added")
    texts = data[at:].decode("ascii", errors="replace").split("\n")[:-1]
    if len(texts) > MAX_SIGNATURES:
        raise DamagedError(what, f"has {len(texts)} signatures, at most {MAX_SIGNATURES} are allowed")
    signatures = []
    for text in texts:
        match = _SIGNATURE.fullmatch(text)
        if match is not None:
            signatures.append((bytes.fromhex(match[1]), bytes.fromhex(match[2])))
        elif text.startswith("ed25519:") or _LINE.fullmatch(text) is None:
            raise DamagedError(what, f"has a line below the first that is no signature: {shown(text)}")
    return Signed(data[:at], tuple(signatures))


class SigningKey:
    """A private key that documents are signed with."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public = key.public_key().public_bytes_raw()

    def sign(self, line: bytes, kind: str) -> bytes:
        """Return `line`, a document of this kind, with a signature below it."""
        signature = self._key.sign(_message(line, kind))
        return line + f"ed25519:{self.public.hex()}:{signature.hex()}\n".encode()


def load_signing_key(path: str | os.PathLike[str], name: str = "sign_key") -> SigningKey:
    """Load an Ed25519 private key without passphrase: what ssh-keygen or openssl write. Its bytes are never shown.

    Errors are about the argument `name`, as for all here that is given.
    """
    data = _read(path, name)
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_ssh_private_key
    except ImportError as error:
        raise UnsupportedError(name, _NEEDS, hint=install_hint("sign")) from error
    load = load_ssh_private_key if b"OPENSSH" in data[:64] else load_pem_private_key
    what = f"{name} {os.fspath(path)}"
    try:
        key = load(data, password=None)
    except TypeError as error:
        hint = "ssh-keygen -p -N '' -f KEY takes it away from an OpenSSH key"
        raise UsageError(what, "has a passphrase, and nobody is asked for it", hint=hint) from error
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        is_public = _keys_in(data.decode(errors="replace")) is not None
        facts = "is a public key, a private one is needed" if is_public else "is not an Ed25519 private key"
        hint = "its own file is called as this one without .pub" if is_public else _MAKE_KEY
        raise UsageError(what, facts, hint=hint)
    return SigningKey(key)


def parse_public_key(text: str, name: str = "trusted_keys") -> bytes:
    """Read a public key: 64 hexadecimal digits, a line of OpenSSH's, a PEM, or the path of a file that holds one."""
    keys = _public_keys(text, name)
    if len(keys) != 1:
        raise UsageError(f"{name} {shown(text)}", f"holds {len(keys)} keys, one is expected")
    return keys[0]


@dataclass(frozen=True, slots=True)
class Trust:
    """Which keys' signatures count; without any, nothing has to be signed."""

    keys: frozenset[bytes] = frozenset()

    @property
    def is_asked_for(self) -> bool:
        return bool(self.keys)

    def check(self, signed: Signed, kind: str, what: str) -> None:
        """Raise WrongBaseError unless a trusted key has signed `signed`, a document of this kind."""
        if not self.keys or self.signers(signed, kind):
            return
        found = {key: key.hex()[:16] for key, _ in signed.signatures}
        wrong = [text for key, text in found.items() if key in self.keys]
        facts, hint = "is not signed by a trusted key", _TO_SIGN
        if wrong:
            facts = f"has a signature by trusted key {wrong[0]} that is not one of this {kind}"
            hint = _MAY_BE_ANYBODYS
        elif found:
            facts += f"; keys below it: {', '.join(found.values())}"
            hint = f"--trusted-key KEY trusts its publisher's, if that is one of them; {_MAY_BE_ANYBODYS}"
        raise WrongBaseError(what, facts, hint=hint)

    def signers(self, signed: Signed, kind: str) -> tuple[bytes, ...]:
        """The trusted keys that have signed it, each once."""
        wanted = [(key, signature) for key, signature in signed.signatures if key in self.keys]
        right = [key for key, signature in wanted if _is_right(key, signature, _message(signed.line, kind))]
        return tuple(dict.fromkeys(right))


def trust_in(keys: Sequence[str], name: str = "trusted_keys") -> Trust:
    """Trust in the keys of these texts, and in all keys of these files."""
    return Trust(frozenset(key for text in keys for key in _public_keys(text, name)))


def _message(line: bytes, kind: str) -> bytes:
    """What is signed: a document of one kind never passes for one of another."""
    return f"dcr-1 {kind}\n".encode() + line


def _is_right(key: bytes, signature: bytes, message: bytes) -> bool:
    try:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    except ImportError as error:
        raise UnsupportedError("trusted keys", _NEEDS, hint=install_hint("sign")) from error
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def _public_keys(text: str, name: str) -> list[bytes]:
    keys = _keys_in(text)
    check_path(text, name)
    if keys is None and os.path.exists(text):
        keys = _keys_in(_read(text, name).decode(errors="replace"))
    if keys is None and _PATH.fullmatch(text) is not None and not os.path.lexists(text):
        raise UsageError(f"{name} {shown(text)}", "no such file", hint="check its spelling")
    if keys is None:
        facts = "is neither an Ed25519 public key nor a file of such keys"
        raise UsageError(f"{name} {shown(text)}", facts, hint="a public key is what KEY.pub holds")
    return keys


def _keys_in(text: str) -> list[bytes] | None:
    """The keys of a text: a PEM, or one a line, but for blank lines and comments. None if anything else is there."""
    pem = _PUBLIC_PEM.fullmatch(text.strip())
    if pem is not None:
        key = _after(_PEM_HEAD, "".join(pem[1].split()))
        return [key] if key is not None else None
    lines = [line.strip() for line in text.splitlines()]
    keys = [_key_of(line) for line in lines if line and not line.startswith("#")]
    known = [key for key in keys if key is not None]
    return known if known and len(known) == len(keys) else None


def _key_of(line: str) -> bytes | None:
    match = _PUBLIC_TEXT.fullmatch(line)
    if match is not None:
        return bytes.fromhex(match[1])
    fields = line.split()
    return _after(_SSH_HEAD, fields[1]) if len(fields) >= 2 and fields[0] == _SSH_TYPE else None


def _after(head: bytes, text: str) -> bytes | None:
    """The key that comes after `head` in base64."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None
    return data[len(head) :] if data.startswith(head) and len(data) == len(head) + _KEY_BYTES else None


def _read(path: str | os.PathLike[str], name: str) -> bytes:
    check_path(path, name)
    try:
        with Path(path).open("rb") as file:
            data = file.read(_MAX_KEY_FILE_BYTES + 1)
    except OSError as error:
        facts = f"cannot be read: {error.strerror}"
        raise LocalError(f"{name} {os.fspath(path)}", facts, hint=hint_of(error)) from error
    if len(data) > _MAX_KEY_FILE_BYTES:
        facts = f"has more than {_MAX_KEY_FILE_BYTES} bytes, too many for a file of keys"
        raise UsageError(f"{name} {os.fspath(path)}", facts)
    return data

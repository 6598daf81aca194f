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

from dcr_cli.errors import DamagedError, LocalError, UnsupportedError, UsageError, WrongBaseError, hint_of

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

MAX_SIGNATURES = 16
_KEY_BYTES, _SIGNATURE_BYTES = 32, 64
_MAX_KEY_FILE_BYTES = 1 << 14
_LINE = re.compile(r"[a-z][a-z0-9-]{0,31}:[!-~]{1,1024}")
_SIGNATURE = re.compile(r"ed25519:([0-9a-f]{64}):([0-9a-f]{128})")
_PUBLIC_TEXT = re.compile(r"(?:ed25519:)?([0-9a-f]{64})")
_SSH_TYPE = "ssh-ed25519"
_NEEDS = "signatures need cryptography, which is not installed"
_INSTALL = "pip install 'dcr-cli[sign]'"


@dataclass(frozen=True, slots=True)
class Signed:
    """A document's line, with its newline, and the signatures below it, as (key, signature)."""

    line: bytes
    signatures: tuple[tuple[bytes, bytes], ...]


def split_signed(data: bytes, what: str) -> Signed:
    """Cut a signed document into its line and its signatures; those of an unknown kind are passed over."""
    at = data.find(b"\n") + 1
    if not at or not data.endswith(b"\n"):
        return Signed(data, ())
    texts = data[at:].decode("ascii", errors="replace").split("\n")[:-1]
    if len(texts) > MAX_SIGNATURES:
        raise DamagedError(what, f"has {len(texts)} signatures, at most {MAX_SIGNATURES} are allowed")
    signatures = []
    for text in texts:
        match = _SIGNATURE.fullmatch(text)
        if match is not None:
            signatures.append((bytes.fromhex(match[1]), bytes.fromhex(match[2])))
        elif text.startswith("ed25519:") or _LINE.fullmatch(text) is None:
            raise DamagedError(what, "has a line below the first that is no signature")
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


def load_signing_key(path: str | os.PathLike[str]) -> SigningKey:
    """Load an Ed25519 private key without passphrase: what ssh-keygen or openssl write. Its bytes are never shown."""
    data = _read(path, "--sign-key")
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_ssh_private_key
    except ImportError as error:
        raise UnsupportedError("--sign-key", _NEEDS, hint=_INSTALL) from error
    load = load_ssh_private_key if b"OPENSSH" in data[:64] else load_pem_private_key
    try:
        key = load(data, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        facts = "is not an Ed25519 private key without passphrase"
        raise UsageError(str(path), facts, hint="ssh-keygen -t ed25519 -N '' -f KEY makes one")
    return SigningKey(key)


def parse_public_key(text: str) -> bytes:
    """Read a public key: 64 hexadecimal digits, a line of OpenSSH's, or the path of a file that holds either."""
    key = _public_key(text)
    if key is None and os.path.exists(text):
        key = _public_key(_read(text, "--trusted-key").decode(errors="replace"))
    if key is None:
        raise UsageError("--trusted-key", "is neither an Ed25519 public key nor a file with one", hint="see KEY.pub")
    return key


@dataclass(frozen=True, slots=True)
class Trust:
    """Which keys' signatures count; without any, nothing has to be signed."""

    keys: frozenset[bytes] = frozenset()

    @property
    def is_asked_for(self) -> bool:
        return bool(self.keys)

    def check(self, signed: Signed, kind: str, what: str) -> None:
        """Raise WrongBaseError unless a trusted key has signed `signed`, a document of this kind."""
        if self.keys and not self.signers(signed, kind):
            facts = "is not signed by a trusted key"
            if signed.signatures:
                facts += f"; keys below it: {', '.join(key.hex()[:16] for key, _ in signed.signatures)}"
            raise WrongBaseError(what, facts, hint="whoever may write to the remote may have made it")

    def signers(self, signed: Signed, kind: str) -> tuple[bytes, ...]:
        """The trusted keys that have signed it."""
        wanted = [(key, signature) for key, signature in signed.signatures if key in self.keys]
        return tuple(key for key, signature in wanted if _is_right(key, signature, _message(signed.line, kind)))


def trust_in(keys: Sequence[str]) -> Trust:
    """Trust in the keys of these texts or files."""
    return Trust(frozenset(map(parse_public_key, keys)))


def _message(line: bytes, kind: str) -> bytes:
    """What is signed: a document of one kind never passes for one of another."""
    return f"dcr-1 {kind}\n".encode() + line


def _is_right(key: bytes, signature: bytes, message: bytes) -> bool:
    try:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    except ImportError as error:
        raise UnsupportedError("--trusted-key", _NEEDS, hint=_INSTALL) from error
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def _public_key(text: str) -> bytes | None:
    text = text.strip()
    match = _PUBLIC_TEXT.fullmatch(text)
    if match is not None:
        return bytes.fromhex(match[1])
    fields = text.split()
    if len(fields) < 2 or fields[0] != _SSH_TYPE:
        return None
    try:
        blob = base64.b64decode(fields[1], validate=True)
    except (binascii.Error, ValueError):
        return None
    head = len(_SSH_TYPE).to_bytes(4, "big") + _SSH_TYPE.encode() + _KEY_BYTES.to_bytes(4, "big")
    return blob[len(head) :] if blob.startswith(head) and len(blob) == len(head) + _KEY_BYTES else None


def _read(path: str | os.PathLike[str], what: str) -> bytes:
    try:
        with Path(path).open("rb") as file:
            return file.read(_MAX_KEY_FILE_BYTES)
    except OSError as error:
        raise LocalError(what, f"{path} cannot be read: {error.strerror}", hint=hint_of(error)) from error

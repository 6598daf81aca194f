"""The documents of a remote: whatever they say is read back, their keys, and whose signatures count."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from hypothesis import given, strategies as st

from dcr_cli.checkpoint.digest import State, object_digest
from dcr_cli.delta.commit import Commit
from dcr_cli.delta.file_rules import RANGE_BYTES, RangedFile, range_spans
from dcr_cli.errors import DamagedError, LocalError, TransportError, UnsupportedError, UsageError, WrongBaseError
from dcr_cli.remote.acknowledgement import Acknowledgement, decode_acknowledgement, encode_acknowledgement
from dcr_cli.remote.anchor import ANCHOR_KIND, Anchor, decode_anchor, encode_anchor
from dcr_cli.remote.hint import (
    GIVEN_UP,
    PREPARED,
    STREAMING,
    Hint,
    decode_hint,
    encode_hint,
    read_hint,
    require_hint,
    write_hint,
)
from dcr_cli.remote.history import ENCODINGS, History, decode_history, encode_history
from dcr_cli.remote.keys import (
    MOST_VERSION,
    Place,
    acknowledgement_key,
    check_receiver,
    digests_key,
    is_id,
    is_payload,
    manifest_key,
    new_id,
    part_key,
    payload_key,
    place_of_acknowledgement,
    place_of_version,
)
from dcr_cli.remote.signing import Signed, SigningKey, Trust, load_signing_key, parse_public_key, split_signed, trust_in
from dcr_cli.remote.version import COMMIT_KIND, AnchorParts, Version, decode_version, encode_version
from dcr_cli.store.memory import MemoryBackend
from dcr_cli.store.store import Store
from remotes import (
    HISTORY,
    acknowledgement,
    anchor_parts,
    delta_parts,
    place_of,
    signing_key,
    small_anchor,
    version,
    with_files,
)
from store_contract import Clock
from store_wrappers import FailsCalls

digests = st.binary(min_size=32, max_size=32)
states = st.builds(State, digests, digests)
ids = st.text("0123456789abcdef", min_size=32, max_size=32)
numbers = st.integers(1, MOST_VERSION)
places = st.builds(Place, numbers, ids)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
sizes = st.integers(0, (1 << 63) - 1)
receivers = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", fullmatch=True).filter(str.isascii)
commits = st.builds(
    Commit, states, states, digests, digests, sizes, digests, sizes, st.integers(0, 1_000_000), sizes, texts, texts
)


@st.composite
def versions(draw: st.DrawFn) -> Version:
    number = draw(st.sampled_from([1, 2]) | numbers)
    created, publisher = draw(texts), draw(texts)
    place, previous = Place(number, draw(ids)), draw(digests) if number > 1 else None
    if number == 1 or draw(st.booleans()):
        parts = AnchorParts(draw(states), draw(digests), draw(sizes), draw(sizes), draw(sizes))
        return Version(draw(ids), place, previous, number, parts, created, publisher)
    delta = replace(draw(commits), created=created, publisher=publisher)
    return Version(draw(ids), place, previous, draw(st.integers(1, number)), delta, created, publisher)


@st.composite
def file_lists(draw: st.DrawFn) -> tuple[RangedFile, ...]:
    """Shards of any size up to four ranges, and sidecars."""
    files: list[RangedFile] = []
    for name in sorted(draw(st.sets(st.text("abc\u00e9\U0001f600 ~", min_size=1, max_size=5), min_size=1, max_size=5))):
        is_shard = not files or draw(st.booleans())
        size = draw(st.integers(9, 4 * RANGE_BYTES) if is_shard else st.integers(0, 1000))
        ranges = tuple(draw(digests) for _ in range_spans(size))
        path = f"{name}.safetensors" if is_shard else f"{name}.txt"
        digest = draw(digests) if is_shard else ranges[0] if ranges else object_digest(b"")
        files.append(RangedFile(path, 1 if is_shard else 2, size, digest, ranges))
    return tuple(sorted(files, key=lambda file: file.path))


@given(versions())
def test_versions_are_read_back(version: Version) -> None:
    line = encode_version(version)
    published = decode_version(line, version.number, "commit")
    assert published.version == version
    assert published.signed == Signed(line, ())
    assert (published.data, published.blake3) == (line, object_digest(line))
    assert encode_version(published.version) == line
    signed = signing_key().sign(line, COMMIT_KIND)
    again = decode_version(signed, version.number, "commit")
    assert again.version == version
    assert again.signed.line == line
    assert (again.data, again.blake3) == (signed, object_digest(signed))


@given(places, ids, states, file_lists())
def test_anchors_are_read_back(place: Place, history: str, state: State, files: tuple[RangedFile, ...]) -> None:
    anchor = with_files(Anchor(history, place, state, files, ("*.bin",)))
    line = encode_anchor(anchor)
    found, signed = decode_anchor(signing_key().sign(line, ANCHOR_KIND), place, "anchor")
    assert found == anchor
    assert signed.line == line == encode_anchor(found)
    assert found.bytes == sum(file.size for file in files)


@given(ids, st.permutations(ENCODINGS), texts, texts)
def test_histories_are_read_back(own: str, encodings: list[str], created: str, publisher: str) -> None:
    for count in (1, 2, 3):
        history = History(own, tuple(encodings[:count]), created, publisher)
        assert decode_history(encode_history(history), "dcr.json") == history


@given(ids, places, st.sampled_from([STREAMING, PREPARED, GIVEN_UP]), texts)
def test_hints_are_read_back(history: str, place: Place, state: str, created: str) -> None:
    hint = Hint(history, place, state, created)
    assert decode_hint(encode_hint(hint)) == hint


@given(ids, places, receivers, st.sampled_from(["staged", "applied"]), states, st.booleans(), texts)
def test_acknowledgements_are_read_back(
    history: str, place: Place, receiver: str, stage: str, state: State, is_built: bool, created: str
) -> None:
    said = Acknowledgement(history, place, receiver, stage, state, is_built, created)
    assert decode_acknowledgement(encode_acknowledgement(said), "acks")[0] == said
    found, signed = decode_acknowledgement(encode_acknowledgement(said, signing_key()), "acks")
    assert found == said
    assert Trust(frozenset([signing_key().public])).signers(signed, "acknowledgement") == (signing_key().public,)
    assert place_of_acknowledgement(acknowledgement_key(place, receiver, stage)) == (place, receiver, stage)


@given(st.data(), st.sampled_from(["commit", "anchor", "acks"]))
def test_any_bytes_are_read_or_refused(data: st.DataObject, name: str) -> None:
    """A document with a few bytes changed is one, or malformed; nothing else is raised."""
    documents: dict[str, tuple[bytes, Callable[[bytes], object]]] = {
        "commit": (
            signing_key().sign(encode_version(version(2)), COMMIT_KIND),
            lambda data: decode_version(data, 2, "commit"),
        ),
        "anchor": (encode_anchor(small_anchor()), lambda data: decode_anchor(data, place_of(3), "anchor")),
        "acks": (
            encode_acknowledgement(acknowledgement(), signing_key()),
            lambda data: decode_acknowledgement(data, "acks"),
        ),
    }
    document, decode = documents[name]
    changed = bytearray(document)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(changed) - 1))
        changed[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    with suppress(DamagedError, UnsupportedError):
        decode(bytes(changed))


# What is written


def test_what_a_version_is() -> None:
    first, second = version(1), version(2)
    assert (first.delta, first.bytes) == (None, 5_000_000_900)
    assert (second.delta, second.bytes) == (delta_parts(2), (1 << 40) + 500)
    assert (second.number, second.target) == (2, delta_parts(2).target)
    assert first.target == anchor_parts(1).target


def test_a_label_leaves_room_for_signatures() -> None:
    longest = 65_536 - 16_384 - len(encode_version(version(1, publisher="")))
    line = encode_version(version(1, publisher="x" * longest))
    assert len(line) == 49_152
    data = line
    for number in range(16):
        data += signing_key(number).sign(line, COMMIT_KIND)[len(line) :]
    assert len(decode_version(data, 1, "commit").signed.signatures) == 16
    with pytest.raises(DamagedError, match="would have 49153 bytes"):
        encode_version(version(1, publisher="x" * (longest + 1)))
    with pytest.raises(DamagedError, match="at most 49152"):
        encode_acknowledgement(acknowledgement(created="x" * 50_000))


def test_a_label_that_is_not_text() -> None:
    for bad in ("\udcff", "host-\ud800"):
        with pytest.raises(DamagedError, match=r"commit: would hold what is not UTF-8: '\\ud"):
            encode_version(version(1, publisher=bad))


@pytest.mark.parametrize("size", [0, 1, RANGE_BYTES - 1, RANGE_BYTES, RANGE_BYTES + 1, 5 * RANGE_BYTES - 7])
def test_ranges_cover_a_file(size: int) -> None:
    spans = list(range_spans(size))
    assert sum(count for _, count in spans) == size
    assert [begin for begin, _ in spans] == list(range(0, size, 67_108_864))
    assert all(0 < count <= 67_108_864 for _, count in spans)


# Keys of objects


def test_keys_of_a_version() -> None:
    place = Place(42, "0123456789abcdef" * 2)
    folder = "versions/0000000042-0123456789abcdef0123456789abcdef/"
    assert manifest_key(place) == f"{folder}manifest.zst"
    assert digests_key(place) == f"{folder}digests.zst"
    assert payload_key(place, 7) == f"{folder}payloads/000007.safetensors"
    assert part_key(place, "0") == f"{folder}parts/0"
    rests = {key: place_of_version(folder + key) for key in ("payloads/000007.safetensors", "manifest.zst", "parts/0")}
    assert all(found == (place, key) for key, found in rests.items())
    assert [is_payload(key) for key in rests] == [True, False, False]


def test_ids_are_new() -> None:
    made = {new_id() for _ in range(1000)}
    assert len(made) == 1000
    assert all(map(is_id, made))


@pytest.mark.parametrize("name", ["", ".a", "-a", "a/b", "a b", "a\n", "\u00e9", "\u0661", "a" * 129, "../a"])
def test_names_of_receivers(name: str) -> None:
    assert check_receiver("a" * 128) == "a" * 128
    assert check_receiver("_host-1.example") == "_host-1.example"
    with pytest.raises(UsageError, match=r"^name: .* is no name") as caught:
        check_receiver(name)
    assert "\n" not in str(caught.value)


# Hints


def test_a_hint_that_cannot_be_read_is_none() -> None:
    backend, clock = MemoryBackend("test-hint"), Clock()
    hint = Hint(HISTORY, place_of(3), STREAMING, "now")
    write_hint(Store(backend, "memory://test-hint"), hint)
    assert read_hint(Store(backend, "memory://test-hint")) == hint
    assert read_hint(Store(FailsCalls(backend, 1 << 30), "memory://x", patience=clock.patience())) is None
    with pytest.raises(TransportError):
        require_hint(Store(FailsCalls(backend, 1 << 30), "memory://x", patience=clock.patience()))


# Keys that sign


PRIVATE = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC = PRIVATE.public_key().public_bytes_raw()
OTHER_PUBLIC = signing_key(1).public
PEM, OPENSSH = (Encoding.PEM, PrivateFormat.PKCS8), (Encoding.PEM, PrivateFormat.OpenSSH)


def public_text(key: Ed25519PrivateKey, encoding: Encoding, form: PublicFormat) -> str:
    return key.public_key().public_bytes(encoding, form).decode()


SSH_LINE = public_text(PRIVATE, Encoding.OpenSSH, PublicFormat.OpenSSH)
PEM_TEXT = public_text(PRIVATE, Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keys as tools write them; deriving a key from a passphrase takes its time."""
    tmp_path = tmp_path_factory.mktemp("keys")
    for name, (encoding, form) in (("pem", PEM), ("ssh", OPENSSH)):
        (tmp_path / name).write_bytes(PRIVATE.private_bytes(encoding, form, NoEncryption()))
        secret = PRIVATE.private_bytes(encoding, form, BestAvailableEncryption(b"secret"))
        (tmp_path / f"locked-{name}").write_bytes(secret)
    (tmp_path / "rsa").write_bytes(generate_private_key(65537, 2048).private_bytes(*PEM, NoEncryption()))
    (tmp_path / "ssh.pub").write_text(f"{SSH_LINE} user@host\n")
    (tmp_path / "pem.pub").write_text(PEM_TEXT)
    return tmp_path


@pytest.mark.parametrize("name", ["pem", "ssh"])
def test_keys_are_loaded(folder: Path, name: str) -> None:
    key = load_signing_key(folder / name)
    assert key.public == PUBLIC
    line = encode_version(version(2))
    assert key.sign(line, COMMIT_KIND) == signing_key().sign(line, COMMIT_KIND)
    PRIVATE.public_key().verify(bytes.fromhex(key.sign(line, COMMIT_KIND)[-129:-1].decode()), b"dcr-1 commit\n" + line)


def test_keys_of_ssh_keygen_are_loaded(tmp_path: Path) -> None:
    try:
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "key"], check=True)
    except FileNotFoundError:
        pytest.skip("ssh-keygen is not installed")
    assert parse_public_key(str(tmp_path / "key.pub")) == load_signing_key(str(tmp_path / "key")).public


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("locked-pem", "has a passphrase"),
        ("locked-ssh", "has a passphrase"),
        ("rsa", "is not an Ed25519 private key"),
        ("ssh.pub", "is a public key, a private one is needed"),
        ("pem.pub", "is a public key, a private one is needed"),
        ("empty", "is not an Ed25519 private key"),
        ("noise", "is not an Ed25519 private key"),
        ("cut", "is not an Ed25519 private key"),
        ("long", "has more than 16384 bytes"),
    ],
)
def test_what_is_no_private_key(folder: Path, name: str, match: str) -> None:
    (folder / "empty").write_bytes(b"")
    (folder / "noise").write_bytes(bytes(range(256)))
    (folder / "cut").write_bytes((folder / "ssh").read_bytes()[:200])
    (folder / "long").write_bytes((folder / "ssh").read_bytes() + b"\n" * 20_000)
    with pytest.raises(UsageError, match=match) as caught:
        load_signing_key(folder / name)
    assert str(caught.value).startswith(f"sign_key {folder / name}: ")
    with pytest.raises(UsageError, match=match) as caught:
        load_signing_key(folder / name, "--receiver-key")
    assert str(caught.value).startswith("--receiver-key ")


def test_keys_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match=r"sign_key .*key: cannot be read: No such file"):
        load_signing_key(tmp_path / "key")
    with pytest.raises(LocalError, match="cannot be read: Is a directory"):
        load_signing_key(tmp_path)
    with pytest.raises(LocalError, match=r"trusted_keys .*: cannot be read: Is a directory"):
        parse_public_key(str(tmp_path))
    with pytest.raises(UsageError, match="a character that no path has"):
        load_signing_key("a\0b")
    with pytest.raises(UsageError, match="a character that no path has"):
        parse_public_key("a\0b")


def test_public_keys(folder: Path) -> None:
    for text in (
        PUBLIC.hex(),
        f"ed25519:{PUBLIC.hex()}",
        f"  {PUBLIC.hex()}\n",
        SSH_LINE,
        f"{SSH_LINE} a comment\n",
        PEM_TEXT,
        str(folder / "ssh.pub"),
        str(folder / "pem.pub"),
    ):
        assert parse_public_key(text) == PUBLIC


def test_what_is_no_public_key(folder: Path) -> None:
    (folder / "empty").write_text("\n# nothing\n")
    for text in (
        "",
        "x",
        PUBLIC.hex()[1:],
        PUBLIC.hex().upper(),
        SSH_LINE.replace("ssh-ed25519", "ssh-rsa"),
        SSH_LINE[:-4],
        SSH_LINE + "AAAA",
        SSH_LINE.replace("AAAA", "AA!A"),
        "ssh-ed25519",
        PEM_TEXT.replace("MCow", "MCox"),
        str(folder / "ssh"),
        str(folder / "rsa"),
        str(folder / "empty"),
        "no-such-key",
    ):
        with pytest.raises(UsageError, match=r"trusted_keys .*is neither an Ed25519 public key nor a file"):
            parse_public_key(text)


def test_a_file_of_keys_that_is_not_there(folder: Path) -> None:
    for text in (str(folder / "no-such-file"), "trainr.pub"):
        with pytest.raises(UsageError, match=r"trusted_keys .*: no such file$"):
            parse_public_key(text)


def test_files_of_public_keys(folder: Path) -> None:
    (folder / "keys").write_text(f"# rollout\n\n{SSH_LINE} one\n{OTHER_PUBLIC.hex()}\n")
    assert trust_in([str(folder / "keys")]) == Trust(frozenset([PUBLIC, OTHER_PUBLIC]))
    assert trust_in([PUBLIC.hex(), str(folder / "ssh.pub")]) == Trust(frozenset([PUBLIC]))
    assert trust_in([]) == Trust()
    assert not trust_in([]).is_asked_for and trust_in([SSH_LINE]).is_asked_for
    with pytest.raises(UsageError, match="holds 2 keys, one is expected"):
        parse_public_key(str(folder / "keys"))
    (folder / "keys").write_text(f"{SSH_LINE} one\nssh-rsa AAAA two\n")
    with pytest.raises(UsageError, match=r"--receivers .*is neither"):
        trust_in([str(folder / "keys")], "--receivers")


def test_each_key_counts_once() -> None:
    line = encode_version(version(2))
    below = [SigningKey.sign(signing_key(number), line, COMMIT_KIND)[len(line) :] for number in (0, 1, 0, 2)]
    signed = split_signed(line + b"".join(below), "commit")
    trust = Trust(frozenset([signing_key(0).public, signing_key(1).public]))
    assert trust.signers(signed, COMMIT_KIND) == (signing_key(0).public, signing_key(1).public)
    # One that is not right beside one that is takes nothing from it.
    wrong = below[0].replace(below[0][-5:-1], b"0000" if below[0][-5:-1] != b"0000" else b"1111")
    for lines in (wrong + below[0], below[0] + wrong):
        assert trust.signers(split_signed(line + lines, "commit"), COMMIT_KIND) == (signing_key(0).public,)
    with pytest.raises(WrongBaseError, match=f"by trusted key {PUBLIC.hex()[:16]} that is not one of this commit"):
        trust.check(split_signed(line + wrong, "commit"), COMMIT_KIND, "commit")


@pytest.mark.parametrize(
    ("signers", "facts", "hint"),
    [
        (
            (),
            "is not signed by a trusted key",
            "have its publisher sign with --sign-key KEY; or leave --trusted-key out",
        ),
        ((2,), "; keys below it: ", "--trusted-key KEY trusts its publisher's, if that is one of them"),
    ],
)
def test_what_is_not_signed_says_what_to_do(signers: tuple[int, ...], facts: str, hint: str) -> None:
    line = encode_version(version(2))
    below = b"".join(signing_key(number).sign(line, COMMIT_KIND)[len(line) :] for number in signers)
    with pytest.raises(WrongBaseError, match=facts) as caught:
        Trust(frozenset([signing_key(0).public])).check(split_signed(line + below, "commit"), COMMIT_KIND, "commit")
    assert (caught.value.hint or "").startswith(hint)


@given(st.binary(max_size=300))
def test_any_bytes_are_split_or_refused(data: bytes) -> None:
    try:
        signed = split_signed(data, "commit")
    except DamagedError:
        return
    assert data.startswith(signed.line)

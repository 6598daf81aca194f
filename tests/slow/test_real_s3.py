"""The contract of stores on a real S3 server: in a plain bucket, a versioned one, and with few rights.

    AWS_ENDPOINT_URL=http://127.0.0.1:18000 AWS_ACCESS_KEY_ID=... AWS_SECRET_ACCESS_KEY=... \\
        AWS_DEFAULT_REGION=us-east-1 scripts/test tests/slow/test_real_s3.py

Buckets are made and removed again. A second user of the same server who owns nothing, for the rights, is named by
S3_OTHER_ACCESS_KEY_ID and S3_OTHER_SECRET_ACCESS_KEY. Any other remote is tested by
`DCR_TEST_REMOTE=URL scripts/test tests/test_store_servers.py -k Named`.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest

from dcr_cli.errors import ConflictError, TransportError, UnsupportedError
from dcr_cli.store.backend import Backend
from dcr_cli.store.opening import open_store
from store_contract import MOST, Clock, Place, RaceOfProcesses, StoreContract
from store_wrappers import FailsCalls, LosesTheAnswer, wrapping

LARGE_BYTES = 1 << 30
LIMIT_BYTES = 200 << 20
# Put a file and read it back, both in parts: the digest of what came, and the most memory that took.
LARGE_PROGRAM = """
import hashlib, resource, sys
from dcr_cli.store.opening import open_store
with open_store(sys.argv[1]) as store, open(sys.argv[2], "rb") as file:
    store.put("large", file)
    digest = hashlib.sha256()
    for chunk in store.stream("large"):
        digest.update(chunk)
print(digest.hexdigest(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10)
"""


@pytest.fixture(scope="module")
def client() -> Any:
    endpoint = os.environ.get("AWS_ENDPOINT_URL")
    if not endpoint:
        pytest.skip("AWS_ENDPOINT_URL names no S3 server to test")
    return boto3.client("s3", endpoint_url=endpoint)


def made(client: Any, *, is_versioned: bool) -> Iterator[str]:
    name = f"dcr-test-{secrets.token_hex(8)}"
    client.create_bucket(Bucket=name)
    if is_versioned:
        client.put_bucket_versioning(Bucket=name, VersioningConfiguration={"Status": "Enabled"})
    yield name
    for page in client.get_paginator("list_object_versions").paginate(Bucket=name):
        for each in page.get("Versions", []) + page.get("DeleteMarkers", []):
            client.delete_object(Bucket=name, Key=each["Key"], VersionId=each["VersionId"])
    client.delete_bucket(Bucket=name)


@pytest.fixture(scope="module")
def plain(client: Any) -> Iterator[str]:
    yield from made(client, is_versioned=False)


@pytest.fixture(scope="module")
def versioned(client: Any) -> Iterator[str]:
    yield from made(client, is_versioned=True)


class TestPlainBucket(StoreContract, RaceOfProcesses):
    @pytest.fixture
    def place(self, plain: str, tmp_path: Path) -> Place:
        return Place(f"s3://{plain}/{tmp_path.name}")

    def test_no_upload_is_left(self, client: Any, plain: str, place: Place, tmp_path: Path) -> None:
        """One that is broken off in the middle is given up there too."""
        (tmp_path / "a").write_bytes(bytes(40 << 20))
        with place.open() as store, (tmp_path / "a").open("rb") as file:
            with pytest.raises(ConflictError, match="shorter"):
                store.put("a", _Shrinking(file))  # type: ignore[arg-type]
            assert store.stat("a") is None
        assert "Uploads" not in client.list_multipart_uploads(Bucket=plain)


class _Shrinking:
    """A file that ends after 24 MiB, whatever its size was."""

    def __init__(self, file: Any) -> None:
        self.file = file
        self.name = file.name

    def tell(self) -> int:
        return int(self.file.tell())

    def seek(self, *place: int) -> int:
        return int(self.file.seek(*place))

    def read(self, size: int) -> bytes:
        return b"" if self.file.tell() >= 24 << 20 else bytes(self.file.read(size))


class TestVersionedBucket:
    """Some servers ignore the condition of a create there: they are found out, and are of use to one writer only."""

    def test_it_creates_once_or_is_refused(self, client: Any, versioned: str) -> None:
        client.put_object(Bucket=versioned, Key="probe", Body=b"1")
        try:
            client.put_object(Bucket=versioned, Key="probe", Body=b"2", IfNoneMatch="*")
            is_ignored = True
        except client.exceptions.ClientError:
            is_ignored = False
        with open_store(f"s3://{versioned}/a") as store:
            assert store.put_if_absent("dcr.json", b"ours")
            if is_ignored:
                with pytest.raises(UnsupportedError, match="could be created again") as caught:
                    store.prove_exclusive("dcr.json")
                assert caught.value.exit_code == 8
                assert "--single-writer" in (caught.value.hint or "")
            else:
                store.prove_exclusive("dcr.json")
                assert not store.put_if_absent("dcr.json", b"theirs")
            assert store.get("dcr.json", most_bytes=MOST) == b"ours"

    def test_one_writer(self, versioned: str) -> None:
        with open_store(f"s3://{versioned}/b", is_single_writer=True) as store:
            assert store.put_if_absent("dcr.json", b"ours")
            store.prove_exclusive("dcr.json")
            store.put("next.json", b"1")
            store.put("next.json", b"2")
            assert store.get("next.json", most_bytes=MOST) == b"2"
            store.delete("next.json")
            assert store.get("next.json", most_bytes=MOST) is None
            assert [entry.key for entry in store.list()] == ["dcr.json"]


class TestFewRights:
    """A user who may get and put, but not list: what is not there is denied."""

    @pytest.fixture
    def options(self, client: Any, plain: str) -> dict[str, object]:
        key, secret = (os.environ.get(f"S3_OTHER_{name}") for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"))
        if not key or not secret:
            pytest.skip("S3_OTHER_ACCESS_KEY_ID names no second user")
        statement = {
            "Effect": "Allow",
            "Principal": {"AWS": [os.environ.get("S3_OTHER_PRINCIPAL", "*")]},
            "Action": ["s3:GetObject", "s3:PutObject"],
            "Resource": [f"arn:aws:s3:::{plain}/few/*"],
        }
        client.put_bucket_policy(Bucket=plain, Policy=json.dumps({"Version": "2012-10-17", "Statement": [statement]}))
        return {"key": key, "secret": secret}

    def test_what_is_not_there_is_denied(self, plain: str, options: dict[str, object]) -> None:
        with open_store(f"s3://{plain}/few", options) as store:
            store.put("here", b"1")
            assert store.get("here", most_bytes=MOST) == b"1"
            assert store.stat("here") is not None
            for work in (lambda: store.get("a", most_bytes=MOST), lambda: store.stat("a"), lambda: store.list()):
                with pytest.raises(TransportError, match="access is denied") as caught:
                    work()
                assert not caught.value.retryable
            assert store.get("a", most_bytes=MOST, is_denied_absent=True) is None
            assert store.stat("a", is_denied_absent=True) is None
            with pytest.raises(TransportError, match="access is denied"):
                store.delete("here")

    def test_creating_is_tried_again(self, plain: str, options: dict[str, object]) -> None:
        wrappers: tuple[Callable[[Backend], Backend], ...] = (lambda each: FailsCalls(each, 2), LosesTheAnswer)
        for number, wrapper in enumerate(wrappers):
            with wrapping(wrapper), open_store(f"s3://{plain}/few", options, patience=Clock().patience()) as store:
                assert store.put_if_absent(f"created/{number}", b"ours")
                assert not store.put_if_absent(f"created/{number}", b"theirs")
                store.prove_exclusive(f"created/{number}")

    def test_a_wrong_secret_is_not_absence(self, plain: str, options: dict[str, object]) -> None:
        with open_store(f"s3://{plain}/few", {**options, "secret": "wrong"}) as store:
            for work in (
                lambda: store.get("a", most_bytes=MOST, is_denied_absent=True),
                lambda: store.stat("a", is_denied_absent=True),
            ):
                with pytest.raises(TransportError, match="SignatureDoesNotMatch"):
                    work()


def test_a_large_object_in_little_memory(plain: str, tmp_path: Path) -> None:
    block = secrets.token_bytes(1 << 20)
    digest = hashlib.sha256()
    with (tmp_path / "large").open("wb") as file:
        for number in range(LARGE_BYTES >> 20):
            part = number.to_bytes(4, "big") + block[4:]
            file.write(part)
            digest.update(part)
    program = [sys.executable, "-c", LARGE_PROGRAM, f"s3://{plain}/large", str(tmp_path / "large")]
    ended = subprocess.run(program, check=True, capture_output=True, text=True)
    came, peak_bytes = ended.stdout.split()
    assert came == digest.hexdigest()
    assert int(peak_bytes) < LIMIT_BYTES

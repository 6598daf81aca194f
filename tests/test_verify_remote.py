"""What show and verify tell of a remote's versions, and that damage in a remote is found, and pruning is not damage."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from dcr_cli.apply import apply
from dcr_cli.checkpoint.digest import blake3_text, object_digest
from dcr_cli.delta.file_rules import RANGE_BYTES
from dcr_cli.diff import diff
from dcr_cli.durable import open_folder
from dcr_cli.errors import DamagedError, NotFoundError, UsageError, WrongBaseError
from dcr_cli.fetch.position import position_at, write_position
from dcr_cli.prune import prune
from dcr_cli.remote.anchor import encode_anchor
from dcr_cli.remote.hint import GIVEN_UP, PREPARED, STREAMING, Hint, encode_hint
from dcr_cli.remote.keys import (
    HINT_KEY,
    HISTORY_KEY,
    MOST_VERSION,
    Place,
    anchor_file_key,
    anchor_key,
    commit_key,
    digests_key,
    manifest_key,
    payload_key,
)
from dcr_cli.remote.version import decode_version, encode_version
from dcr_cli.report import people, remotes
from dcr_cli.show import show
from dcr_cli.show_result import ShowAnchorResult, ShowResult
from dcr_cli.store.backend import Answer
from dcr_cli.verify import TensorDifference, verify
from dcr_cli.verify_remote import VerifyRemoteResult, verify_remote
from histories import HISTORY, Objects, Publisher, anchor_of, id_of, new_remote, serve
from receivers import write_rich_pair
from strategies import tensor_of, with_changes, write_checkpoint

GET_ONLY = frozenset({"list", "write", "absent"})
HEX = "0123456789abcdef" * 4


@dataclass(frozen=True)
class Published:
    """A remote: version 1 an anchor of `base`, 2 a delta, 3 a delta and an anchor of `target`, 4 a delta back."""

    objects: Objects
    url: str
    base: Path
    middle: Path
    target: Path


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Objects, Path]:
    root = tmp_path_factory.mktemp("remote")
    tensors = {"a": tensor_of("BF16", (300,), 1), "b": tensor_of("F32", (70, 3), 2), "c": tensor_of("U8", (33,), 3)}
    base = write_checkpoint(root / "base", tensors, shards=2, sidecars={"config.json": b"{}", "x/empty": b""})
    tensors["a"] = with_changes(tensors["a"], [0, 299])
    middle = write_checkpoint(root / "middle", tensors, shards=2, sidecars={"config.json": b"{}", "x/empty": b""})
    tensors["c"] = with_changes(tensors["c"], [5])
    target = write_checkpoint(root / "target", tensors, shards=2, sidecars={"config.json": b"{1}"})
    objects = new_remote()
    publisher = Publisher(objects)
    publisher.whole(base)
    publisher.delta(base, middle, root)
    publisher.delta(middle, target, root)
    publisher.add_anchor(3, target)
    publisher.delta(target, base, root)
    return objects, root


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch, prepared: tuple[Objects, Path]) -> Published:
    objects = prepared[0].copy()
    root = prepared[1]
    return Published(objects, serve(monkeypatch, objects), root / "base", root / "middle", root / "target")


def place(version: int) -> Place:
    return Place(version, id_of(version))


class TestShow:
    def test_a_version_is_as_its_delta(self, published: Published, tmp_path: Path) -> None:
        diff(published.base, published.middle, tmp_path / "delta")
        expected = show(tmp_path / "delta")
        published.objects.denied = GET_ONLY
        result = show(f"{published.url}@2")
        assert isinstance(result, ShowResult) and result.version is not None
        assert (result.base, result.target, result.rows) == (expected.base, expected.target, expected.rows)
        assert (result.encodings, result.payload_bytes) == (expected.encodings, expected.payload_bytes)
        assert (result.delta, result.is_deep, expected.is_deep) == (f"{published.url}@2", False, True)
        version = result.version
        assert (version.remote, version.version, version.id) == (published.url, 2, id_of(2))
        assert (version.has_anchor, version.signers, expected.version) == (False, (), None)
        commit = len(published.objects.data(commit_key(2)))
        assert result.delta_bytes == commit + sum(
            len(data) for key, (data, _) in published.objects.objects.items() if str(place(2)) in key
        )
        text = people.render(people.show_lines(result, verbose=False), None)
        assert "--deep fetches and checks its payloads too" in text and f"2, id {id_of(2)}" in text

    def test_documents_alone_are_fetched(self, published: Published) -> None:
        show(f"{published.url}@2")
        assert not [key for _, key in published.objects.calls if "payloads" in key]
        result = show(f"{published.url}@2", deep=True, jobs=2)
        assert result.is_deep and ("read", payload_key(place(2), 0)) in published.objects.calls

    def test_a_version_that_is_its_files(self, published: Published) -> None:
        result = show(f"{published.url}@1", deep=True)
        assert isinstance(result, ShowAnchorResult) and result.is_only_way and result.is_deep
        found = {str(path.relative_to(published.base)): path.stat().st_size for path in published.base.rglob("*.*")}
        assert {file.path: file.bytes for file in result.files} == found | {"x/empty": 0}
        assert {file.kind for file in result.files} == {"shard", "sidecar", "weight map"}
        assert result.anchor_bytes == sum(found.values())
        text = people.render(remotes.show_anchor_lines(result), None)
        assert f"anchor {published.url}@1: valid" in text and "config.json" in text

    def test_an_anchor_where_the_delta_was_pruned(self, published: Published) -> None:
        del published.objects.objects[manifest_key(place(3))]
        result = show(f"{published.url}@3")
        assert isinstance(result, ShowAnchorResult) and not result.is_only_way
        assert "delta      removed" in people.render(remotes.show_anchor_lines(result), None)

    def test_what_was_pruned(self, published: Published) -> None:
        del published.objects.objects[manifest_key(place(2))]
        with pytest.raises(NotFoundError, match="is there no more"):
            show(f"{published.url}@2")

    @pytest.mark.parametrize("version", [5, 9_999_999_999])
    def test_no_such_version(self, published: Published, version: int) -> None:
        published.objects.denied = GET_ONLY
        with pytest.raises(NotFoundError):
            show(f"{published.url}@{version}")

    def test_damage(self, published: Published) -> None:
        damage(published.objects, payload_key(place(2), 0))
        show(f"{published.url}@2")
        with pytest.raises(DamagedError, match="its blake3 differs"):
            show(f"{published.url}@2", deep=True)
        damage(published.objects, manifest_key(place(2)))
        with pytest.raises(DamagedError, match=r"manifest\.zst: is not the object that the commit names"):
            show(f"{published.url}@2")

    def test_a_delta_that_starts_from_another_state(self, published: Published) -> None:
        objects = published.objects
        last = decode_version(objects.data(commit_key(4)), 4, "commit").version
        assert last.delta is not None
        other = replace(last, parts=replace(last.delta, base=last.target))
        objects.set(commit_key(4), encode_version(other))
        facts = [each.facts for each in verify_remote(published.url).damages]
        assert "starts from another state than that of version 3" in facts

    def test_what_nobody_trusted_signed(self, published: Published) -> None:
        pytest.importorskip("cryptography")
        with pytest.raises(WrongBaseError, match="is not signed by a trusted key"):
            show(f"{published.url}@2", trusted_keys=[HEX])

    def test_a_folder_of_this_name_wins(self, published: Published, tmp_path: Path) -> None:
        diff(published.base, published.middle, tmp_path / "delta@2")
        result = show(str(tmp_path / "delta@2"))
        assert isinstance(result, ShowResult) and result.version is None

    def test_an_address_without_a_version(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="is the address of a remote"):
            show("s3://bucket/path")
        (tmp_path / HISTORY_KEY).touch()
        with pytest.raises(NotFoundError, match="it is a remote") as caught:
            show(tmp_path)
        assert caught.value.hint == f"dcr show {tmp_path}@N shows its version N"


class TestVerifyCheckpoint:
    @pytest.mark.parametrize(("version", "name"), [(1, "base"), (2, "middle"), (3, "target"), (None, "base")])
    def test_a_version(self, published: Published, version: int | None, name: str) -> None:
        published.objects.denied = GET_ONLY
        result = verify(getattr(published, name), remote=published.url, version=version)
        assert result.matches and result.checked_tensors == 3
        assert result.reference == f"version {version or 4} of {published.url}"
        assert not [key for _, key in published.objects.calls if "payloads" in key or "/files/" in key]

    def test_other_bits_than_a_delta_leads_to(self, published: Published) -> None:
        result = verify(published.target, remote=published.url, version=2)
        assert not result.matches
        assert [(each.tensor, each.kind) for each in result.differences] == [("c", "digest")]
        assert [(each.path, each.kind) for each in result.sidecars] == [
            ("config.json", "bytes"),
            ("x/empty", "missing"),
        ]

    def test_other_bits_than_an_anchor_tells(self, published: Published) -> None:
        result = verify(published.middle, remote=published.url, version=1)
        (difference,) = result.differences
        assert not result.matches and (difference.tensor, difference.kind) == ("", "content")
        assert difference.expected.startswith("blake3:") and difference.expected != difference.found
        assert isinstance(difference, TensorDifference) and result.sidecars == ()
        text = people.render(people.verify_lines(result), None)
        assert f"its tensors together: content {difference.expected} expected" in text

    def test_the_anchor_stands_in_for_a_pruned_delta(self, published: Published) -> None:
        del published.objects.objects[manifest_key(place(3))]
        assert verify(published.target, remote=published.url, version=3).matches
        del published.objects.objects[anchor_key(place(3))]
        with pytest.raises(NotFoundError, match="is there no more"):
            verify(published.target, remote=published.url, version=3)

    def test_the_version_that_was_pulled(self, published: Published, tmp_path: Path) -> None:
        receiver = tmp_path / "receiver"
        shutil.copytree(published.base, receiver)
        diff(published.base, published.middle, tmp_path / "delta")
        apply(tmp_path / "delta", receiver)
        remember(published, receiver, 2)
        assert verify(receiver, remote=published.url).reference == f"version 2 of {published.url}"
        assert verify(receiver, remote=published.url).matches
        assert not verify(receiver, remote=published.url, version=4).matches

    def test_a_remote_that_was_rolled_back(self, published: Published, tmp_path: Path) -> None:
        receiver = tmp_path / "receiver"
        shutil.copytree(published.base, receiver)
        (receiver / ".dcr").mkdir()
        remember(published, receiver, 4)
        del published.objects.objects[commit_key(4)]
        with pytest.raises(WrongBaseError, match="its log ends below version 4"):
            verify(receiver, remote=published.url)

    def test_another_history_is_no_record(self, published: Published, tmp_path: Path) -> None:
        receiver = tmp_path / "receiver"
        shutil.copytree(published.base, receiver)
        (receiver / ".dcr").mkdir()
        remember(published, receiver, 2, history="e" * 32)
        assert verify(receiver, remote=published.url).reference == f"version 4 of {published.url}"

    def test_what_makes_no_sense(self, published: Published) -> None:
        with pytest.raises(UsageError):
            verify(published.base, remote=published.url, against=published.base)
        with pytest.raises(UsageError):
            verify(published.base, version=3)
        with pytest.raises(NotFoundError, match="there is no version 7"):
            verify(published.base, remote=published.url, version=7)
        published.objects.objects = new_remote().objects
        with pytest.raises(NotFoundError, match="holds no versions"):
            verify(published.base, remote=published.url)

    def test_what_nobody_trusted_signed(self, published: Published) -> None:
        pytest.importorskip("cryptography")
        with pytest.raises(WrongBaseError):
            verify(published.base, remote=published.url, trusted_keys=[HEX])


def remember(published: Published, receiver: Path, version: int, *, history: str = HISTORY) -> None:
    """Let a receiver be one that was pulled to a version."""
    data = published.objects.data(commit_key(version)).replace(HISTORY.encode(), history.encode())
    position = position_at(decode_version(data, version, "commit"), published.url)
    with open_folder(receiver / ".dcr") as home:
        write_position(home, position)


def damage(objects: Objects, key: str, at: int = -1) -> None:
    data = bytearray(objects.data(key))
    data[at] ^= 1
    objects.set(key, bytes(data))


class TestVerifyRemote:
    @pytest.mark.parametrize("deep", [False, True])
    def test_whole(self, published: Published, deep: bool) -> None:
        published.objects.denied = GET_ONLY
        told: list[tuple[str, int, int]] = []
        result = verify_remote(published.url, deep=deep, jobs=3, progress=lambda *each: told.append(each))
        assert result.matches and result.damages == () and result.is_deep == deep
        assert (result.head, result.checked_commits, result.checked_deltas, result.checked_anchors) == (4, 4, 3, 2)
        assert result.pruned == 0 and (result.checked_bytes > 0) == deep == bool(told)
        objects = published.objects.objects
        fetched = sum(len(data) for key, (data, _) in objects.items() if "/files/" in key or "/payloads/" in key)
        assert result.checked_bytes == (fetched if deep else 0)
        assert f"whole: {published.url}, newest version 4" in lines(result)

    def test_every_object_counts(self, published: Published) -> None:
        """Whatever is bound and is flipped, cut, longer or gone is found by the object's own name, with --deep."""
        keys = [key for key in published.objects.objects if key != HISTORY_KEY and not key.startswith("commits/")]
        whole = dict(published.objects.objects)
        for key in keys:
            data = whole[key][0]
            for bad in {data[:-1], data + b"\0", bytes([*data[:-1], data[-1] ^ 1]) if data else b"x", None} - {data}:
                if bad is None:
                    del published.objects.objects[key]
                else:
                    published.objects.set(key, bad)
                result = verify_remote(published.url, deep=True, jobs=1)
                is_pruned = bad is None and key in (
                    manifest_key(place(2)),
                    manifest_key(place(3)),
                    anchor_key(place(1)),
                )
                assert result.matches == is_pruned, (key, bad)
                assert is_pruned or any(damage.what.endswith(key) for damage in result.damages), (key, result.damages)
                published.objects.objects = dict(whole)

    def test_sizes_are_seen_without_fetching(self, published: Published) -> None:
        objects = published.objects
        for key in (payload_key(place(3), 0), anchor_file_key(place(3), "config.json")):
            objects.set(key, objects.data(key) + b"\0")
        damage(objects, payload_key(place(2), 0))
        result = verify_remote(published.url)
        assert [each.what.rpartition("/")[2] for each in result.damages] == ["000000.safetensors", "config.json"]
        assert not [key for name, key in objects.calls if name == "read" and ("/files/" in key or "payloads" in key)]
        assert len(verify_remote(published.url, deep=True).damages) == 3

    def test_a_log_without_end_is_looked_at_so_far(self, published: Published) -> None:
        class Endless(Objects):
            """Whatever commit is asked for, there is something."""

            def read(self, key: str, begin: int, size: int | None) -> Answer:
                if key.startswith("commits/") and key not in self.objects:
                    return Answer(0, 2, 2, iter([b"{}"]))
                return super().read(key, begin, size)

        published.objects.__class__ = Endless
        result = verify_remote(published.url)
        assert result.head == MOST_VERSION and not result.matches
        assert 1000 <= len(result.damages) < 3000 and result.checked_commits == 4

    def test_pruned_is_not_damaged(self, published: Published) -> None:
        prune(published.url, keep=1, keep_within=0)
        assert verify_remote(published.url, deep=True).matches
        for version in (2, 3):
            for key in [key for key in published.objects.objects if key.startswith(f"versions/{place(version)}")]:
                del published.objects.objects[key]
        result = verify_remote(published.url, deep=True)
        assert result.matches and result.pruned == 1 and "4, 1 of them pruned" in lines(result)

    def test_what_a_prune_never_removes(self, published: Published) -> None:
        objects = published.objects
        del objects.objects[manifest_key(place(4))]
        (found,) = verify_remote(published.url).damages
        assert (
            found.what.endswith(manifest_key(place(4))) and "the newest anchor, of version 3, is older" in found.facts
        )
        del objects.objects[anchor_key(place(3))]
        missing = [each.what for each in verify_remote(published.url).damages]
        assert missing == [f"{published.url}/{key}" for key in (anchor_key(place(3)), manifest_key(place(4)))]
        del objects.objects[anchor_key(place(1))]
        (found,) = verify_remote(published.url).damages
        assert found.facts == "is missing, though the newest commit names it and there is no newer one"

    def test_an_anchor_with_a_hole(self, published: Published) -> None:
        """Right in every range, and yet not the state of its version: the document itself is wrong."""
        objects = published.objects
        anchor, files = anchor_of(published.target, place(3))
        path = next(path for path in files if path.endswith(".safetensors"))
        changed = bytearray(files[path])
        changed[-1] ^= 1
        objects.set(anchor_file_key(place(3), path), bytes(changed))
        other = published.target.parent / "other"
        shutil.copytree(published.target, other, dirs_exist_ok=True)
        (other / path).write_bytes(bytes(changed))
        lying, _ = anchor_of(other, place(3))
        lying_document = json.loads(encode_anchor(lying))
        lying_document["target"] = json.loads(encode_anchor(anchor))["target"]
        document = json.dumps(lying_document, sort_keys=True, separators=(",", ":")).encode() + b"\n"
        objects.set(anchor_key(place(3)), document)
        assert verify_remote(published.url).matches
        (found,) = verify_remote(published.url, deep=True).damages
        assert found.facts == "the tensors of its files do not make up the content digest of its target"

    def test_an_anchor_with_another_header(self, published: Published) -> None:
        """Right in every range, and yet not the file whose header its blake3 is of."""
        objects = published.objects
        anchor, files = anchor_of(published.target, place(3))
        document = json.loads(encode_anchor(anchor))
        entry = next(each for each in document["files"] if each["kind"] == 1)
        changed = files[entry["path"]].replace(b'"dtype": ', b'"dtype":\t')
        entry["ranges"] = [blake3_text(object_digest(changed))]
        objects.set(anchor_file_key(place(3), entry["path"]), changed)
        line = json.dumps(document, sort_keys=True, separators=(",", ":")).encode() + b"\n"
        objects.set(anchor_key(place(3)), line)
        assert verify_remote(published.url).matches
        (found,) = verify_remote(published.url, deep=True).damages
        assert found.facts == "is not the file that the anchor names: its blake3 differs"

    def test_the_log(self, published: Published) -> None:
        objects = published.objects
        whole = dict(objects.objects)
        objects.set(commit_key(2), b"")
        (found,) = verify_remote(published.url).damages
        assert (found.what, found.facts) == (f"{published.url}/{commit_key(2)}", "is empty")
        objects.objects = dict(whole)
        objects.set(commit_key(2), objects.data(commit_key(2)).replace(b'"publisher":""', b'"publisher":"x"'))
        objects.set(commit_key(2), objects.data(commit_key(2)).replace(b'"trainer"', b'"tamper"'))
        damages = verify_remote(published.url).damages
        assert [each.what.rpartition("/")[2] for each in damages] == ["0000000003.json"]
        assert damages[0].facts == "does not follow the commit of version 2 that is there"

    def test_what_nobody_trusted_signed(self, published: Published) -> None:
        pytest.importorskip("cryptography")
        result = verify_remote(published.url, trusted_keys=[HEX])
        assert [each.facts for each in result.damages] == ["is not signed by a trusted key"] * 4

    def test_no_versions_and_no_remote(self, published: Published) -> None:
        published.objects.objects = new_remote().objects
        with pytest.raises(NotFoundError, match="holds no versions yet"):
            verify_remote(published.url, deep=True)
        published.objects.objects.clear()
        with pytest.raises(NotFoundError, match=f"it has no {HISTORY_KEY}"):
            verify_remote(published.url)


def lines(result: VerifyRemoteResult) -> str:
    return people.render(remotes.verify_lines(result), None)


@pytest.mark.parametrize("make", [write_rich_pair])
def test_every_kind_of_change(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, make: Callable[[Path], tuple[Path, Path]]
) -> None:
    base, target = make(tmp_path)
    objects = new_remote()
    publisher = Publisher(objects)
    publisher.whole(base)
    publisher.delta(base, target, tmp_path)
    publisher.add_anchor(2, target)
    url = serve(monkeypatch, objects)
    assert verify_remote(url, deep=True).matches
    assert verify(target, remote=url, version=2).matches and verify(base, remote=url, version=1).matches
    del objects.objects[digests_key(place(2))]
    (found,) = verify_remote(url).damages
    assert found.facts == "is missing, though the manifest beside it is there"


def test_ranges_and_headers_come_in_any_parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Files of more than one range, read in parts that end nowhere in particular."""
    monkeypatch.setattr("dcr_cli.remote.checking.RANGE_BYTES", 1000)
    monkeypatch.setattr("dcr_cli.delta.file_rules.RANGE_BYTES", 1000)
    tensors = {f"t{number:02d}": tensor_of("BF16", (number, 37), number) for number in range(24)}
    checkpoint = write_checkpoint(tmp_path / "checkpoint", tensors, sidecars={"notes": b"n" * 2000})
    for size in (1, 7, 64, 999, 1001):
        objects = new_remote()
        monkeypatch.setattr(
            Objects,
            "body_of",
            lambda self, data, size=size: iter([data[at : at + size] for at in range(0, len(data), size)]),
        )
        Publisher(objects).whole(checkpoint)
        assert verify_remote(serve(monkeypatch, objects), deep=True).matches, size
        damage(objects, anchor_file_key(place(1), "model.safetensors"), -2500)
        (found,) = verify_remote(serve(monkeypatch, objects), deep=True).damages
        assert "are not what the anchor names" in found.facts
    assert RANGE_BYTES == 64 << 20


class TestUnnamed:
    """What nobody names is counted, and is no damage."""

    def found(self, published: Published) -> tuple[int | None, int | None]:
        result = verify_remote(published.url)
        assert result.matches
        return result.unnamed_objects, result.unnamed_bytes

    def test_nothing_where_all_is_named(self, published: Published) -> None:
        published.objects.set(f"versions/{place(2)}/decision.json", b"of a version that was prepared")
        published.objects.set(f"versions/{place(2)}/parts/00000.json", b"of one that was made in parts")
        published.objects.set("elsewhere", b"no part of the remote")
        assert self.found(published) == (0, 0)
        assert "unnamed" not in people.render(remotes.verify_lines(verify_remote(published.url)), None)

    @pytest.mark.parametrize(
        "key",
        [
            payload_key(place(2), 9),
            payload_key(Place(2, "e" * 32), 0),
            payload_key(Place(5, "e" * 32), 0),
            manifest_key(place(1)),
            anchor_file_key(place(3), "another"),
            anchor_file_key(place(2), "model.safetensors"),
            anchor_key(Place(3, "e" * 32)),
        ],
    )
    def test_each_object_that_nobody_names(self, published: Published, key: str) -> None:
        published.objects.set(key, b"1234567")
        assert self.found(published) == (1, 7)
        said = "1 object, 7 B: no commit, anchor or next.json names them"
        assert said in people.render(remotes.verify_lines(verify_remote(published.url, deep=True)), None)

    @pytest.mark.parametrize(("state", "objects"), [(STREAMING, 0), (PREPARED, 0), (GIVEN_UP, 1)])
    def test_what_is_being_made_is_named(self, published: Published, state: str, objects: int) -> None:
        making = Place(5, "e" * 32)
        published.objects.set(payload_key(making, 0), b"1")
        published.objects.set(HINT_KEY, encode_hint(Hint(HISTORY, making, state, "")))
        assert self.found(published) == (objects, objects)

    def test_what_is_committed_meanwhile_is_named(self, published: Published, monkeypatch: pytest.MonkeyPatch) -> None:
        """What was listed before its commit was there."""
        objects = published.objects
        commit, read = objects.data(commit_key(4)), objects.read
        objects.remove(commit_key(4))
        assert self.found(published)[0]

        def commit_first(key: str, begin: int, size: int | None) -> Answer:
            if key == HINT_KEY:
                objects.set(commit_key(4), commit)
            return read(key, begin, size)

        monkeypatch.setattr(objects, "read", commit_first)
        assert self.found(published) == (0, 0)

    def test_of_a_commit_that_cannot_be_read_nobody_knows_what_it_names(self, published: Published) -> None:
        published.objects.set(commit_key(4), b"{}")
        result = verify_remote(published.url)
        assert (result.matches, result.unnamed_objects) == (False, 0)

    def test_a_remote_that_does_not_list(self, published: Published) -> None:
        published.objects.set(payload_key(place(2), 9), b"1")
        published.objects.denied = GET_ONLY
        assert self.found(published) == (None, None)

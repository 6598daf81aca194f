"""What a prune keeps, in which order it removes, and that a way to what is kept exists at every moment."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from dcr_cli.anchor import anchor
from dcr_cli.errors import ConflictError, NotFoundError, TransportError, UsageError
from dcr_cli.prune import PruneResult, prune
from dcr_cli.push import push
from dcr_cli.remote.decision import ABORT, COMMIT, encode_decision
from dcr_cli.remote.hint import GIVEN_UP, PREPARED, STREAMING, Hint, encode_hint
from dcr_cli.remote.keys import (
    HINT_KEY,
    PRUNE_KEY,
    STAGED,
    Place,
    anchor_file_key,
    anchor_key,
    commit_key,
    decision_key,
    digests_key,
    manifest_key,
    part_key,
    payload_key,
    prepared_key,
)
from dcr_cli.remote.prune_lock import LEFT_AFTER_SECONDS, PruneLock
from dcr_cli.store.backend import Answer, Entry, PermanentError, Status, new_name
from dcr_cli.store.store import Store
from dcr_cli.verify_remote import verify_remote
from histories import CREATED, DAY, HISTORY, KilledError, Objects, id_of, new_remote, publish, serve
from store_wrappers import Allows, wrapping
from strategies import write_tiny_steps

HOUR = 3600.0
Pruning = Callable[..., PruneResult]


@pytest.fixture
def objects() -> Objects:
    return new_remote()


@pytest.fixture
def pruned(monkeypatch: pytest.MonkeyPatch, objects: Objects) -> Pruning:
    """Prunes with no regard for age unless told, by the store's clock alone."""
    url = serve(monkeypatch, objects)
    monkeypatch.setattr(time, "time", lambda: 1 / 0)
    return lambda **terms: prune(url, **({"keep_within": 0.0, "lease": 7 * DAY} | terms))


def deltas_in(objects: Objects, head: int) -> set[int]:
    """The versions whose manifest is there; then all of it has to be."""
    found = set()
    for version in range(1, head + 1):
        place = Place(version, id_of(version))
        if manifest_key(place) in objects.objects:
            found.add(version)
            assert digests_key(place) in objects.objects and payload_key(place, 1) in objects.objects, version
    return found


def anchors_in(objects: Objects, head: int) -> set[int]:
    found = set()
    for version in range(1, head + 1):
        place = Place(version, id_of(version))
        if anchor_key(place) in objects.objects:
            found.add(version)
            assert anchor_file_key(place, "model.safetensors") in objects.objects, version
    return found


def can_be_had(objects: Objects, head: int, at: int = 0) -> set[int]:
    """The versions that somebody at version `at`, 0 for nothing, can get to."""
    deltas, reached = deltas_in(objects, head), anchors_in(objects, head) | {at} - {0}
    for version in range(1, head + 1):
        if version in deltas and version - 1 in reached:
            reached.add(version)
    return reached


def test_only_an_anchor_and_what_follows_it_is_kept(objects: Objects, pruned: Pruning) -> None:
    publish(objects, "addDddDdd")
    result = pruned(keep=1)
    assert (result.kept, result.anchors) == ((8, 9), (4, 7))
    assert deltas_in(objects, 9) == {8, 9} and anchors_in(objects, 9) == {4, 7}
    assert can_be_had(objects, 9) == {4, 7, 8, 9}
    assert [(each.what, each.version) for each in result.outlived] == [
        ("version", 7), ("version", 6), ("version", 5), ("version", 4), ("version", 3), ("version", 2), ("anchor", 1),
    ]  # fmt: skip
    assert result.deleted_objects == result.outlived_objects == 6 * 4 + 2
    assert result.freed_bytes == result.outlived_bytes > 0
    assert all(commit_key(version) in objects.objects for version in range(1, 10))
    assert PRUNE_KEY not in objects.objects
    assert pruned(keep=1).outlived == ()


@pytest.mark.parametrize(
    ("kinds", "keep", "kept", "anchors"),
    [
        ("a", 1, (), (1,)),
        ("adddd", 1, (2, 3, 4, 5), (1,)),
        ("addDddd", 3, (5, 6, 7), (1, 4)),
        # The oldest of the newest needs the deltas from the anchor before it.
        ("addDddDd", 5, (4, 5, 6, 7, 8), (4, 7)),
        ("addDDDDd", 3, (6, 7, 8), (6, 7)),
        # An anchor for the oldest of the newest, none for those that it leads to.
        ("aDDDDDDD", 5, (4, 5, 6, 7, 8), (4, 7, 8)),
        # After a break the versions before it need an anchor of their own.
        ("adddadd", 5, (2, 3, 4, 6, 7), (1, 5)),
        ("adddadd", 3, (6, 7), (1, 5)),
        ("adddaadd", 3, (7, 8), (5, 6)),
    ],
)  # fmt: skip
def test_what_is_kept_has_a_way_to_it(
    objects: Objects, pruned: Pruning, kinds: str, keep: int, kept: tuple[int, ...], anchors: tuple[int, ...]
) -> None:
    publish(objects, kinds)
    pruned(keep=keep)
    found = deltas_in(objects, len(kinds)), anchors_in(objects, len(kinds))
    assert found == (set(kept), set(anchors))


def test_what_is_young_is_kept(objects: Objects, pruned: Pruning) -> None:
    publisher = publish(objects, "addDdd")
    objects.now += DAY
    for kind in "dDdD":
        publisher.empty_delta()
        if kind == "D":
            publisher.add_empty_anchor(publisher.head)
    result = pruned(keep=1, keep_within=DAY, dry_run=False)
    assert (result.kept, result.anchors) == ((5, 6, 7, 8, 9, 10), (4, 8, 10))
    objects.now += DAY
    assert pruned(keep=1, keep_within=DAY).anchors == (8, 10)
    assert deltas_in(objects, 10) == {10}


def test_what_an_older_commit_names_as_anchor_is_kept(objects: Objects, pruned: Pruning) -> None:
    """The newest commit was made by somebody who did not know the two anchors that came after its own."""
    publisher = publish(objects, "adddd")
    publisher.add_empty_anchor(3)
    publisher.add_empty_anchor(4)
    publisher.anchor = 1
    publisher.empty_delta()
    assert pruned(keep=1).anchors == (1, 3, 4)


class TestLeases:
    def test_a_receiver_can_go_on_from_where_it_is(self, objects: Objects, pruned: Pruning) -> None:
        publisher = publish(objects, "addDddDdd")
        publisher.acknowledge(2, "slow")
        publisher.acknowledge(5, "other")
        publisher.acknowledge(3, "other")
        result = pruned(keep=1)
        assert [(each.receiver, each.version) for each in result.receivers] == [("other", 5), ("slow", 2)]
        assert can_be_had(objects, 9, 2) >= set(range(2, 10))
        assert anchors_in(objects, 9) == {4, 7}
        assert f"acks/{publisher.place(2)}/slow.applied" in objects.objects

    def test_a_lease_ends(self, objects: Objects, pruned: Pruning) -> None:
        publisher = publish(objects, "addDddDdd")
        publisher.acknowledge(2, "slow")
        publisher.acknowledge(9, "fast")
        objects.now += 7 * DAY
        result = pruned(keep=1)
        assert result.receivers == ()
        assert deltas_in(objects, 9) == {8, 9}
        # The acknowledgements of what is kept stay.
        assert [key for key in objects.objects if key.startswith("acks/")] == [
            f"acks/{publisher.place(9)}/fast.applied"
        ]

    def test_the_words_that_a_lease_rests_on_stay(self, objects: Objects, pruned: Pruning) -> None:
        """Version 5 is of no use to a receiver that is at it; its acknowledgement is."""
        publisher = publish(objects, "addDddDdd")
        publisher.acknowledge(4, "slow")
        publisher.acknowledge(5, "slow")
        publisher.acknowledge(5, "slow", STAGED)
        for _ in range(2):
            assert [each.version for each in pruned(keep=1).receivers] == [5]
            assert deltas_in(objects, 9) == {6, 7, 8, 9}
        assert f"acks/{publisher.place(5)}/slow.applied" in objects.objects

    def test_whoever_has_only_staged_is_at_the_version_before(self, objects: Objects, pruned: Pruning) -> None:
        publisher = publish(objects, "addDddDdd")
        publisher.acknowledge(6, "slow", STAGED)
        assert [(each.receiver, each.version) for each in pruned(keep=1).receivers] == [("slow", 5)]
        assert deltas_in(objects, 9) == {6, 7, 8, 9}

    def test_words_for_versions_that_are_not_published_count_for_nothing(
        self, objects: Objects, pruned: Pruning
    ) -> None:
        publisher = publish(objects, "addDddDdd")
        publisher.acknowledge(2, "forger", own="e" * 32)
        assert pruned(keep=1).receivers == ()
        assert deltas_in(objects, 9) == {8, 9}

    @pytest.mark.parametrize("key", ["payload", "digests"])
    def test_what_is_listed_late_keeps_its_lease(self, objects: Objects, pruned: Pruning, key: str) -> None:
        publisher = publish(objects, "addddddD")
        publisher.acknowledge(3, "slow")
        late = payload_key(publisher.place(7), 1) if key == "payload" else digests_key(publisher.place(7))

        class ListsLate(Objects):
            def entries(self, prefix: str) -> Iterator[Entry]:
                return (entry for entry in super().entries(prefix) if entry.key != late)

        objects.__class__ = ListsLate
        pruned(keep=1)
        assert deltas_in(objects, 8) == {4, 5, 6, 7, 8}

    def test_a_way_that_is_cut_already_keeps_nothing(self, objects: Objects, pruned: Pruning) -> None:
        publisher = publish(objects, "addDddDdd")
        publisher.acknowledge(2, "slow")
        del objects.objects[manifest_key(publisher.place(4))]
        pruned(keep=1)
        assert deltas_in(objects, 9) == {8, 9}


class TestOrphans:
    PLACE = Place(3, "e" * 32)

    def publish(self, objects: Objects, version: int, state: str | None) -> Place:
        place = Place(version, "e" * 32)
        publish(objects, "add").begin(place, state, is_prepared=True)
        objects.set(f"acks/{place}/r.staged", b"word")
        objects.set(f"anchors/{place}/files/x", b"file")
        return place

    def left(self, objects: Objects, place: Place) -> list[str]:
        return [key for key in objects.objects if str(place) in key]

    @pytest.mark.parametrize(("version", "state"), [(3, None), (4, None), (4, GIVEN_UP), (3, STREAMING), (3, PREPARED)])
    def test_after_a_day(self, objects: Objects, pruned: Pruning, version: int, state: str | None) -> None:
        place = self.publish(objects, version, state)
        objects.now += DAY - 1
        pruned()
        assert len(self.left(objects, place)) == 5
        objects.now += 1
        objects.calls.clear()
        assert {each.what for each in pruned().outlived} == {"orphan"}
        assert self.left(objects, place) == []
        # It is given up, and what a commit would be made of goes first.
        removed = [key for name, key in objects.calls if name == "write" and str(place) in key]
        assert removed[:3] == [decision_key(place), prepared_key(place), manifest_key(place)]

    def test_what_is_still_written_to_stays(self, objects: Objects, pruned: Pruning) -> None:
        place = self.publish(objects, 4, None)
        objects.now += DAY - 1
        objects.set(payload_key(place, 1), b"more")
        objects.now += 2
        pruned()
        assert len(self.left(objects, place)) == 6

    def test_what_is_decided_to_be_committed_stays(self, objects: Objects, pruned: Pruning) -> None:
        place = self.publish(objects, 4, None)
        objects.set(decision_key(place), encode_decision(HISTORY, place, COMMIT))
        objects.now += DAY
        pruned()
        assert prepared_key(place) in objects.objects and manifest_key(place) in objects.objects

    def test_what_is_to_be_committed_and_has_lost_goes(self, objects: Objects, pruned: Pruning) -> None:
        place = self.publish(objects, 3, None)
        objects.set(decision_key(place), encode_decision(HISTORY, place, COMMIT))
        objects.now += DAY
        pruned()
        assert self.left(objects, place) == []

    def test_parts_are_given_up_and_count_no_more_before_they_go(self, objects: Objects, pruned: Pruning) -> None:
        place = Place(4, "e" * 32)
        publish(objects, "add")
        objects.set(payload_key(place, 1), b"payload")
        objects.set(part_key(place, "00001.zst"), b"table")
        objects.set(part_key(place, "00001.json"), b"part")
        objects.now += DAY
        objects.calls.clear()
        pruned()
        removed = [key for name, key in objects.calls if name == "write" and str(place) in key]
        parts = part_key(place, "00001.json"), payload_key(place, 1), part_key(place, "00001.zst")
        assert removed == [decision_key(place), *parts, decision_key(place)]
        assert self.left(objects, place) == []

    def test_what_was_given_up_goes_with_the_decision_last(self, objects: Objects, pruned: Pruning) -> None:
        place = self.publish(objects, 4, None)
        objects.set(decision_key(place), encode_decision(HISTORY, place, ABORT))
        objects.now += DAY
        objects.calls.clear()
        pruned()
        removed = [key for name, key in objects.calls if name == "write" and f"versions/{place}" in key]
        assert removed[-1] == decision_key(place) and self.left(objects, place) == []

    @pytest.mark.parametrize("state", [STREAMING, PREPARED])
    def test_what_is_being_made_stays(self, objects: Objects, pruned: Pruning, state: str) -> None:
        """A push that was stopped for long goes on with what it has sent."""
        place = self.publish(objects, 4, state)
        objects.now += 100 * DAY
        pruned()
        assert len(self.left(objects, place)) == 5

    @pytest.mark.parametrize("data", [b"", b"nonsense", b"{}\n", b"x" * (1 << 17)])
    def test_what_may_be_made_stays(self, objects: Objects, pruned: Pruning, data: bytes) -> None:
        """Of a hint that is none, nobody knows what it says."""
        place = self.publish(objects, 4, None)
        objects.set(HINT_KEY, data)
        objects.now += 100 * DAY
        result = pruned()
        assert (result.outlived, result.unknown) == ((), (HINT_KEY,))
        assert len(self.left(objects, place)) == 5 and objects.data(HINT_KEY) == data

    def test_a_hint_that_cannot_be_got(self, objects: Objects, pruned: Pruning) -> None:
        place = self.publish(objects, 4, PREPARED)
        objects.now += 100 * DAY
        before = dict(objects.objects)

        class NoHint(Objects):
            def read(self, key: str, begin: int, size: int | None) -> Answer:
                if key == HINT_KEY:
                    raise PermanentError("answers with status 500")
                return super().read(key, begin, size)

        objects.__class__ = NoHint
        with pytest.raises(TransportError, match=r"next\.json: answers with status 500"):
            pruned()
        assert objects.objects == before and len(self.left(objects, place)) == 5

    def test_what_has_no_time_stamp_stays(self, objects: Objects, pruned: Pruning) -> None:
        objects.tells_time = False
        place = self.publish(objects, 4, None)
        pruned()
        objects.tells_time = True
        objects.now += 100 * DAY
        pruned()
        assert len(self.left(objects, place)) == 5

    def test_anchors_that_were_never_finished(self, objects: Objects, pruned: Pruning) -> None:
        publisher = publish(objects, "add")
        objects.set(anchor_file_key(publisher.place(3), "model.safetensors"), b"half")
        assert pruned().outlived == ()
        objects.now += DAY
        assert [(each.what, each.version) for each in pruned().outlived] == [("orphan", 3)]
        assert not any(key.startswith(f"anchors/{publisher.place(3)}") for key in objects.objects)

    def test_what_killed_writers_left(self, objects: Objects, pruned: Pruning) -> None:
        publisher = publish(objects, "add")
        left = new_name(payload_key(publisher.place(3), 0))
        objects.set(left, b"half")
        assert pruned().leftovers == 0
        objects.now += DAY
        result = pruned()
        assert (result.leftovers, result.deleted_objects, result.freed_bytes) == (1, 1, 4)
        assert left not in objects.objects and result.unknown == ()

    def test_what_is_committed_meanwhile_stays(self, objects: Objects, pruned: Pruning) -> None:
        publisher = publish(objects, "add")
        publisher.empty_delta()
        commit, _ = objects.objects.pop(commit_key(4))
        objects.now += DAY

        class CommitsMeanwhile(Objects):
            def read(self, key: str, begin: int, size: int | None) -> Answer:
                if key == commit_key(4) and ("read", key) in self.calls:
                    self.set(key, commit)
                return super().read(key, begin, size)

        objects.__class__ = CommitsMeanwhile
        pruned()
        assert 4 in deltas_in(objects, 4) and can_be_had(objects, 4) == {1, 2, 3, 4}

    @pytest.mark.parametrize("is_understood", [True, False])
    def test_what_is_gone_on_with_meanwhile_stays(self, objects: Objects, pruned: Pruning, is_understood: bool) -> None:
        publisher = publish(objects, "add")
        publisher.empty_delta()
        objects.objects.pop(commit_key(4))
        objects.now += DAY
        before = dict(objects.objects)

        class GoesOn(Objects):
            def read(self, key: str, begin: int, size: int | None) -> Answer:
                if key == commit_key(4) and ("read", key) in self.calls:
                    self.set(HINT_KEY, hint)
                return super().read(key, begin, size)

        hint = encode_hint(Hint(HISTORY, publisher.place(4), STREAMING, CREATED)) if is_understood else b"?"
        objects.__class__ = GoesOn
        assert pruned().deleted_objects == 0
        assert before.items() <= objects.objects.items()


class TestAnchorsPublishedAgain:
    """An anchor that is put while a prune removes it is left whole."""

    @pytest.mark.parametrize("had_document", [True, False])
    def test_its_files_stay(self, objects: Objects, pruned: Pruning, had_document: bool) -> None:
        publisher = publish(objects, "aDDDD")
        place = publisher.place(2)
        document = anchor_key(place)
        if not had_document:
            del objects.objects[document]
            objects.now += DAY
        before = objects.objects.keys() | {document}

        class Publishes(Objects):
            def status(self, key: str) -> Status | None:
                # When the document has gone, or before the first file does.
                if key == document and document not in self.objects:
                    publisher.add_empty_anchor(2)
                return super().status(key)

        objects.__class__ = Publishes
        pruned(keep=1)
        assert {key for key in before if key.startswith(f"anchors/{place}")} <= objects.objects.keys()
        assert 2 in anchors_in(objects, 5)

    @pytest.mark.parametrize("may_look", [True, False])
    def test_what_was_taken_is_put_again(self, tmp_path: Path, may_look: bool) -> None:
        """A file that is removed before the document comes."""
        step, remote = write_tiny_steps(tmp_path, 1)[0], tmp_path / "remote"
        push(step, remote)
        (document,) = remote.glob("anchors/*.json")
        document.unlink()

        class Prunes(Allows):
            def called(self, name: str, key: str) -> None:
                super().called(name, key)
                if name == "write" and key == f"anchors/{document.name}":
                    for path in ("config.json", "step.txt"):
                        (document.with_suffix("") / "files" / path).unlink()

        get = ["dcr.json", "commits/*", *(["anchors/*"] if may_look else [])]
        with wrapping(lambda backend: Prunes(backend, get=get, put=["anchors/*"])):
            assert not anchor(step, remote).already
        assert verify_remote(remote, deep=True).matches == may_look


def test_a_version_that_comes_while_it_is_listed(objects: Objects, pruned: Pruning) -> None:
    publisher = publish(objects, "addDddDdd")

    class Busy(Objects):
        def entries(self, prefix: str) -> Iterator[Entry]:
            found = list(super().entries(prefix))
            publisher.empty_delta()
            return iter(found)

    objects.__class__ = Busy
    result = pruned(keep=1)
    assert result.is_head_reachable and result.kept == (8, 9) and result.in_doubt == ()
    assert publisher.head > 9 and can_be_had(objects, publisher.head) == {4, 7, *range(8, publisher.head + 1)}


def test_each_version_is_removed_by_its_manifest_first(objects: Objects, pruned: Pruning) -> None:
    publisher = publish(objects, "aDdDD")
    publisher.acknowledge(3, "r")
    place = publisher.place(3)
    objects.set(prepared_key(place), b"{}")
    objects.set(f"versions/{place}/parts/0.json", b"{}")
    objects.now += 30 * DAY
    objects.calls.clear()
    pruned(keep=1)
    removed = [
        key.removeprefix(f"versions/{place}/") for name, key in objects.calls if name == "write" if str(place) in key
    ]
    assert removed == [
        "manifest.zst", "digests.zst", "payloads/000000.safetensors", "payloads/000001.safetensors", "parts/0.json",
        "commit.json", f"acks/{place}/r.applied",
    ]  # fmt: skip
    anchor = [
        key for name, key in objects.calls if name == "write" and str(publisher.place(2)) in key and "anchors" in key
    ]
    assert anchor == [anchor_key(publisher.place(2)), anchor_file_key(publisher.place(2), "model.safetensors")]


def test_unknown_names_stay(objects: Objects, pruned: Pruning) -> None:
    publisher = publish(objects, "aDDD")
    unknown = ("README", "commits/x", f"versions/{publisher.place(2)}/notes.txt", "acks/x", "anchors/0000000001.json")
    for key in unknown:
        objects.set(key, b"?")
    objects.now += 30 * DAY
    assert sorted(pruned(keep=1).unknown) == sorted(unknown)
    assert deltas_in(objects, 4) == {4} and set(unknown) <= objects.objects.keys()


def test_a_dry_run_changes_nothing(monkeypatch: pytest.MonkeyPatch, objects: Objects) -> None:
    url = serve(monkeypatch, objects)
    publish(objects, "addDddDdd")
    monkeypatch.setattr(time, "time", lambda: objects.now)
    before = dict(objects.objects)
    objects.denied = frozenset({"write"})
    dry = prune(url, keep=1, keep_within=0, dry_run=True)
    assert objects.objects == before and dry.dry_run and dry.deleted_objects == dry.freed_bytes == 0
    objects.denied = frozenset()
    wet = prune(url, keep=1, keep_within=0)
    assert wet.outlived == dry.outlived != () and wet.freed_bytes == dry.outlived_bytes


class TestDamage:
    """Where something is missing already, nothing is removed that may still be of use."""

    def test_no_way_to_the_newest(self, objects: Objects, pruned: Pruning) -> None:
        publisher = publish(objects, "addDddddd")
        del objects.objects[manifest_key(publisher.place(6))]
        before = dict(objects.objects)
        result = pruned(keep=1)
        assert not result.is_head_reachable and result.outlived == () and objects.objects == before

    @pytest.mark.parametrize("key", ["payload", "digests"])
    def test_a_delta_that_is_not_whole_leads_nowhere(self, objects: Objects, pruned: Pruning, key: str) -> None:
        publisher = publish(objects, "addDddddD")
        place = publisher.place(7)
        del objects.objects[payload_key(place, 1) if key == "payload" else digests_key(place)]
        result = pruned(keep=2)
        # The anchor of version 9 is enough for the newest; of version 8 nobody knows a way any more.
        assert result.is_head_reachable and result.anchors == (4, 9)

    def test_an_anchor_that_is_not_whole_leads_nowhere(self, objects: Objects, pruned: Pruning) -> None:
        publisher = publish(objects, "addDddDdd")
        del objects.objects[anchor_file_key(publisher.place(7), "model.safetensors")]
        result = pruned(keep=1)
        assert (result.anchors, result.in_doubt, result.kept) == ((1, 4), (7,), (5, 6, 7, 8, 9))
        assert anchor_key(publisher.place(7)) in objects.objects

    def test_the_newest_versions_stay_though_damaged(self, objects: Objects, pruned: Pruning) -> None:
        publisher = publish(objects, "addDddDdd")
        del objects.objects[payload_key(publisher.place(5), 0)]
        pruned(keep=5)
        assert manifest_key(publisher.place(5)) in objects.objects


class TestLock:
    @pytest.mark.parametrize("data", [b'{"owner": "another"}', b"nonsense", b"[]", b""])
    def test_a_second_prune_is_refused(self, objects: Objects, pruned: Pruning, data: bytes) -> None:
        publish(objects, "aDDD")
        objects.set(PRUNE_KEY, data)
        before = objects.objects.keys() | set()
        for _ in range(3):
            objects.now += LEFT_AFTER_SECONDS / 3 - 1
            with pytest.raises(ConflictError, match=r"another prune is at work, for \d+ s"):
                pruned(keep=1)
        assert objects.objects.keys() == before

    def test_one_that_was_killed_is_taken_over_an_hour_later(self, objects: Objects, pruned: Pruning) -> None:
        """However often somebody asks meanwhile."""
        publish(objects, "aDDD")
        objects.set(PRUNE_KEY, b'{"owner": "another"}')
        for _ in range(3):
            with pytest.raises(ConflictError):
                pruned(keep=1)
            objects.now += LEFT_AFTER_SECONDS / 3
        pruned(keep=1)
        assert PRUNE_KEY not in objects.objects and deltas_in(objects, 4) == {4}

    def test_who_is_asked_for_its_age_still_holds_it(self, objects: Objects, pruned: Pruning) -> None:
        with PruneLock(Store(objects, "here")):
            publish(objects, "aDDD")
            with pytest.raises(ConflictError, match="for 0 s"):
                pruned(keep=1)
        assert PRUNE_KEY not in objects.objects

    def test_a_store_without_a_clock_never_says_that_it_was_left(self, objects: Objects, pruned: Pruning) -> None:
        publish(objects, "aDDD")
        objects.tells_time = False
        objects.set(PRUNE_KEY, b"another")
        objects.now += 100 * DAY
        with pytest.raises(ConflictError, match=r"another prune is at work$"):
            pruned(keep=1)

    def test_it_is_renewed_and_noticed_when_lost(self, objects: Objects) -> None:
        ticks = [0.0]
        with PruneLock(Store(objects, "here"), clock=lambda: ticks[0]) as lock:
            objects.now += HOUR
            lock.keep()
            assert objects.objects[PRUNE_KEY][1] == objects.now - HOUR
            ticks[0] = 600.0
            lock.keep()
            assert objects.objects[PRUNE_KEY][1] == objects.now
            objects.set(PRUNE_KEY, b"another")
            lock.keep()
            ticks[0] = 1200.0
            with pytest.raises(ConflictError, match="taken over"):
                lock.keep()
        assert objects.data(PRUNE_KEY) == b"another"

    def test_an_interrupt_lets_go_of_it(
        self, objects: Objects, pruned: Pruning, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        publish(objects, "aDDD")

        def interrupt(self: Store, key: str) -> None:
            monkeypatch.undo()
            raise KeyboardInterrupt

        monkeypatch.setattr(Store, "delete", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pruned(keep=1)
        assert PRUNE_KEY not in objects.objects

    @pytest.mark.parametrize("was_left", [False, True])
    def test_a_clock_that_cannot_be_asked_lets_go_of_it(
        self, objects: Objects, pruned: Pruning, was_left: bool
    ) -> None:
        publish(objects, "aDDD")

        class Fails(Objects):
            def status(self, key: str) -> Status | None:
                if key == PRUNE_KEY and b"another" not in self.data(PRUNE_KEY):
                    raise PermanentError("answers with status 500")
                return super().status(key)

        if was_left:
            objects.set(PRUNE_KEY, b'{"owner": "another"}')
            with pytest.raises(ConflictError):
                pruned(keep=1)
            objects.now += LEFT_AFTER_SECONDS
        objects.__class__ = Fails
        with pytest.raises(TransportError, match="status 500"):
            pruned(keep=1)
        assert PRUNE_KEY not in objects.objects

    def test_a_failure_lets_go_of_it(self, objects: Objects, pruned: Pruning) -> None:
        publish(objects, "aDDD")
        objects.denied = frozenset({"list"})
        with pytest.raises(TransportError):
            pruned(keep=1)
        assert PRUNE_KEY not in objects.objects


def test_what_makes_no_sense_is_refused(pruned: Pruning, objects: Objects) -> None:
    with pytest.raises(UsageError):
        pruned(keep=0)
    with pytest.raises(UsageError):
        pruned(lease=-1.0)
    objects.objects.clear()
    with pytest.raises(NotFoundError):
        pruned()


def check_ways(objects: Objects, head: int, leases: Sequence[int]) -> None:
    """Whatever has a manifest can be had from nothing or by a receiver; the newest by everybody."""
    reached = can_be_had(objects, head)
    assert head in reached
    for at in leases:
        beyond = can_be_had(objects, head, at)
        assert head in beyond
        reached |= beyond
    assert deltas_in(objects, head) <= reached


def kill_everywhere(objects: Objects, head: int, leases: Sequence[int], terms: dict[str, float]) -> None:
    """Prune, killed at each call of the store in turn and then done again: one end, and a way at every moment."""
    prune_module = import_module("dcr_cli.store.opening")
    backends: list[Objects] = []
    prune_module._backend, kept = lambda *asked: backends[-1], prune_module._backend  # type: ignore[attr-defined]
    try:
        backends.append(objects.copy())
        prune("memory://x", **terms)  # type: ignore[arg-type]
        end = backends[-1].objects
        check_ways(backends[-1], head, leases)
        for call in range(len(backends[-1].calls)):
            killed = objects.copy()
            killed.dies_at = call
            backends.append(killed)
            with pytest.raises(KilledError):
                prune("memory://x", **terms)  # type: ignore[arg-type]
            check_ways(killed, head, leases)
            if call % 5 == 0:
                killed.dies_at = None
                killed.now += 1.5 * HOUR
                prune("memory://x", **terms)  # type: ignore[arg-type]
                assert killed.objects.keys() == end.keys()
    finally:
        prune_module._backend = kept  # type: ignore[attr-defined]


def test_killed_anywhere_a_way_is_left(objects: Objects) -> None:
    publisher = publish(objects, "addDdaDddDdd")
    publisher.acknowledge(9, "slow")
    publisher.begin(Place(13, "e" * 32), None)
    publisher.begin(Place(3, "e" * 32), None, is_prepared=True)
    objects.now += 3 * DAY
    kill_everywhere(objects, 12, [9], {"keep": 2, "keep_within": 0.0})


@settings(max_examples=25)
@given(
    kinds=st.lists(st.sampled_from("ddddDDa"), max_size=11),
    keep=st.integers(1, 6),
    acknowledged=st.dictionaries(st.sampled_from(["r1", "r2"]), st.integers(1, 12)),
)
def test_random_histories(kinds: list[str], keep: int, acknowledged: dict[str, int]) -> None:
    objects = new_remote()
    publisher = publish(objects, ["a", *kinds])
    head = publisher.head
    places = {receiver: min(version, head) for receiver, version in acknowledged.items()}
    for receiver, version in places.items():
        publisher.acknowledge(version, receiver)
    objects.now += 2 * DAY
    before = can_be_had(objects, head)
    newest = set(range(max(1, head - keep + 1), head + 1))
    end = objects.copy()
    kill_everywhere(objects, head, list(places.values()), {"keep": keep, "keep_within": 0.0})
    with pytest.MonkeyPatch.context() as monkeypatch:
        prune(serve(monkeypatch, end), keep=keep, keep_within=0.0)
    assert newest <= before and newest <= can_be_had(end, head)


def test_no_empty_folders_are_left(tmp_path: Path) -> None:
    steps = write_tiny_steps(tmp_path, 4)
    for step in steps:
        push(step, tmp_path / "remote", anchor_every=1)
    assert prune(tmp_path / "remote", keep=1, keep_within=0.0).deleted_objects > 0
    folders = [path for path in (tmp_path / "remote").rglob("*") if path.is_dir()]
    assert folders and all(any(folder.iterdir()) for folder in folders)


def test_anchors_have_their_files(objects: Objects) -> None:
    """The checks above see a remote in which a document outlives what it names."""
    publisher = publish(objects, "aD")
    del objects.objects[anchor_file_key(publisher.place(2), "model.safetensors")]
    with pytest.raises(AssertionError):
        anchors_in(objects, 2)

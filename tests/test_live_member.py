"""Live receivers of a remote: versions by their address, and versions that are committed for all of them together."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dcr_cli import commit
from dcr_cli.changes import places
from dcr_cli.delta.delta import open_delta
from dcr_cli.errors import (
    ConflictError,
    DamagedError,
    NotFoundError,
    TransportError,
    UnsupportedError,
    UsageError,
    WrongBaseError,
)
from dcr_cli.live import Fate, Member, Receiver, content_of, offer
from dcr_cli.push import push
from dcr_cli.remote.history import require_history
from dcr_cli.remote.keys import payload_key
from dcr_cli.remote.log import Log
from dcr_cli.status import status
from dcr_cli.store.opening import open_store
from live_modules import FORMS, Engine, held, loaded, new_bits, write
from live_remotes import ReplicatedRemote, TrainedRemote
from relays import relaying, store_of


class Remote(TrainedRemote):
    """With what its receivers are asked for."""

    def module(self, version: int) -> Any:
        return loaded(Engine, self.versions[version - 1])

    def said(self) -> list[str]:
        return sorted(path.name for path in (self.root / "remote").glob("acks/*/*"))


@pytest.fixture
def remote(tmp_path: Path) -> Remote:
    return Remote(tmp_path)


def test_versions_by_their_address(remote: Remote) -> None:
    second, third = remote.publish(), remote.publish()
    module = remote.module(1)
    receiver = Receiver(module, checkpoint=remote.versions[0])
    with pytest.raises(WrongBaseError, match="starts from content"):
        receiver.stage(f"{remote.url}@3")
    for number, checkpoint in ((2, second), (3, third)):
        staged = receiver.stage(f"{remote.url}@{number}")
        assert (staged.version, staged.delta) == (number, f"{remote.url}@{number}")
        assert f"@{number}: version {number}, {staged.changed_elements:,} elements>" in repr(staged)
        receiver.apply()
        assert held(module) == held(loaded(Engine, checkpoint))
        assert receiver.published is not None and receiver.published.version.number == number
        assert content_of([receiver.digest()]) == open_content(remote, number)
    with pytest.raises(UnsupportedError, match="has only an anchor"):
        receiver.stage(f"{remote.url}@1")
    with pytest.raises(NotFoundError, match="there is no version 4"):
        receiver.stage(f"{remote.url}@4")


def open_content(remote: Remote, number: int) -> bytes:
    with open_store(remote.url) as store:
        return Log(store, require_history(store).id).require(number).version.target.content


def test_a_damaged_payload_of_a_remote_is_refused(remote: Remote) -> None:
    remote.publish()
    with open_store(remote.url) as store:
        place = Log(store, require_history(store).id).require(2).version.place
    path = Path(remote.url) / payload_key(place, 0)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedError, match="is not the payload that the manifest lists"):
        Receiver(remote.module(1)).stage(f"{remote.url}@2")


def test_two_members_switch_together(remote: Remote) -> None:
    modules = [remote.module(1), remote.module(1)]
    members = [
        Member(Receiver(module, checkpoint=remote.versions[0]), remote.url, version=1, name=f"rank-{number}")
        for number, module in enumerate(modules)
    ]
    for number in (2, 3):
        before = held(modules[0])
        target = remote.publish(prepare=True)
        for member in members:
            staged = member.stage_next()
            assert staged is not None and staged.version == number
            assert member.stage_next() is staged
            assert (member.staged_version, member.version) == (number, number - 1)
            with pytest.raises(ConflictError, match="is prepared, not committed"):
                member.apply()
            assert member.wait(0) is Fate.OPEN
        assert [held(module) for module in modules] == [before, before]
        assert [name for name in remote.said() if name.endswith(".applied")] == ["rank-0.applied", "rank-1.applied"] * (
            number - 2
        )
        commit(remote.url, quorum=2)
        for member, module in zip(members, modules, strict=True):
            assert member.wait(0) is Fate.COMMITTED
            assert member.apply() == number == member.version
            assert held(module) == held(loaded(Engine, target))
    assert len(remote.said()) == 8
    for member in members:
        with member:
            assert member.stage_next() is None and member.catch_up() == ()


def test_a_version_that_is_given_up_is_forgotten(remote: Remote) -> None:
    module = remote.module(1)
    with Member(Receiver(module), remote.url, version=1, name="one") as member:
        remote.publish(prepare=True)
        assert member.stage_next() is not None
        commit(remote.url, abort=True)
        assert member.wait(60) is Fate.GIVEN_UP
        before = held(module)
        with pytest.raises(ConflictError, match="is given up, not committed") as told:
            member.apply()
        assert told.value.hint == "stage_next forgets it, and stages what comes in its place"
        assert held(module) == before
        target = remote.publish()
        assert member.catch_up() == (2,)
        assert held(module) == held(loaded(Engine, target))
        assert remote.said() == ["one.applied", "one.staged", "one.staged"]


def test_what_is_prepared_in_its_place_is_staged(remote: Remote) -> None:
    """Nobody has to see that the first one was given up: a quorum for the second one would wait for ever."""
    module = remote.module(1)
    with Member(Receiver(module), remote.url, version=1, name="one") as member:
        remote.publish(prepare=True)
        first = member.stage_next()
        assert first is not None and member.stage_next() is first
        target = remote.publish(prepare=True)
        second = member.stage_next()
        assert second is not None and second != first and member.stage_next() is second
        assert commit(remote.url, quorum=1).staged == ("one",)
        assert member.apply() == 2
    assert held(module) == held(loaded(Engine, target))


def test_what_is_prepared_is_staged_while_catching_up(remote: Remote) -> None:
    """And is what is waited for then: there is something, so that nobody waits for more."""
    remote.publish()
    remote.publish(prepare=True)
    with Member(Receiver(remote.module(1)), remote.url, version=1, name="one") as member:
        assert member.catch_up() == (2,) and member.staged_version == 3
        staged = member.stage_next()
        assert staged is not None and staged.version == 3
        # Whoever has made the receiver forget it has it staged again.
        member._receiver.give_up()
        assert member.staged_version is None
        assert member.stage_next() == staged and member.staged_version == 3
        assert remote.said() == ["one.applied", "one.staged", "one.staged"]


def test_a_relay_shows_who_asks_it(remote: Remote, tmp_path: Path) -> None:
    receiver = Receiver(remote.module(1))
    with (
        relaying([store_of(Path(remote.url))], tmp_path / "spool") as relay,
        Member(receiver, relay.url, version=1, name="one"),
    ):
        found = status(relay.url).relay
        assert found is not None and "one" in [child.name for child in found.children]


def test_one_that_died_comes_back_from_its_checkpoint(remote: Remote) -> None:
    """Staged, committed while it was dead, and two versions later."""
    with Member(Receiver(remote.module(1)), remote.url, version=1, name="one") as member:
        remote.publish(prepare=True)
        member.stage_next()
    commit(remote.url, quorum=1)
    remote.publish()
    target = remote.publish()
    module = remote.module(1)
    with Member(Receiver(module, checkpoint=remote.versions[0]), remote.url, version=1, name="one") as member:
        assert member.catch_up() == (2, 3, 4)
    assert held(module) == held(loaded(Engine, target))
    assert [name for name in remote.said() if name == "one.applied"] == ["one.applied"] * 3


def test_an_apply_that_fails_is_not_said(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    from dcr_cli.live import bits

    target = remote.publish()
    module = remote.module(1)
    with Member(Receiver(module), remote.url, version=1, name="one") as member:
        member.stage_next()
        with monkeypatch.context() as patched:
            patched.setattr(bits.HostPatch, "write", lambda patch: (_ for _ in ()).throw(MemoryError))
            for _ in range(2):
                with pytest.raises(MemoryError):
                    member.apply()
                assert (member.version, remote.said()) == (1, ["one.staged"])
        # What was begun is finished, whatever the remote says meanwhile.
        with monkeypatch.context() as patched:
            patched.setattr(Member, "fate", lambda member: Fate.OPEN)
            assert member.apply() == 2
        assert held(module) == held(loaded(Engine, target))
        assert remote.said() == ["one.applied", "one.staged"]


def test_what_could_not_be_said_is_said_later(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    from dcr_cli.live import member as member_module

    remote.publish()
    with Member(Receiver(remote.module(1)), remote.url, version=1, name="one") as member:
        with monkeypatch.context() as patched:
            patched.setattr(member_module, "say", lambda *args: (_ for _ in ()).throw(ConflictError("acks", "no")))
            with pytest.raises(ConflictError):
                member.stage_next()
            assert member.staged_version == 2 and remote.said() == []
        assert member.stage_next() is member._receiver.staged
        assert remote.said() == ["one.staged"]
        with monkeypatch.context() as patched:
            patched.setattr(member_module, "say", lambda *args: (_ for _ in ()).throw(ConflictError("acks", "no")))
            with pytest.raises(ConflictError):
                member.apply()
        assert member.version == 2
        assert member.catch_up() == ()
        assert remote.said() == ["one.applied", "one.staged"]


class Unsayable:
    """Has nothing said, within; and counts what was tried."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch, self.tries = monkeypatch, 0

    def _refuse(self, *args: object) -> None:
        self.tries += 1
        raise TransportError("acks", "did not answer")

    def __enter__(self) -> Unsayable:
        self._undo = self._monkeypatch.context()
        self._undo.__enter__().setattr("dcr_cli.live.member.say", self._refuse)
        return self

    def __exit__(self, *error: Any) -> None:
        self._undo.__exit__(*error)


@pytest.mark.parametrize("call", ["apply", "stage_next", "catch_up", "announce", "speak"])
def test_every_call_says_first_what_could_not_be_said(
    remote: Remote, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    remote.publish()
    receiver = Receiver(remote.module(1), checkpoint=remote.versions[0])
    with Member(receiver, remote.url, version=1, name="one") as member:
        member.stage_next()
        with Unsayable(monkeypatch), pytest.raises(TransportError):
            member.apply()
        assert (member.version, member.staged_version, member.is_all_said) == (2, None, False)
        assert remote.said() == ["one.staged"]
        # Nothing else is done as long as that cannot be said.
        remote.publish()
        with Unsayable(monkeypatch) as unsayable, pytest.raises(TransportError):
            getattr(member, call)()
        assert (unsayable.tries, member.version, member.staged_version) == (1, 2, None)
        found = getattr(member, call)()
        assert member.is_all_said and remote.said().count("one.applied") == (2 if call == "catch_up" else 1)
        if call == "apply":
            assert found == 2
            with pytest.raises(UsageError, match="no version is staged"):
                member.apply()


def test_what_cannot_be_said_is_told_before_anything_is_written(
    remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, module = remote.publish(), remote.module(1)
    old = held(module)
    with Member(Receiver(module), remote.url, version=1, name="one") as member:
        with Unsayable(monkeypatch):
            for call in (member.stage_next, member.apply):
                with pytest.raises(TransportError):
                    call()
                assert (held(module), member.version, member.staged_version) == (old, 1, 2)
        # A mixture is finished all the same.
        member.speak()
        with monkeypatch.context() as patched:
            patched.setattr("dcr_cli.live.bits.HostPatch.write", lambda patch: (_ for _ in ()).throw(MemoryError))
            with pytest.raises(MemoryError):
                member.apply()
        member._note(member._own, "applied")
        with Unsayable(monkeypatch), pytest.raises(TransportError):
            member.apply()
        assert held(module) == held(loaded(Engine, target)) and member.version == 2
        assert member.apply() == 2
        assert len([name for name in remote.said() if name == "one.applied"]) == 2


@pytest.mark.parametrize("call", ["apply", "stage_next", "catch_up", "announce"])
@pytest.mark.parametrize("moment", ["applied", "noted"])
def test_what_stops_between_the_two_notes_of_an_apply_is_gone_over(
    remote: Remote, monkeypatch: pytest.MonkeyPatch, call: str, moment: str
) -> None:
    target, module = remote.publish(), remote.module(1)

    def stop_after(do: Any) -> Any:
        def stopped(*args: Any) -> None:
            do(*args)
            raise KeyboardInterrupt

        return stopped

    with Member(Receiver(module, checkpoint=remote.versions[0]), remote.url, version=1, name="one") as member:
        member.stage_next()
        with monkeypatch.context() as patched:
            if moment == "applied":
                patched.setattr(Receiver, "apply", stop_after(Receiver.apply))
            else:
                patched.setattr(Member, "_note", stop_after(Member._note))
            with pytest.raises(KeyboardInterrupt):
                member.apply()
        assert (member.version, member.staged_version, member.is_all_said) == (2, None, False)
        assert getattr(member, call)() == {"apply": 2, "catch_up": ()}.get(call)
        assert (member.version, member.is_all_said) == (2, True)
        assert remote.said() == ["one.applied", "one.staged"] and held(module) == held(loaded(Engine, target))


def test_the_whole_way_is_looked_at(remote: Remote) -> None:
    for _ in range(3):
        remote.publish()
    remote.publish(prepare=True)
    with Member(Receiver(remote.module(1)), remote.url, version=1) as member:
        with pytest.raises(UsageError, match="no version is staged"):
            member.check_way(2)
        member.stage_next()
        for version in (0, 1, 2, 3, 4):
            member.check_way(version)
        with pytest.raises(ConflictError, match="@5: is not committed"):
            member.check_way(5)
        (payload,) = Path(remote.url).glob("versions/0000000004-*/payloads/*")
        kept = payload.read_bytes()
        payload.write_bytes(kept[:-1])
        with pytest.raises(DamagedError, match=r"bytes, .* expected"):
            member.check_way(4)
        payload.unlink()
        with pytest.raises(NotFoundError, match="is there no more"):
            member.check_way(4)
        (manifest,) = Path(remote.url).glob("versions/0000000003-*/manifest*")
        manifest.unlink()
        with pytest.raises(NotFoundError, match="@3: its delta is there no more"):
            member.check_way(4)
        member.check_way(2)


def test_a_break_on_the_way_is_told_of(remote: Remote) -> None:
    remote.publish()
    remote.publish(no_delta=True)
    with Member(Receiver(remote.module(1)), remote.url, version=1) as member:
        member.stage_next()
        with pytest.raises(UnsupportedError, match="@3: has only an anchor"):
            member.check_way(3)


def test_other_tensors_on_the_way_are_told_of(remote: Remote) -> None:
    remote.publish()
    forms = {**FORMS, "more.weight": ("F32", (3,))}
    path = write(remote.root / "v3", forms, new_bits(forms))
    push(path, remote.url, baseline=remote.root / "baseline", encodings=remote.encodings, jobs=1)
    with Member(Receiver(remote.module(1)), remote.url, version=1) as member:
        member.stage_next()
        with pytest.raises(UnsupportedError, match=r"@3: has other tensors than the module: more\.weight"):
            member.check_way(3)


def test_what_is_signed_and_what_is_not(remote: Remote, keys: tuple[Path, Path]) -> None:
    private = keys[0]
    public = Path(f"{private}.pub")
    with pytest.raises(WrongBaseError, match="is not signed by a trusted key"):
        Member(Receiver(remote.module(1)), remote.url, version=1, trusted_keys=[str(public)])
    with pytest.raises(WrongBaseError, match="is not signed by a trusted key"):
        Receiver(remote.module(1), trusted_keys=[str(public)]).stage(f"{remote.url}@1")
    remote.publish(prepare=True)
    with Member(Receiver(remote.module(1)), remote.url, version=1, name="one", receiver_key=private) as member:
        member.stage_next()
    assert commit(remote.url, quorum=1, receivers=[str(public)]).staged == ("one",)
    with pytest.raises(UsageError, match="needs its name"):
        Member(Receiver(remote.module(1)), remote.url, version=1, receiver_key=private)


def test_what_was_loaded_at_a_version_says_so(remote: Remote) -> None:
    remote.publish()
    with Member(Receiver(remote.module(2), checkpoint=remote.versions[1]), remote.url, version=2, name="one") as member:
        member.announce()
        assert remote.said() == ["one.applied"]
        member.announce()
    receiver = Receiver(remote.module(1), checkpoint=remote.versions[0])
    with Member(receiver, remote.url, version=2, name="two") as member, pytest.raises(WrongBaseError, match="is not v"):
        member.announce()
    with Member(Receiver(remote.module(2)), remote.url, version=2, name="two") as member:
        with pytest.raises(UsageError, match="which tensors there are is not known"):
            member.announce()
        remote.publish()
        member.stage_next()
        # It holds all there is, and so it is shown.
        member.announce()
    assert remote.said() == ["one.applied", "two.applied", "two.staged"]


def test_one_that_holds_slices_says_nothing_without_evidence(remote: Remote) -> None:
    remote.publish()
    make = partial(Engine, 0, 2)
    for checkpoint, version in ((remote.versions[0], 1), (None, 1)):
        module = loaded(make, remote.versions[0])
        receiver = Receiver(module, checkpoint=checkpoint)
        with Member(receiver, remote.url, version=version, name="slice") as member:
            if checkpoint is not None:
                assert member.catch_up() == (2,)
                assert remote.said() == ["slice.applied", "slice.staged"]
                continue
            before = held(module)
            for say in (member.stage_next, member.catch_up, member.announce):
                with pytest.raises(UsageError, match="nothing shows that the module is at this version"):
                    say()
            assert (member.staged_version, receiver.staged, held(module)) == (None, None, before)
    # Nobody is told anything by one that has no name; and it does not claim what is not known.
    with Member(Receiver(module), remote.url, version=1) as member:
        assert member.catch_up() == (2,)
    assert held(module) == held(loaded(make, remote.versions[1]))
    assert len(remote.said()) == 2


def test_a_member_is_at_the_version_that_it_says(remote: Remote) -> None:
    remote.publish()
    receiver = Receiver(remote.module(1), checkpoint=remote.versions[0])
    receiver.learn()
    with pytest.raises(WrongBaseError, match="which is not version 2"):
        Member(receiver, remote.url, version=2)
    with Member(receiver, remote.url, version=1) as member, pytest.raises(UsageError, match="no version is staged"):
        member.apply()


@pytest.mark.parametrize("call", ["announce", "stage_next", "catch_up"])
def test_a_module_at_another_version_is_told_which_one_it_is_at(remote: Remote, call: str) -> None:
    remote.publish()
    remote.publish()
    receiver = Receiver(remote.module(1), checkpoint=remote.versions[0])
    with Member(receiver, remote.url, version=2) as member:
        with pytest.raises(WrongBaseError, match=r"at content .* \(version 1\), which is not version 2") as told:
            getattr(member, call)()
        assert told.value.hint == "say the version that the module's checkpoint is at: version=1"


@pytest.mark.parametrize("version", [0, 3, 99])
def test_a_version_that_is_not_there_is_told_of_at_once(remote: Remote, version: int) -> None:
    with pytest.raises(NotFoundError, match=f"there is no version {version}, .*: 1 is there"):
        Member(Receiver(remote.module(1)), remote.url, version=version)
    remote.publish()
    with pytest.raises(NotFoundError, match=r"there is no version 99, .*: 1 to 2 are there"):
        Member(Receiver(remote.module(1)), remote.url, version=99)


@pytest.mark.parametrize("version", ["1", 1.0, True, None, -1, 10**10])
def test_what_is_no_version(remote: Remote, version: Any) -> None:
    with pytest.raises(UsageError, match=r"^version: is .*, the number of a version expected"):
        Member(Receiver(remote.module(1)), remote.url, version=version)


def test_one_without_a_name_says_nothing_and_sees_the_same(remote: Remote) -> None:
    remote.publish()
    receiver = Receiver(remote.module(1), checkpoint=remote.versions[0])
    with Member(receiver, remote.url, version=1) as member:
        member.announce()
        assert member.is_all_said and remote.said() == []
    receiver = Receiver(remote.module(1), checkpoint=remote.versions[0])
    with Member(receiver, remote.url, version=2) as member, pytest.raises(WrongBaseError, match="is not version 2"):
        member.announce()


class Host(ReplicatedRemote, Remote):
    """With ranks that hold slices."""

    def ranks(self, version: int = 1) -> list[Any]:
        return [loaded(make, self.versions[version - 1]) for make in RANKS]

    def member(self, rank: int, module: Any, **options: Any) -> Member:
        receiver = Receiver(module, checkpoint=self.versions[0])
        given = {"version": 1, "name": f"rank-{rank}", "changes": self.changes, **options}
        return Member(receiver, self.url, **given)


RANKS = [partial(Engine, rank, 2) for rank in range(2)]


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_the_way_is_looked_at_without_what_is_decoded(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is read when it is staged, and not while requests wait."""
    with host.member(0, host.ranks()[0]) as member:
        host.publish()
        host.publish()
        host.pull()
        member.stage_next()
        with monkeypatch.context() as patched:
            patched.setattr(offer, "read_changes", lambda found: pytest.fail("is read"))
            member.check_way(3)
        assert member.apply() == 2 and member.catch_up() == (3,)


def test_ranks_that_hold_slices_switch_together_by_what_a_pull_decodes(host: Host) -> None:
    modules = host.ranks()
    members = [host.member(rank, module) for rank, module in enumerate(modules)]
    target = host.publish(prepare=True)
    for member in members:
        # The pull has not come: nobody waits in here, and nobody says anything.
        assert (member.stage_next(), member.awaited_version, member.staged_version) == (None, 2, None)
    with pytest.raises(ConflictError, match="0 of 3 receivers have staged version 2 in time"):
        commit(host.url, quorum=3)
    assert host.pull(receiver="host").staged == 2
    for member in members:
        staged = member.stage_next()
        assert staged is not None and (staged.version, member.awaited_version) == (2, None)
        assert Path(staged.delta).name.startswith("prepared-0000000002-")
    assert commit(host.url, quorum=3).staged == ("host", "rank-0", "rank-1")
    # The members need not wait for the pull, which has it no more than they.
    for member, module, make in zip(members, modules, RANKS, strict=True):
        assert member.apply() == 2
        assert held(module) == held(loaded(make, target))
    ranks = [f"rank-{number}.{stage}" for number in range(2) for stage in ("applied", "staged")]
    assert host.said() == ["host.applied", "host.staged", *ranks]
    # And then it need not be prepared.
    host.publish()
    host.pull()
    members[0].stage_next()
    with pytest.raises(ConflictError, match="@4: is not committed"):
        members[0].check_way(4)
    target = host.publish()
    with pytest.raises(ConflictError, match=r"@4: what it changes is not in .*changes yet"):
        members[0].check_way(4)
    assert [member.catch_up() for member in members] == [(3,), (3,)] and members[0].awaited_version == 4
    host.pull()
    for member, module, make in zip(members, modules, RANKS, strict=True):
        with member:
            assert member.catch_up() == (4,) and member.awaited_version is None
            assert held(module) == held(loaded(make, target))


def test_a_version_that_has_gone_from_the_folder_is_told_of(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "KEPT", 2)
    for _ in range(3):
        host.publish()
    host.pull()
    with host.member(0, host.ranks()[0]) as member:
        for _ in range(2):
            with pytest.raises(NotFoundError, match="no changes of version 2, and is at version 4"):
                member.stage_next()
        assert member.version == 1


def test_a_version_with_an_anchor_alone_is_told_of(host: Host) -> None:
    host.publish(no_delta=True)
    with host.member(0, host.ranks()[0]) as member, pytest.raises(UnsupportedError, match="has only an anchor"):
        member.stage_next()


def test_a_folder_of_another_history_is_not_taken(host: Host, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = Host(tmp_path / "other")
    host.publish()
    # Of the same weights, by the same steps, and signed by nobody.
    other.publish()
    other.pull()
    with host.member(0, host.ranks()[0], changes=other.changes) as member:
        with pytest.raises(WrongBaseError, match="changes of another version 2"):
            member.stage_next()
        # Under the name that is expected, it says itself what it is.
        host.pull()
        (right,), (wrong,) = host.changes.iterdir(), other.changes.iterdir()
        wrong.rename(other.changes / right.name)
        with pytest.raises(WrongBaseError, match="of another version than"):
            member.stage_next()
    with pytest.raises(UsageError, match="is no folder"):
        host.member(0, host.ranks()[0], changes=tmp_path / "none")
    with host.member(0, host.ranks()[0]) as member:
        assert member.catch_up() == (2,)
        # One that is behind, too.
        host.publish()
        right.rename(right.with_name(right.name[:-1] + ("1" if right.name[-1] == "0" else "0")))
        with pytest.raises(WrongBaseError, match="changes of another version 2"):
            member.stage_next()


def test_what_is_given_up_and_prepared_anew_is_staged_from_the_folder(host: Host) -> None:
    module = host.ranks()[0]
    with host.member(0, module) as member:
        host.publish(prepare=True)
        host.pull()
        assert member.stage_next() is not None
        target = host.publish(prepare=True)
        # What was left of the first one is no more than that.
        assert (member.stage_next(), member.awaited_version) == (None, 2)
        host.pull()
        assert member.stage_next() is not None
        commit(host.url, quorum=1)
        host.pull()
        assert member.apply() == 2 and held(module) == held(loaded(RANKS[0], target))


def test_what_moves_while_it_is_read_is_looked_for_again(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    module = host.ranks()[0]
    target = host.publish(prepare=True)
    host.pull()
    commit(host.url)

    def move(path: Path) -> Any:
        monkeypatch.undo()
        host.pull()
        return open_delta(path)

    with host.member(0, module) as member:
        monkeypatch.setattr("dcr_cli.live.offer.open_delta", move)
        assert member.catch_up() == (2,)
    assert held(module) == held(loaded(RANKS[0], target))


def test_what_needs_a_pull_says_so(host: Host) -> None:
    host.publish()
    receiver = Receiver(host.ranks()[0], checkpoint=host.versions[0])
    with Member(receiver, host.url, version=1) as member, pytest.raises(UnsupportedError, match="not all held") as told:
        member.stage_next()
    assert told.value.hint is not None and "--publish-changes DIR" in told.value.hint and "changes=" in told.value.hint

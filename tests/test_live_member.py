"""Live receivers of a remote: versions by their address, and versions that are committed for all of them together."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dcr_cli import commit
from dcr_cli.errors import ConflictError, DamagedError, NotFoundError, UnsupportedError, UsageError, WrongBaseError
from dcr_cli.live import Fate, Member, Receiver, content_of
from dcr_cli.remote.history import require_history
from dcr_cli.remote.keys import payload_key
from dcr_cli.remote.log import Log
from dcr_cli.store.opening import open_store
from live_modules import Engine, held, loaded
from live_remotes import TrainedRemote


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
            assert member.stage_next() is not None
            assert (member.stage_next(), member.staged_version, member.version) == (None, number, number - 1)
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
        with pytest.raises(ConflictError, match="is given up, not committed"):
            member.apply()
        assert held(module) == before
        target = remote.publish()
        assert member.catch_up() == (2,)
        assert held(module) == held(loaded(Engine, target))
        assert remote.said() == ["one.applied", "one.staged", "one.staged"]


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
        assert member.stage_next() is None
        assert remote.said() == ["one.staged"]
        with monkeypatch.context() as patched:
            patched.setattr(member_module, "say", lambda *args: (_ for _ in ()).throw(ConflictError("acks", "no")))
            with pytest.raises(ConflictError):
                member.apply()
        assert member.version == 2
        assert member.catch_up() == ()
        assert remote.said() == ["one.applied", "one.staged"]


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

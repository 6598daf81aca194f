"""A served module as a receiver: what it is told, one call after the other, by whichever engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import pytest
import torch

from dcr_cli import commit, pull
from dcr_cli.errors import ConflictError, HookError, NotFoundError, UnsupportedError, UsageError, WrongBaseError
from dcr_cli.live import Member, Receiver
from dcr_cli.serving.outside import check_nothing_outside
from dcr_cli.serving.session import Rank, Session, Settings
from live_modules import Engine, addresses, held, loaded
from live_remotes import TrainedRemote


class Remote(TrainedRemote):
    """With what its receivers are asked for."""

    def settings(self, **options: Any) -> Settings:
        given = {"remote": self.url, "version": 1, "checkpoint": str(self.versions[0]), "jobs": 1, **options}
        return Settings(**given)

    def said(self) -> list[str]:
        return sorted("/".join(path.parts[-2:]) for path in (self.root / "remote").glob("acks/*/*"))


@pytest.fixture
def remote(tmp_path: Path) -> Remote:
    return Remote(tmp_path)


def alone(number: int = 0, agree: Callable[[bool], bool] = bool) -> Rank:
    return Rank(number, f"model, rank {number}", agree)


def begin(remote: Remote, **options: Any) -> tuple[Any, Session]:
    module = loaded(Engine, remote.versions[0])
    return module, Session(module, module.load_weights, remote.settings(**options), alone())


def test_no_secret_of_settings_is_shown() -> None:
    settings = Settings(remote="sftp://me:s3cret@h/a", version=1, storage_options={"secret": "s3cret"})
    assert "s3cret" not in repr(settings) and "version=1" in repr(settings)


def test_versions_that_are_committed_are_written_one_after_the_other(remote: Remote) -> None:
    module, session = begin(remote)
    before = addresses(module)
    second, third, fourth = remote.publish(), remote.publish(), remote.publish()
    session.update(2)
    assert session.finish() == 2
    assert held(module) == held(loaded(Engine, second)) != held(loaded(Engine, third))
    session.update(4)
    assert session.version == 2
    assert session.finish() == session.version == 4
    assert held(module) == held(loaded(Engine, fourth))
    # Told again, it does nothing again.
    assert session.finish() == 4
    session.update(4)
    assert session.finish() == 4
    assert addresses(module) == before
    with pytest.raises(UsageError, match="is at version 4, and 3 lies before it"):
        session.update(3)
    session.close()


def test_what_is_prepared_is_staged_and_said_and_written_when_it_is_committed(remote: Remote) -> None:
    module, session = begin(remote, name="server")
    old = held(module)
    target = remote.publish(prepare=True)
    session.update(2)
    with pytest.raises(ConflictError, match="version 2 is prepared, not committed"):
        session.finish()
    assert held(module) == old and not session.is_partial
    assert len(remote.said()) == 2
    assert commit(remote.url, quorum=1).version == 2
    assert session.finish() == 2
    assert held(module) == held(loaded(Engine, target))
    assert len(remote.said()) == 3 and all("server.rank-0" in each for each in remote.said())
    session.close()


def test_what_is_not_there_is_not_written(remote: Remote) -> None:
    module, session = begin(remote)
    old = held(module)
    session.update(2)
    with pytest.raises(ConflictError, match="version 2 is not staged"):
        session.finish()
    remote.publish()
    session.update(3)
    with pytest.raises(ConflictError, match="version 3 is not there"):
        session.finish()
    # It has come as far as there are versions, and says so.
    assert session.version == 2 and held(module) == held(loaded(Engine, remote.versions[1])) != old
    session.close()


def test_what_staging_raised_is_raised_when_it_is_finished(remote: Remote) -> None:
    module, session = begin(remote)
    old = held(module)
    remote.publish()
    (payload,) = Path(remote.url).glob("versions/0000000002-*/payloads/*")
    kept = payload.read_bytes()
    payload.unlink()
    session.update(2)
    with pytest.raises(NotFoundError):
        session.finish()
    assert held(module) == old
    payload.write_bytes(kept)
    session.update(2)
    assert session.finish() == 2
    session.close()


def test_ranks_write_all_or_none(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    target = remote.publish()
    barrier, flags = Barrier(2, timeout=60), [True, True]
    makers = [partial(Engine, rank, 2) for rank in range(2)]
    modules = [loaded(make, remote.versions[0]) for make in makers]

    def agree_as(number: int) -> Callable[[bool], bool]:
        def agree(is_right: bool) -> bool:
            flags[number] = is_right
            barrier.wait()
            found = all(flags)
            barrier.wait()
            return found

        return agree

    sessions = [
        Session(module, module.load_weights, remote.settings(), alone(number, agree_as(number)))
        for number, module in enumerate(modules)
    ]

    def together() -> list[Any]:
        found: list[Any] = [None, None]

        def finish(number: int) -> None:
            try:
                found[number] = sessions[number].finish()
            except Exception as error:
                found[number] = error

        threads = [Thread(target=finish, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    old = [held(module) for module in modules]
    # One of them was told nothing of the version.
    sessions[0].update(2)
    sessions[1]._wanted = 2
    first, second = together()
    assert isinstance(first, ConflictError) and "another rank is not ready" in str(first)
    assert isinstance(second, ConflictError) and "is not staged" in str(second)
    assert [held(module) for module in modules] == old
    # One of them stops half-way.
    for session in sessions:
        session.update(2)
    apply = Receiver.apply

    def fail(receiver: Receiver) -> Any:
        if receiver is sessions[1]._receiver:
            receiver._is_partial = True
            raise HookError("module", "has failed")
        return apply(receiver)

    with monkeypatch.context() as patched:
        patched.setattr(Receiver, "apply", fail)
        first, second = together()
    assert isinstance(first, HookError) and "another rank has failed" in str(first)
    assert isinstance(second, HookError) and sessions[1].is_partial and sessions[1].version == 1
    assert together() == [2, 2]
    assert [held(module) for module in modules] == [held(loaded(make, target)) for make in makers]
    for session in sessions:
        session.close()


def test_what_was_learnt_is_kept_by_its_key(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    layouts = remote.root / "layouts"
    layouts.mkdir()
    begin(remote, layouts=str(layouts))[1].close()
    (kept,) = layouts.iterdir()
    monkeypatch.setattr("dcr_cli.live.receiver.learn", None)
    remote.publish()
    module, session = begin(remote, layouts=str(layouts))
    session.update(2)
    assert session.finish() == 2 and held(module) == held(loaded(Engine, remote.versions[1]))
    session.close()
    monkeypatch.undo()
    begin(remote, layouts=str(layouts), key="another model")[1].close()
    assert {kept} < set(layouts.iterdir())


def test_a_module_that_is_not_what_its_loader_makes_of_the_checkpoint_is_refused(remote: Remote) -> None:
    module = loaded(Engine, remote.versions[0])
    with torch.no_grad():
        module.o[0, 0] += 1
    with pytest.raises(WrongBaseError):
        Session(module, module.load_weights, remote.settings(), alone())
    with pytest.raises(UsageError, match="checkpoint: is needed"):
        Session(module, module.load_weights, remote.settings(checkpoint=None), alone())
    module = loaded(Engine, remote.versions[0])
    module.o_transposed = module.o.data.t().contiguous()
    with pytest.raises(UnsupportedError, match="keeps o_transposed outside its parameters"):
        Session(module, module.load_weights, remote.settings(), alone())


def test_caches_views_and_numbers_are_nothing_that_is_made_of_weights() -> None:
    module: Any = Engine()
    module.kv_cache = torch.zeros(4)
    module.view = module.o.data[1:]
    module.ids_of = torch.arange(5)
    module.factor = torch.tensor(2.0)
    check_nothing_outside(module)
    module.add_module("inner", torch.nn.Identity())
    module.inner.packed = torch.zeros(4)
    with pytest.raises(UnsupportedError, match=r"inner\.packed"):
        check_nothing_outside(module)


def test_a_session_that_cannot_begin_lets_go_of_the_remote(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []
    leave = Member.__exit__

    def note(member: Any, *error: Any) -> None:
        closed.append(member)
        leave(member, *error)

    monkeypatch.setattr(Member, "__exit__", note)
    module = loaded(Engine, remote.versions[0])
    with pytest.raises(UnsupportedError, match="its loader failed"):
        Session(module, lambda weights: 1 / 0, remote.settings(), alone())
    assert len(closed) == 1


class Host(Remote):
    """A remote of `context` alone, a checkpoint that is pulled from it, and a folder for what that decodes."""

    encodings = ("context", "whole")

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.changes = root / "changes"
        self.changes.mkdir()
        self.pull()

    def pull(self) -> None:
        pull(self.url, self.root / "replica", publish_changes=self.changes, jobs=1)

    def begin(self, **options: Any) -> tuple[Any, Session]:
        module = loaded(partial(Engine, 0, 2), self.versions[0])
        return module, Session(module, module.load_weights, self.settings(may_lack=("*",), **options), alone())


def wait_for(is_so: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_what_a_pull_decodes_is_staged_as_soon_as_it_is_there(tmp_path: Path) -> None:
    host = Host(tmp_path)
    module, session = host.begin(name="server", changes=str(host.changes))
    old, target = held(module), host.publish(prepare=True)
    session.update(2)
    # Whoever finishes it before is told so at once, and nothing was changed.
    with pytest.raises(ConflictError, match=r"what version 2 changes is not in .*changes yet") as told:
        session.finish()
    assert told.value.retryable and "--publish-changes" in str(told.value.hint)
    session.update(2)
    host.pull()
    wait_for(lambda: any("rank-0.staged" in each for each in host.said()))
    with pytest.raises(ConflictError, match="is prepared, not committed"):
        session.finish()
    assert held(module) == old
    commit(host.url, quorum=1)
    assert session.finish() == 2
    assert held(module) == held(loaded(partial(Engine, 0, 2), target))
    # Some at a time: as far as the pull has come.
    host.publish()
    host.pull()
    target = host.publish()
    session.update(4)
    wait_for(lambda: session._member.staged_version)
    with pytest.raises(ConflictError, match="what version 4 changes is not in"):
        session.finish()
    assert session.version == 3
    session.update(4)
    host.pull()
    assert session.finish() == 4 and held(module) == held(loaded(partial(Engine, 0, 2), target))
    # Nobody who closes it waits for a pull that never comes.
    host.publish()
    session.update(5)
    session.close()


def test_without_what_a_pull_decodes_it_is_said_what_to_do(tmp_path: Path) -> None:
    host = Host(tmp_path)
    _, session = host.begin()
    host.publish()
    session.update(2)
    with pytest.raises(UnsupportedError, match="is not all held here") as told:
        session.finish()
    assert "changes=DIR" in str(told.value.hint)
    session.close()
    with pytest.raises(UsageError, match="is no folder"):
        host.begin(changes=str(tmp_path / "none"))

"""A served module as a receiver: what it is told, one call after the other, by whichever engine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

from dcr_cli import commit
from dcr_cli.errors import (
    ConflictError,
    DcrError,
    HookError,
    IncompleteError,
    NotFoundError,
    TransportError,
    UnsupportedError,
    UsageError,
    WrongBaseError,
)
from dcr_cli.live import Member
from dcr_cli.live.bits import HostPatch
from dcr_cli.serving.agreeing import Answer
from dcr_cli.serving.outside import check_nothing_outside
from dcr_cli.serving.session import Rank, Session, Settings, begin as begin_session
from live_modules import Engine, addresses, held, loaded
from live_remotes import ReplicatedRemote, TrainedRemote


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


def alone() -> Rank:
    return Rank(0, "model, rank 0")


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
    with pytest.raises(ConflictError, match="is prepared, not committed"):
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
    with pytest.raises(ConflictError, match="version 2 is not there; the module is at version 1"):
        session.finish()
    target = remote.publish()
    remote.publish(prepare=True)
    session.update(3)
    # All of the way is looked at before anything is written.
    with pytest.raises(ConflictError, match="@3: is not committed; the module is at version 1"):
        session.finish()
    assert session.version == 1 and held(module) == old
    session.update(2)
    assert session.finish() == 2 and held(module) == held(loaded(Engine, target))
    session.close()


def test_where_several_versions_were_stopped_is_said(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    module, session = begin(remote, name="server")
    checkpoints = [remote.publish() for _ in range(3)]
    session.update(4)
    stage = Member.stage_next

    def fail(member: Member) -> Any:
        if member.version == 3:
            raise TransportError("remote", "did not answer")
        return stage(member)

    with monkeypatch.context() as patched:
        patched.setattr(Member, "stage_next", fail)
        with pytest.raises(TransportError, match="remote: did not answer; the module is at version 3"):
            session.finish()
    assert session.version == 3 and held(module) == held(loaded(Engine, checkpoints[1]))
    assert session.finish() == 4 and held(module) == held(loaded(Engine, checkpoints[2]))
    session.close()


def test_the_others_hear_of_an_interrupt(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it ends what one of them does: they need not wait for it."""
    heard: list[Answer] = []

    def hear(answer: Answer) -> list[Answer]:
        heard.append(answer)
        return [answer]

    module = loaded(Engine, remote.versions[0])
    session = Session(module, module.load_weights, remote.settings(), Rank(0, "", hear))
    target = remote.publish()
    session.update(2)

    def interrupt(*given: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Member, "apply", interrupt)
        with pytest.raises(KeyboardInterrupt):
            session.finish()
    fault = heard[-1].fault
    assert fault is not None and "KeyboardInterrupt" in fault.facts
    assert session.finish() == 2 and held(module) == held(loaded(Engine, target))
    session.close()


@pytest.mark.parametrize("again", ["finish", "update"])
def test_what_could_not_be_said_is_said_when_it_is_finished_again(
    remote: Remote, monkeypatch: pytest.MonkeyPatch, again: str
) -> None:
    _, session = begin(remote, name="server")
    remote.publish()
    session.update(2)
    session.rest()

    def refuse(*args: object) -> None:
        raise TransportError("acks", "did not answer")

    with monkeypatch.context() as patched:
        patched.setattr("dcr_cli.live.member.say", refuse)
        with pytest.raises(TransportError, match="did not answer; the module is at version 2"):
            session.finish()
        # As long as it cannot be said, that is told.
        with pytest.raises(TransportError):
            session.finish()
    assert session.version == 2 and not any("0002" in each and "applied" in each for each in remote.said())
    if again == "update":
        session.update(2)
        session.rest()
    else:
        assert session.finish() == 2
    assert len([each for each in remote.said() if "0002" in each]) == 2
    session.close()


def test_a_word_that_failed_while_it_was_staged_does_not_fail_it(
    remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, session = begin(remote, name="server")
    remote.publish()

    def refuse(*args: object) -> None:
        raise TransportError("acks", "did not answer")

    with monkeypatch.context() as patched:
        patched.setattr("dcr_cli.live.member.say", refuse)
        session.update(2)
        session._ahead._thread.join()  # type: ignore[union-attr]
    assert session.finish() == 2 and len(remote.said()) == 3
    session.close()


def test_after_an_update_that_was_not_taken_nothing_is_finished(remote: Remote) -> None:
    module, session = begin(remote)
    target = remote.publish()
    for wrong in (0, "2", True, 2.0, None):
        with pytest.raises(UsageError):
            session.update(wrong)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="the update that was asked for last was not taken: version: has to be"):
            session.finish()
    session.update(2)
    assert session.finish() == 2 and held(module) == held(loaded(Engine, target))
    with pytest.raises(UsageError, match="lies before it"):
        session.update(1)
    with pytest.raises(UsageError, match=r"was not taken.*lies before it; the module is at version 2"):
        session.finish()
    session.close()


def test_a_mixture_is_finished_and_nothing_else_is_done(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    module, session = begin(remote)
    target = remote.publish()
    session.update(2)
    write, count = HostPatch.write, []

    def stop(patch: HostPatch) -> None:
        count.append(patch)
        if len(count) == 2:
            raise MemoryError
        write(patch)

    with monkeypatch.context() as patched:
        patched.setattr(HostPatch, "write", stop)
        with pytest.raises(HookError, match="MemoryError: ; the module is at a mixture of versions 1 and 2") as told:
            session.finish()
    assert "finish it again" in str(told.value.hint)
    remote.publish()
    for version in (1, 3):
        with pytest.raises(IncompleteError, match="bringing it to version 2 was stopped") as refused:
            session.update(version)
        assert "finish it again" in str(refused.value.hint)
    with pytest.raises(IncompleteError, match="an update was stopped"):
        begin_session(alone(), session, dict, lambda settings: session)
    # Who makes the whole update again is let, and it is what is finished.
    session.update(2)
    assert session.finish() == 2 and held(module) == held(loaded(Engine, target)) and not session.is_partial
    session.update(3)
    assert session.finish() == 3
    session.close()


def test_update_returns_at_once_however_often(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    go, begun, stage = Event(), Event(), Member.stage_next
    _, session = begin(remote)

    def wait(member: Member) -> Any:
        begun.set()
        assert go.wait(60)
        return stage(member)

    monkeypatch.setattr(Member, "stage_next", wait)
    session.update(2)
    assert begun.wait(60)
    target = remote.publish()
    session.update(3)
    session.update(2)
    go.set()
    # And it was looked for again after the last one.
    assert session.finish() == 2 and held(session._receiver._module) == held(loaded(Engine, target))
    thread = session._ahead._thread
    assert thread is not None and thread.daemon
    session.close()


def test_a_process_that_waits_for_a_pull_can_end(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.publish()
    code = f"""
from pathlib import Path
from live_modules import Engine, loaded
from dcr_cli.serving.session import Rank, Session, Settings

module = loaded(Engine, Path({str(host.versions[0])!r}))
settings = Settings(remote={host.url!r}, version=1, checkpoint={str(host.versions[0])!r}, changes={str(host.changes)!r})
Session(module, module.load_weights, settings, Rank(0, "")).update(2)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=60)


def test_a_session_that_cannot_be_made_leaves_the_one_before(remote: Remote) -> None:
    module, old = begin(remote)
    target = remote.publish()
    old.update(2)

    def make(settings: Settings) -> Session:
        return Session(module, module.load_weights, settings, alone())

    good = {"remote": remote.url, "version": 1, "checkpoint": str(remote.versions[0]), "jobs": 1}
    for wrong, told in (
        ({**good, "version": 9}, "there is no version 9"),
        ({**good, "version": "1"}, "version: has to be a number from 1 on, not one of type str"),
        ({**good, "wide": 1}, "has wide, unknown"),
        ({**good, "version": 2}, "which is not version 2"),
    ):
        with pytest.raises(DcrError, match=told):
            begin_session(alone(), old, partial(dict, wrong), make)
    assert old.finish() == 2 and held(module) == held(loaded(Engine, target))
    # One that is made goes on from where the module is, and the one before is closed.
    new = begin_session(alone(), old, lambda: {**good, "version": 2, "checkpoint": str(target)}, make)
    assert new.version == 2 and new is not old
    new.close()


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


class Host(ReplicatedRemote, Remote):
    """With a rank that holds slices."""

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
    # Nothing is written before the pull has come all of the way.
    host.publish()
    host.pull()
    target = host.publish()
    session.update(4)
    wait_for(lambda: session._member.staged_version)
    with pytest.raises(ConflictError, match="@4: what it changes is not in"):
        session.finish()
    assert session.version == 2
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

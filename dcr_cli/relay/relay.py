"""A relay from its start to its end: what it is made of, and what runs while it serves."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, AsyncExitStack, ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from dcr_cli import stopping
from dcr_cli.arguments import check_apart
from dcr_cli.delta.line import COMMIT_LIMIT
from dcr_cli.errors import DamagedError, DcrError, LocalError, NotFoundError, TransportError, WrongBaseError
from dcr_cli.relay.answering import Answering
from dcr_cli.relay.children import Children
from dcr_cli.relay.documents import Documents
from dcr_cli.relay.kinds import label_of, require_named
from dcr_cli.relay.library import Library
from dcr_cli.relay.news import News
from dcr_cli.relay.parents import Parent, Parents
from dcr_cli.relay.rights import Rights
from dcr_cli.relay.serving import Address, listening
from dcr_cli.relay.signals import signals_awaited
from dcr_cli.relay.spool import Spool
from dcr_cli.relay.telling import Account, parent_line
from dcr_cli.relay.watching import Watch
from dcr_cli.remote.history import check_can_begin, decode_history
from dcr_cli.remote.keys import HISTORY_KEY
from dcr_cli.stopping import Stopped
from dcr_cli.store.http_headers import Caller
from dcr_cli.store.location import folder_of
from dcr_cli.store.opening import open_store, options_for
from dcr_cli.store.retry import Patience
from dcr_cli.store.store import Store

# Threads in which bodies come, in which all else is asked and looked at, and which wait for news of parents: those that
# may take long keep no others up.
_BODIES, _LOOKS, _WAITS = 24, 24, 8
# For so long a parent is tried again that does not answer: less where there is another one.
_PATIENT_SECONDS, _IMPATIENT_SECONDS = 20.0, 0.0
# So long it waits at its start for what parents hold.
_SOON_SECONDS = 2.0
# So often a relay says at a parent how it is.
_TELL_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class RelayResult:
    """A relay that listens: where, by which name, and where its parents are."""

    address: str
    name: str
    parents: tuple[str, ...]
    spool: str
    spool_limit: int


@dataclass(frozen=True, slots=True)
class Setting:
    """What a relay is told: its name, where it listens, what it keeps where, who may do what, and how long its end may
    take."""

    name: str
    address: Address
    spool: Path
    spool_limit: int
    rights: Rights = field(default_factory=Rights)
    drain_seconds: float = 30.0


def relay(
    parents: Sequence[str | os.PathLike[str]],
    setting: Setting,
    *,
    started: Callable[[RelayResult], None],
    log: Callable[[str], None] | None,
    storage_options: Mapping[str, object] | None = None,
    limit_bytes_per_second: float | None = None,
) -> None:
    """Hand on what is at the first of `parents` that answers, as `serve` does, until a signal ends it: raises Stopped.

    `storage_options` are those of the parents that are of the same protocol as the first one. A folder that is not
    there yet is made by the first push. UsageError where an address or option cannot be understood, NotFoundError for a
    folder in one that is not there.
    """
    check_apart({"spool": setting.spool, **{f"parent {parent}": folder_of(parent) for parent in parents}})
    patience = Patience(deadline_seconds=_PATIENT_SECONDS if len(parents) == 1 else _IMPATIENT_SECONDS)
    with ExitStack() as stack:
        stores = [
            stack.enter_context(
                open_store(
                    parent,
                    options_for(parent, parents[0], storage_options or {}),
                    patience=patience,
                    limit_bytes_per_second=limit_bytes_per_second,
                    caller=Caller("relay", setting.name),
                    has_others=len(parents) > 1,
                )
            )
            for parent in parents
        ]
        for store in stores:
            check_can_begin(store)
        number = serve(stores, setting, started=started, log=log)
    raise Stopped(number)


Ending = Callable[[], AbstractContextManager[asyncio.Future[int]]]


def serve(
    stores: Sequence[Store],
    setting: Setting,
    *,
    started: Callable[[RelayResult], None],
    log: Callable[[str], None] | None,
    ending: Ending = signals_awaited,
) -> int:
    """Serve what the first of `stores` that answers holds, until what `ending` lends is there, and return it: the
    number of a signal.

    `started` is called once it listens, `log`, if there is one, with a line of JSON for each request. ConflictError if
    another process has the spool, LocalError where spool or address cannot be had, WrongBaseError if the spool is of
    another history.
    """
    parents = Parents(tuple(Parent(store, replaces=not store.may_be_relay) for store in stores))
    if log is not None:
        parents.changed = lambda parent: log(parent_line(parent))
    with ExitStack() as stack:
        spool = stack.enter_context(Spool(setting.spool, setting.spool_limit))
        stack.callback(stopping.ask, 0)
        pools = tuple(ThreadPoolExecutor(count, "dcr-relay") for count in (_BODIES, _LOOKS, _WAITS))
        for pool in pools:
            stack.callback(pool.shutdown, wait=True, cancel_futures=True)
        _check_history(parents, spool, pools[1])
        library = Library(Documents(parents, spool, News(), pools[1]), pools[0])
        number = asyncio.run(_run(setting, library, pools[2], (started, log, ending)))
        if number:
            # First of all, whatever the threads do is ended.
            stack.callback(stopping.ask, number)
    return number


async def _run(
    setting: Setting,
    library: Library,
    waits: ThreadPoolExecutor,
    told: tuple[Callable[[RelayResult], None], Callable[[str], None] | None, Ending],
) -> int:
    started, log, ending = told
    children = Children()
    account = Account(setting.name, library, children)
    answering = Answering(library, children, account, setting.rights, log)
    async with AsyncExitStack() as stack:
        ended = stack.enter_context(ending())
        for work in (Watch(library, waits, log).run(), _tell(library, account)):
            stack.push_async_callback(_cancelled, asyncio.create_task(work))
        # The first thing that ends.
        shown = await stack.enter_async_context(listening(setting.address, answering, setting.drain_seconds))
        parents = tuple(parent.shown for parent in library.parents.all)
        started(RelayResult(shown, setting.name, parents, str(setting.spool), setting.spool_limit))
        return await ended


async def _tell(library: Library, account: Account) -> None:
    """Say at each parent that is a relay how this one is, now and then."""
    while True:
        await asyncio.sleep(_TELL_SECONDS)
        data = json.dumps(account.status()).encode()
        for parent in library.parents.all:
            if parent.is_relay:
                with suppress(DcrError):
                    await library.fetch(partial(parent.store.put, f"status/{account.name}", data))


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


def _check_history(parents: Parents, spool: Spool, pool: ThreadPoolExecutor) -> None:
    """Take the history of what is kept; WrongBaseError if a parent that answers soon holds another one."""
    kept = spool.read(label_of(require_named(HISTORY_KEY)))
    if kept is None:
        return
    spool.history = parents.adopt(decode_history(kept, HISTORY_KEY).id)
    held = {pool.submit(parent.store.get, HISTORY_KEY, most_bytes=COMMIT_LIMIT): parent for parent in parents.all}
    # Any other one is judged when it answers.
    for future in wait(held, _SOON_SECONDS).done:
        with suppress(TransportError, LocalError, DamagedError, NotFoundError):
            data = future.result()
            found = decode_history(data, HISTORY_KEY).id if data is not None else None
            if found not in (None, parents.history):
                facts = f"keeps objects of history {parents.history}, {held[future].shown} holds {found}"
                raise WrongBaseError(str(spool.path), facts, hint="give another --spool, or remove this one")

"""The remote that a receiver reads, as it is named: by one address, or by several that lead to it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from dcr_cli.arguments import check_apart
from dcr_cli.store.http_headers import Caller
from dcr_cli.store.location import folder_of
from dcr_cli.store.opening import open_store
from dcr_cli.store.store import Store

Address = str | os.PathLike[str]


def check_addresses(
    checkpoint: Address, remote: Address, fallbacks: Sequence[Address], changes: Address | None
) -> None:
    """Raise UsageError if an address is none, or leads into the checkpoint, or the checkpoint lies there; or if the
    folder of decoded changes lies in one of them, or the other way round."""
    for address in (remote, *fallbacks):
        check_apart({"folder of changes": changes, "checkpoint": checkpoint, "remote": folder_of(address)})


def open_remote(
    remote: Address,
    fallbacks: Sequence[Address],
    storage_options: Mapping[str, object] | None,
    *,
    receiver: str | None,
    limit_bytes_per_second: float | None,
) -> Store:
    """Open a remote as the receiver of a name, if it has one."""
    return open_store(
        remote,
        storage_options,
        limit_bytes_per_second=limit_bytes_per_second,
        caller=Caller("receiver", receiver) if receiver is not None else None,
        fallbacks=fallbacks,
    )

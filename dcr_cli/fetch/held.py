"""What a folder holds, for comparing it with versions: from its record if that still counts, else from its bytes.

But for a record of what was read it changes nothing; which version it is, is adoption's question.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dcr_cli.checkpoint.checkpoint import FileDigest, open_checkpoint
from dcr_cli.checkpoint.digest import State, content_digest, digest_bytes, files_digest
from dcr_cli.checkpoint.folder import Identity
from dcr_cli.checkpoint.names import shown
from dcr_cli.checkpoint.parts import SHARD, SIDECAR
from dcr_cli.content import Side, Workers, in_file_order, tensor_digests, tensor_of_part
from dcr_cli.durable import Folder
from dcr_cli.fetch.listing import Listing
from dcr_cli.layout.layout import Layout
from dcr_cli.receiver.file_plan import match_files
from dcr_cli.receiver.install.gather import Effort
from dcr_cli.receiver.receiver import Receiver
from dcr_cli.receiver.record import TensorRecord, find_record, mode_of_record, write_record
from dcr_cli.receiver.sidecars import identities_now
from dcr_cli.receiver.view import View, layout_blake3, note_layout, open_laid


@dataclass(frozen=True, slots=True)
class Reading:
    """What reading a checkpoint told: its tensors in canonical order, which files were read, and through which layout,
    if through one."""

    tensors: tuple[TensorRecord, ...]
    identities: Mapping[str, Identity]
    skipped: tuple[str, ...]
    layout: Layout | None = None


@dataclass(frozen=True, slots=True)
class Held:
    """The content digest of the tensors in a folder, and its files, perhaps among them some that are no part of it.

    `read` is there if it was read just now, and not recorded; `layout` is the blake3 of the layout it was recorded by.
    """

    content: bytes
    files: tuple[FileDigest, ...]
    read: Reading | None = None
    layout: bytes | None = None

    @property
    def files_digest(self) -> bytes:
        return files_digest((file.path, file.kind, file.blake3) for file in self.files)

    def is_state(self, state: State, listing: Listing | None) -> bool:
        """Whether it is a version's state: its files, or its tensors and sidecars in shards of the receiver's own.

        Without a listing only a folder with just the version's files is.
        """
        if self.content != state.content:
            return False
        names = [{file.path for file in listing.files}] if listing is not None else []
        if match_files(self.files, state.files, names) is not None:
            return True
        if listing is None:
            return False
        own = {file.path: file.blake3 for file in self.files if file.kind == SIDECAR}
        return all(own.get(path) == blake3 for path, blake3 in listing.sidecars.items())


def recorded(root: Folder) -> Held | None:
    """What the record of the checkpoint in `root` says; None if a file of it is not the one that was recorded.

    A record counts here as soon as it is written: what is changed is compared again by whoever changes it.
    """
    record = find_record(root)
    if record is None or identities_now(root, record.identities) != dict(record.identities):
        return None
    return Held(record.state.content, tuple(record.files), layout=record.layout)


def read_held(root: Folder, skip: Sequence[str], effort: Effort, view: View) -> Held:
    """Read every byte of the checkpoint in `root`, leaving out what `skip` matches, through its layout, if it has one;
    ConflictError if it changes meanwhile."""
    laid = open_laid(root, view, skip, None)
    checkpoint = laid or open_checkpoint(root.path, skip=skip, allow_strangers=True)
    with Workers(effort.jobs, "check", effort.progress) as workers, checkpoint.reader() as reader:
        tensors = in_file_order(checkpoint.tensors)
        digests = tensor_digests(workers, Side(checkpoint, reader, tensor_of_part), tensors)
        files = laid.local_files_digest(reader) if laid is not None else checkpoint.files_digest(reader)
    by_name = {tensor.name: digest_bytes(digest) for tensor, digest in zip(tensors, digests, strict=True)}
    rows = tuple(TensorRecord(t.name, t.dtype.name, t.shape, by_name[t.name]) for t in checkpoint.tensors)
    content = content_digest((row.name, row.dtype, row.shape, row.digest) for row in rows)
    return Held(
        content,
        tuple(files),
        Reading(rows, checkpoint.identities, checkpoint.skipped, laid.layout if laid is not None else None),
    )


def changes_since_record(root: Folder, held: Held) -> list[str]:
    """Say in which files and tensors a checkpoint that was read just now is not what its record says; nothing without a
    record that was read in the same way."""
    record, read = find_record(root), held.read
    if record is None or read is None:
        return []
    if record.layout != (layout_blake3(read.layout) if read.layout is not None else None):
        return []
    files = {file.path: file for file in held.files}
    told = [f"{shown(file.path)} is missing" for file in record.files if file.path not in files]
    for file in record.files:
        # Of a shard that is its header; what its tensors are is said of each.
        if file.path in files and files[file.path].blake3 != file.blake3:
            told.append(f"{'the header of ' if file.kind == SHARD else ''}{shown(file.path)} was changed")
    tensors = {tensor.name: tensor for tensor in read.tensors}
    told += [f"tensor {shown(tensor.name)} is missing" for tensor in record.tensors if tensor.name not in tensors]
    changed = [tensor for tensor in record.tensors if tensors.get(tensor.name, tensor) != tensor]
    return told + [f"tensor {shown(tensor.name)} was changed" for tensor in changed]


def leave_record(receiver: Receiver, held: Held, listing: Listing | None) -> None:
    """Leave a record of a checkpoint that was read and found to be a version with these files, so that it need not be
    read again."""
    if held.read is None:
        return
    sidecars = {file.path for file in held.files} if listing is None else listing.sidecars.keys()
    files = [file for file in held.files if file.kind != SIDECAR or file.path in sidecars]
    identities = {file.path: held.read.identities[file.path] for file in files}
    mode = mode_of_record(receiver.root, identities)
    layout = held.read.layout
    if layout is not None:
        note_layout(receiver.home, layout)
    write_record(
        receiver.home,
        held.content,
        held.read.tensors,
        files,
        identities,
        held.read.skipped,
        mode=mode,
        layout=layout_blake3(layout) if layout is not None else None,
    )
    receiver.keeps_home = True


def recorded_skips(root: Folder) -> tuple[str, ...]:
    """What the record of a folder says was left out of it."""
    record = find_record(root)
    return record.skipped if record is not None else ()

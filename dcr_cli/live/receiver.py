"""A live receiver: a module that an engine serves from, brought from version to version where it lies.

Learning, decoding and writing are other modules'; what is done in which order, and what may be said of the module when
it was stopped half-way, is decided here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from dcr_cli.checkpoint.checkpoint import open_checkpoint
from dcr_cli.checkpoint.names import listed, shown
from dcr_cli.delta.chain import IN_ORDER
from dcr_cli.errors import (
    ConflictError,
    DamagedError,
    IncompleteError,
    UsageError,
    WrongBaseError,
)
from dcr_cli.layout.layout import Form
from dcr_cli.layout.opening import forms_of
from dcr_cli.live.compared import (
    check_fits,
    check_forms,
    check_loaded,
    check_made,
    differs_from_kept,
    read_kept,
)
from dcr_cli.live.holdings import Elements, Holdings
from dcr_cli.live.making import AGAIN, digest_made, loader_of, send
from dcr_cli.live.memory import memory_of
from dcr_cli.live.offer import Offer, offer_of
from dcr_cli.live.pieces import digest_whole
from dcr_cli.live.placement import Placement, read_placement, write_placement
from dcr_cli.live.probing import Load, check_lacking, learn
from dcr_cli.live.ready import Ready, Staged
from dcr_cli.live.shares import Part, Shares, digest_parts
from dcr_cli.live.staging import check_target, decode, weights_of
from dcr_cli.remote.signing import trust_in
from dcr_cli.remote.version import COMMIT_KIND, Published
from dcr_cli.work import threads

_ANEW = "load the module anew: somebody else has written to it"


class Receiver:
    """A module, and the loader that fills it from a checkpoint: what it holds is changed in place.

    `load_weights` takes an iterable of (name, tensor), the names being those of checkpoints; by default it is the
    module's own method of this name, else its `load_state_dict`, given all tensors at once. Where it places what is
    learnt by having it load, by `learn`, before the module serves, or else at the first `stage`, when it may not serve;
    the module is put back bit for bit. Or it is learnt on a `twin`, a module of equal tensors with its loader; or read
    from the file `layout` that `save_layout` has written for the same `key`, such as "model, engine version, sizes,
    rank".

    `checkpoint` is the folder that the module was loaded from: its bits are compared with the module's, each where it
    is said to lie; and what the loader makes something else of is kept in memory as it was there, and loaded once more,
    to see that the module has what comes of it. Without it, such tensors cannot change, and a rank that holds slices
    alone cannot know by itself that it starts from the right base, nor, then, what it is at later (`content`); that is
    told when the shares of all ranks are summed (`content_of`).

    Addresses never change. A receiver is used by one thread at a time; `stage` reads the module and may run while it
    serves, `apply` writes it and may not.
    """

    def __init__(
        self,
        module: Any,
        load_weights: Load | None = None,
        *,
        twin: tuple[Any, Load | None] | None = None,
        layout: str | os.PathLike[str] | None = None,
        key: str = "",
        checkpoint: str | os.PathLike[str] | None = None,
        may_lack: Sequence[str] = (),
        trusted_keys: Sequence[str] = (),
        storage_options: Mapping[str, object] | None = None,
        jobs: int | None = None,
    ) -> None:
        if isinstance(may_lack, str):
            facts = f"is the text {shown(may_lack)}, and no list of patterns"
            raise UsageError("may_lack", facts, hint="write [pattern]")
        self._module = module
        self._load = loader_of(module, load_weights)
        self._twin = _twin_of(twin) if twin is not None else (module, self._load)
        self._key = key
        self._checkpoint = checkpoint
        self._may_lack = tuple(may_lack)
        self._trust = trust_in(trusted_keys)
        self._storage_options = storage_options
        self._jobs = threads(jobs)
        self._placement = read_placement(layout, key) if layout is not None else None
        self._holdings: Holdings | None = None
        self._parts: Mapping[Part, bytes] = {}
        self._made: Mapping[str, bytes] = {}
        self._ready: Ready | None = None
        self._is_partial = False
        self._content: bytes | None = None
        self._published: Published | None = None

    # What it is

    @property
    def staged(self) -> Staged | None:
        """What is staged and not applied."""
        return self._ready.staged if self._ready is not None else None

    @property
    def is_partial(self) -> bool:
        """Whether an apply was stopped: the module holds a mixture, and is at no version until `apply` has ended."""
        return self._is_partial

    @property
    def content(self) -> bytes | None:
        """The content digest of the state that the module is at; None while it is partial, and as long as nothing has
        shown it: a checkpoint, or its own bits, where it holds all tensors and its loader makes nothing of any."""
        return self._content if not self._is_partial else None

    @property
    def published(self) -> Published | None:
        """The version of a remote that was applied last, if one was, and nothing else after it."""
        return self._published if not self._is_partial else None

    # What it does

    def learn(self, forms: Mapping[str, Form] | None = None) -> None:
        """Learn where the loader places the tensors of `forms`, by default those of `checkpoint`, unless that is known,
        and digest what is there.

        It disturbs the module, or its twin, and puts it back; so it does where the loader makes something of tensors,
        if there is a checkpoint to compare that with. Raises what `probing.learn` raises; WrongBaseError if the module
        does not hold what `checkpoint` does, or what the loader makes of it, UnsupportedError if it cannot be loaded;
        UsageError if nobody says which tensors there are, or the module is not that of `layout`.
        """
        if self._holdings is not None:
            return
        if forms is None:
            if self._checkpoint is None:
                hint = "give it a checkpoint, or forms"
                raise UsageError("receiver", "which tensors there are is not known", hint=hint)
            forms = forms_of(open_checkpoint(self._checkpoint, allow_strangers=True))
        placement = self._placement or learn(*self._twin, forms, may_lack=self._may_lack, key=self._key)
        memory = memory_of(self._module)
        check_fits(placement, memory)
        check_lacking(placement, self._may_lack)
        memory.check_nothing_packed()
        # What is not patched may be given up by the module meanwhile.
        placed = {place.name for places in placement.placed.values() for place in places}
        memory = memory.only({*placed, *placement.made})
        made = digest_made(Holdings(memory, placement), placement.made)
        content, kept = None, dict[str, Elements]()
        if self._checkpoint is not None:
            checkpoint = open_checkpoint(self._checkpoint, allow_strangers=True)
            content = check_loaded(checkpoint, Holdings(memory, placement))
            kept = read_kept(checkpoint, [name for group in placement.loaded for name in group])
            if kept:
                check_made(self._twin, Holdings(memory, placement, kept), made)
        parts = digest_parts(memory, placement)
        if content is None and not made:
            content = _shares(placement, parts, kept).content
        self._parts, self._made, self._content = parts, made, content
        self._placement, self._holdings = placement, Holdings(memory, placement, kept)

    def save_layout(self, path: str | os.PathLike[str]) -> None:
        """Write what was learnt to a file, durably, for receivers of the same key; UsageError without one."""
        write_placement(path, self._known().placement)

    def digest(self) -> Shares:
        """Digest what the module holds now, in canonical coordinates.

        IncompleteError if it holds a mixture; ConflictError if its tensors do not lie any more where they lay;
        DamagedError if two places differ that should hold the same bits, if what also goes through the loader is not
        what that was given, or what it has made has changed since.
        """
        holdings = self._known()
        if self._is_partial:
            raise self._mixture()
        self._check_place(holdings)
        what = holdings.memory.what
        if (name := differs_from_kept(holdings, holdings.kept)) is not None:
            raise DamagedError(what, f"has other bits of tensor {shown(name)} than its loader was given", hint=_ANEW)
        parts = digest_parts(holdings.memory, holdings.placement)
        made = digest_made(holdings, holdings.placement.made)
        if changed := sorted(name for name, digest in made.items() if self._made[name] != digest):
            raise DamagedError(what, f"has other bits in {listed(changed)} than its loader has made", hint=_ANEW)
        return _shares(holdings.placement, parts, holdings.kept)

    def stage(self, delta: str | os.PathLike[str]) -> Staged:
        """Decode and check everything that a delta changes, a folder's or that of REMOTE@N, or what a pull has decoded
        and published in a folder (FORMAT 12.1). After `learn` the module is not disturbed, and may serve meanwhile;
        where nobody has called it, this does, and the module may not.

        What was staged before is given up. Memory grows with the changes. Raises what reading and fetching raise;
        WrongBaseError if the module is not what the delta starts from, UnsupportedError if it changes which tensors
        there are, or cannot be decoded from what this rank holds; IncompleteError while an apply is to be finished.
        """
        if self._is_partial:
            raise self._mixture()
        with offer_of(delta, self._trust, self._storage_options, self._jobs) as offer:
            return self.stage_offer(offer)

    def stage_offer(self, offer: Offer) -> Staged:
        """Stage a delta that was opened or fetched already; of a version of a remote, the commit has to be signed as
        this receiver asks, whoever has read it."""
        if self._is_partial:
            raise self._mixture()
        if offer.published is not None:
            self._trust.check(offer.published.signed, COMMIT_KIND, offer.name)
        self._ready = None
        commit = offer.documents.commit
        forms = {row.name: Form(row.dtype, row.shape) for row in offer.documents.manifest.tensors}
        self.learn(forms)
        if self._content is not None and self._content != commit.base.content:
            facts = f"starts from content blake3:{commit.base.content.hex()[:16]}, the module is at "
            raise WrongBaseError(offer.name, f"{facts}blake3:{self._content.hex()[:16]}", hint=IN_ORDER)
        holdings = self._known()
        check_forms(offer.name, holdings.placement, forms)
        decoded = decode(offer, holdings, self._jobs)
        weights = weights_of(offer, holdings, decoded)
        parts = decoded.sums(self._parts)
        kept = {**holdings.kept, **decoded.kept}
        shares = _shares(holdings.placement, parts, kept)
        check_target(offer, shares, holdings.memory.what)
        patches = tuple(
            holdings.memory.stretches[name].bits.patch(*found.joined()) for name, found in decoded.stretches.items()
        )
        staged = Staged(
            offer.name,
            offer.version,
            commit.base,
            commit.target,
            decoded.elements,
            tuple(weights),
            shares,
        )
        # Deltas alone lead from what is not known to what is not known.
        content = commit.target.content if self._content is not None else None
        self._ready = Ready(staged, patches, kept, weights, parts, content, offer.published)
        return staged

    def give_up(self) -> None:
        """Forget what is staged. IncompleteError if some of it may be in the module already."""
        if self._is_partial:
            raise self._mixture()
        self._ready = None

    def apply(self) -> Staged:
        """Write what is staged into the module, which must not serve meanwhile; after a stop, write all of it again.

        When it returns, every element that was staged has its new bits, and the loader has written all that it makes of
        what it was sent. Whatever is raised later than ConflictError, with which nothing was changed, leaves a mixture
        (`is_partial`): the next call finishes it, and until then the module is at no version. UsageError if nothing is
        staged, HookError if the loader fails, or does not write what it should.
        """
        ready = self._ready
        if ready is None:
            raise UsageError("apply", "nothing is staged", hint="call stage first")
        holdings = self._known()
        self._check_place(holdings)
        if not self._is_partial and not all(patch.has_old() for patch in ready.patches):
            facts = "has other bits than when the change was staged"
            raise ConflictError(holdings.memory.what, facts, hint=_ANEW)
        self._is_partial = True
        for patch in ready.patches:
            patch.write()
        after = Holdings(holdings.memory, holdings.placement, ready.kept)
        if ready.weights:
            send(self._module, self._load, after, ready.weights)
        if not all(patch.has_new() for patch in ready.patches) or differs_from_kept(after, ready.weights) is not None:
            raise DamagedError(holdings.memory.what, "does not have the bits that were written", hint=AGAIN)
        made = digest_made(after, after.placement.made_of(ready.weights))
        self._holdings, self._parts, self._made = after, ready.parts, {**self._made, **made}
        self._content, self._published = ready.content, ready.published
        self._ready, self._is_partial = None, False
        return ready.staged

    # How it does it

    def _known(self) -> Holdings:
        if self._holdings is None:
            raise UsageError("receiver", "does not know yet where the module holds what", hint="call stage, or learn")
        return self._holdings

    def _mixture(self) -> IncompleteError:
        return IncompleteError(self._known().memory.what, "holds a mixture: an apply was stopped", hint=AGAIN)

    def _check_place(self, holdings: Holdings) -> None:
        if (name := holdings.memory.moved(holdings.names)) is not None:
            facts = f"tensor {shown(name)} does not lie any more where it lay when this receiver was made"
            raise ConflictError(holdings.memory.what, facts, hint="make a new receiver when the module is in its place")


def _twin_of(twin: tuple[Any, Load | None]) -> tuple[Any, Load]:
    if not isinstance(twin, tuple) or len(twin) != 2:
        raise UsageError("twin", "is no pair of a module and its loader", hint="write twin=(module, None) for its own")
    return twin[0], loader_of(*twin, what=("twin", "twin"))


def _shares(placement: Placement, parts: Mapping[Part, bytes], kept: Mapping[str, Elements]) -> Shares:
    # What is kept was compared with what the module has of it.
    others = {part: sums for part, sums in parts.items() if part.tensor not in kept}
    loaded = {name: digest_whole(placement.forms[name], elements) for name, elements in kept.items()}
    return Shares(placement.forms, others, loaded)

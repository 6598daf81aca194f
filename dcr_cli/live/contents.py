"""What containers had that a module reaches, and putting it back, while others may go on using them.

Nothing is written that is as it was, and nothing emptied to be filled again, so that no other thread finds a part
without its attributes. What a module's parts have as attributes is theirs: of that, all is put back. Of other
containers, such as a queue of requests in an object that the module shares with its engine, it is the tensors and the
arrays, what is under a key that was there, and numbers in a list that is as long as it was: what others put into them
or took out meanwhile stays so. What the tensors and arrays hold is outside.py's matter.
"""

from __future__ import annotations

from types import CellType
from typing import Any

import numpy as np
import torch

from dcr_cli.live.reach import NUMBERS, Container

_ELEMENTS = (torch.Tensor, np.ndarray)
_Missing = object()


class Contents:
    """What a container has when this is made."""

    def __init__(self, container: Container, *, is_own: bool) -> None:
        self._container = container
        self._is_own = is_own
        self._copy = _copy(container)

    def put_back(self) -> None:
        """Give the container what it had."""
        container, copy = self._container, self._copy
        if _identities(_copy(container)) == _identities(copy):
            return
        if isinstance(container, dict):
            self._put_back_entries(container)
        elif isinstance(container, list):
            self._put_back_list(container)
        elif isinstance(container, set):
            now = {id(each): each for each in container}
            old = {id(each): each for each in copy}
            container.difference_update([now[each] for each in now.keys() - old.keys() if self._is_ours(now[each])])
            container.update([old[each] for each in old.keys() - now.keys() if self._is_ours(old[each])])
        elif copy:
            container.cell_contents = copy[0]
        else:
            del container.cell_contents

    def _is_ours(self, value: Any) -> bool:
        """Whether something is put back, or taken out, wherever it was or is not."""
        return self._is_own or isinstance(value, _ELEMENTS)

    def _put_back_entries(self, container: dict[Any, Any]) -> None:
        copy: dict[Any, Any] = self._copy
        for key, value in copy.items():
            now = container.get(key, _Missing)
            if now is not value and (now is not _Missing or self._is_ours(value)):
                container[key] = value
        for key, value in tuple(dict.items(container)):
            if key not in copy and self._is_ours(value):
                container.pop(key, None)
        if self._is_own and list(container) != list(copy):
            # The order of a module's parts is that of its tensors.
            for key, value in copy.items():
                container.pop(key, None)
                container[key] = value

    def _put_back_list(self, container: list[Any]) -> None:
        copy: list[Any] = self._copy
        if self._is_own or _elements_of(container) != _elements_of(copy):
            container[:] = copy
        elif len(container) == len(copy):
            for place, value in enumerate(copy):
                if isinstance(value, NUMBERS) and container[place] is not value:
                    container[place] = value


def own_containers(module: Any) -> set[int]:
    """By `id`, what the parts of a module have as attributes, and the dicts of these."""
    attributes = [vars(part) for part in module.modules()]
    return {id(each) for each in attributes} | {id(value) for each in attributes for value in tuple(each.values())}


def _copy(container: Container) -> Any:
    if isinstance(container, CellType):
        try:
            return [container.cell_contents]
        except ValueError:
            return []
    return dict(dict.items(container)) if isinstance(container, dict) else list(container)


def _identities(copy: Any) -> list[Any]:
    if isinstance(copy, dict):
        return [(key, id(value)) for key, value in copy.items()]
    return [id(value) for value in copy]


def _elements_of(values: list[Any]) -> list[int]:
    return [id(value) for value in tuple(values) if isinstance(value, _ELEMENTS)]

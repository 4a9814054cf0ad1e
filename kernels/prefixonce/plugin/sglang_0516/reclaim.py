"""Makes a free run where there is none: evicts what was used least recently among the nodes that lie in one place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from prefixonce.layout import oldest_window

_IN_USE = np.iinfo(np.int64).max


class Reclaimer:
    """SGLang evicts the oldest leaves wherever they lie, so in a full pool the free pages are never neighbours.

    Only the order of the last uses decides, never a clock's value: tensor-parallel ranks agree.
    """

    def __init__(self, tree: Any) -> None:
        self._tree = tree

    def make_room(self, pages: int, free: NDArray[np.bool_]) -> bool:
        """Evicts unlocked nodes until `pages` consecutive pages are free; False if locked ones are everywhere.

        `free` [pages + 1] tells free pages; page 0 is never free. Waits for the device.
        """
        nodes = sorted(self._unlocked(), key=lambda node: (node.last_access_time, node.id))
        age = np.where(free, np.int64(0), _IN_USE)
        if nodes:
            slots = torch.cat([node.value for node in nodes]).cpu().numpy()
            lengths = [len(node.value) for node in nodes]
            age[slots // self._tree.page_size] = np.repeat(np.arange(1, len(nodes) + 1), lengths)
        window = oldest_window(age, pages, blocked=_IN_USE)
        if window is None:
            return False
        gone: set[int] = set()
        for rank in np.unique(age[window.start : window.end]).tolist():
            if rank:
                self._evict(nodes[rank - 1], gone)
        return True

    def _unlocked(self) -> Iterator[Any]:
        return (node for node in _under(self._tree.root_node) if node.lock_ref == 0)

    def _evict(self, node: Any, gone: set[int]) -> None:
        """The node and all below it, which without it could not be found any more."""
        for below in (*reversed(list(_under(node))), node):
            if below.id not in gone:
                gone.add(below.id)
                self._tree.token_to_kv_pool_allocator.free(below.value)
                self._tree._delete_leaf(below)
                self._tree._record_remove_event(below)


def _under(node: Any) -> Iterator[Any]:
    """Every node below this one, parents before their children."""
    nodes = list(node.children.values())
    while nodes:
        below = nodes.pop()
        nodes.extend(below.children.values())
        yield below

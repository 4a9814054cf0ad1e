"""The slots that a prefill writes, on the host by the time the tree asks: one copy a batch, sent with the forward."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# With overlap the next batch is launched before the results of this one are looked at.
_BATCHES_IN_FLIGHT = 2


@dataclass(frozen=True, slots=True)
class _Batch:
    """`spans`: per request its first new token and where its slots begin and end in `slots`, int64 on the host."""

    spans: dict[Any, tuple[int, int, int]]
    slots: Tensor
    copied: torch.cuda.Event | None

    def array(self) -> NDArray[np.int64]:
        if self.copied is not None:
            self.copied.synchronize()
        array: NDArray[np.int64] = self.slots.numpy()
        return array


class NewSlots:
    """Of the batches whose results are not processed yet. Asking the device request by request would wait each time
    behind the forward in flight, in which small kernels hardly find a free SM."""

    def __init__(self) -> None:
        self._batches: deque[_Batch] = deque(maxlen=_BATCHES_IN_FLIGHT)

    def launched(self, requests: Sequence[Any], prefix_lens: Sequence[int], lens: Sequence[int], slots: Tensor) -> None:
        """`slots` [sum of `lens`]: the requests' new ones in turn. The copy joins the current stream."""
        ends = np.cumsum(lens).tolist()
        begins = [0, *ends[:-1]]
        if slots.device.type == "cpu":
            host, copied = slots.to(torch.int64), None
        else:
            host = torch.empty(slots.shape, dtype=torch.int64, pin_memory=True)
            host.copy_(slots, non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no types for it
            copied.record()
        spans = dict(zip(requests, zip(prefix_lens, begins, ends, strict=True), strict=True))
        self._batches.append(_Batch(spans, host, copied))

    def of(self, request: Any, begin: int, end: int) -> NDArray[np.int64] | None:
        """Slots of the request's tokens [begin, end), or None where its last batch did not write them all."""
        batch = next((batch for batch in reversed(self._batches) if request in batch.spans), None)
        if batch is None:
            return None
        first, start, stop = batch.spans[request]
        if begin < first or end - first > stop - start:
            return None
        return batch.array()[start + begin - first : start + end - first]

    def forget(self, request: Any) -> None:
        """Its row is about to hold other slots than its last batch wrote."""
        for batch in self._batches:
            batch.spans.pop(request, None)

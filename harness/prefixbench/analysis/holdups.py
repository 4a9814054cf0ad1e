"""When for a while nobody got a token in the middle of decoding: the server stopped making, or the client reading."""

from __future__ import annotations

import numpy as np

from prefixbench.record import Block

HELD_UP = "held up"
"""How the flag of such a block begins. It says why a figure may be off and is no reason to leave the block out."""

_LONGER_S = 0.25  # than usual: a server's full garbage collection takes half a second
_TIMES_USUAL = 1.5  # where chunks are seldom, a wait of their own length is no surprise


def hold_up(block: Block) -> str | None:
    """The longest time without any arrival while all requests of the block decoded, if it is far from the usual time
    between two chunks of a request; from raw arrivals, so records of any age can be asked."""
    arrivals = [
        np.array([at_s for _, at_s in r.chunks]) for r in block.requests if r.error is None and len(r.chunks) > 1
    ]
    if not arrivals:
        return None
    begin, end = max(at_s[0] for at_s in arrivals), min(at_s[-1] for at_s in arrivals)
    together = np.sort(np.concatenate(arrivals))
    together = together[(together >= begin) & (together <= end)]
    if len(together) < 2:
        return None
    longest_s = float(np.diff(together).max())
    usual_s = float(np.median(np.concatenate([np.diff(at_s) for at_s in arrivals])))
    if longest_s < max(usual_s + _LONGER_S, _TIMES_USUAL * usual_s):
        return None
    return f"{HELD_UP}: no request got a token for {longest_s:.2f} s, {usual_s:.2f} s is usual"

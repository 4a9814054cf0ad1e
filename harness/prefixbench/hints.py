"""The one wording of "this name is unknown": what was given, what was probably meant, what is allowed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from prefixbench.errors import UsageError


def unknown(what: str, given: str, allowed: Iterable[str]) -> UsageError:
    names = sorted(allowed)
    near = difflib.get_close_matches(given, names, 1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return UsageError(f"{what} {given!r} is unknown; {hint}allowed: {', '.join(names) or 'none'}")

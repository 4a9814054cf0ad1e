"""Reads a ShareGPT file row by row: every row is accepted or rejected with a reason, none is lost silently.

Accepted styles of a row: `{"conversations": [{"from": "human"|"gpt"|"system", "value": text}, ...]}`, and inside
"conversations" also `{"role": "user"|"assistant"|"system", "content": text}`. The prompt is the first human turn that
a reply follows directly; system turns and turns before it are left out.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from prefixbench.errors import UsageError

_ROLES = {"human": "human", "user": "human", "gpt": "gpt", "assistant": "gpt", "system": "system"}


@dataclass(frozen=True, slots=True)
class Turn:
    """`row` counts from 1, as a person counts. `is_duplicate`: an earlier row has the same prompt and reply."""

    row: int
    prompt: str
    reply: str
    is_duplicate: bool = False


@dataclass(frozen=True, slots=True)
class Rejection:
    row: int
    reason: str


@dataclass(frozen=True, slots=True)
class ShareGpt:
    accepted: tuple[Turn, ...]
    rejected: tuple[Rejection, ...]


def read_sharegpt(path: Path) -> ShareGpt:
    """Raises UsageError, naming the file, when it is no UTF-8 JSON list; bad rows do not raise."""
    accepted: list[Turn] = []
    rejected: list[Rejection] = []
    seen: set[tuple[str, str]] = set()
    for row, entry in enumerate(_load_list(path), start=1):
        try:
            prompt, reply = _first_exchange(entry)
        except _RejectedError as error:
            rejected.append(Rejection(row, str(error)))
            continue
        accepted.append(Turn(row, prompt, reply, is_duplicate=(prompt, reply) in seen))
        seen.add((prompt, reply))
    return ShareGpt(tuple(accepted), tuple(rejected))


class _RejectedError(Exception):
    """Why a row is of no use; never leaves this module."""


def _load_list(path: Path) -> list[object]:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UsageError(f"ShareGPT file {path}: {error.strerror}; give the path of a JSON file") from error
    if not raw.strip():
        raise UsageError(f"ShareGPT file {path} is empty; expected a JSON list of conversations")
    if raw.startswith(b"\xef\xbb\xbf"):
        raise UsageError(f"ShareGPT file {path} begins with a byte order mark; save it as UTF-8 without one")
    try:
        rows = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UsageError(
            f"ShareGPT file {path} is not UTF-8 (byte {error.start}); convert it, e.g. with iconv"
        ) from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise UsageError(f"ShareGPT file {path} is not JSON: {error}") from None
    if not isinstance(rows, list):
        raise UsageError(f"ShareGPT file {path} holds {_kind(rows)}; expected a JSON list of conversations")
    return rows


def _first_exchange(entry: object) -> tuple[str, str]:
    if not isinstance(entry, dict):
        raise _RejectedError(f"row is {_kind(entry)}, not an object")
    if "conversations" not in entry:
        raise _RejectedError('no key "conversations"')
    turns = entry["conversations"]
    if not isinstance(turns, list):
        raise _RejectedError(f'"conversations" is {_kind(turns)}, not a list')
    if not turns:
        raise _RejectedError("no turns")
    said = [_role_and_text(turn) for turn in turns]
    for (role, prompt), (next_role, reply) in pairwise(said):
        if (role, next_role) == ("human", "gpt"):
            return _usable(prompt, "prompt"), _usable(reply, "reply")
    raise _RejectedError("no human turn that a reply follows")


def _role_and_text(turn: object) -> tuple[str, object]:
    if not isinstance(turn, dict):
        raise _RejectedError(f"a turn is {_kind(turn)}, not an object")
    name = turn.get("from", turn.get("role"))
    return _ROLES.get(name, "other") if isinstance(name, str) else "other", turn.get("value", turn.get("content"))


def _usable(text: object, what: str) -> str:
    if not isinstance(text, str):
        raise _RejectedError(f"{what} is {_kind(text)}, not text")
    if not text.strip():
        raise _RejectedError(f"{what} is blank")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise _RejectedError(f"{what} holds half of a surrogate pair and cannot be encoded") from None
    return text


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "a boolean", int: "a number", float: "a number"}
    return "missing or null" if value is None else names.get(type(value), type(value).__name__)

"""Files written for the user: whole or not at all, UTF-8 in any locale, and one line when a file cannot be written."""

from __future__ import annotations

import os
from pathlib import Path

from prefixbench.errors import StoreError


def write_whole(path: Path, text: str) -> None:
    """Puts `text` in the place of the file in one step, so that a full disk or a kill leaves the old one as it was.

    What is no file, such as /dev/stdout, is written to. StoreError when it cannot be done.
    """
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8", errors="replace", newline="\n")
        else:
            _replace(path.resolve(), text)  # a link keeps leading to it
    except OSError as error:
        raise StoreError(f"{path} could not be written: {error.strerror}") from None


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{os.getpid()}-{path.name}"[:255])
    try:
        temporary.write_text(text, encoding="utf-8", errors="replace", newline="\n")
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise

"""One base class for every error of the harness; the exit code of each kind is part of the interface."""

from __future__ import annotations

from typing import ClassVar


class BenchError(Exception):
    """One clear line for the user: what was given, what is allowed, what to do."""

    exit_code: ClassVar[int] = 1


class UsageError(BenchError):
    """A bad option, configuration value, selector or input file."""

    exit_code = 2


class NotComparableError(BenchError):
    """Two selections differ in something that is not under test."""

    exit_code = 3


class StoreError(BenchError):
    """A record that cannot be written or read."""

    exit_code = 4


class EngineError(BenchError):
    """The engine under test did not start, answer or stop as it should."""

    exit_code = 5

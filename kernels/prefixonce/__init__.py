"""Shared-prefix decode attention that reads a prefix once per step. Importing this needs neither a GPU nor SGLang."""

from prefixonce.dispatch import Limits, choose
from prefixonce.errors import PrefixOnceError
from prefixonce.step import Choice, DecodeStep, Mode, Path, PrefixGroup, Segment, SlotPiece

__all__ = [
    "Choice",
    "DecodeStep",
    "Limits",
    "Mode",
    "Path",
    "PrefixGroup",
    "PrefixOnceError",
    "Segment",
    "SlotPiece",
    "choose",
]

__version__ = "0.1.0"

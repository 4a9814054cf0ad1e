"""JSON that any parser accepts and that cannot break out of the HTML it is embedded in."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import cast

from pydantic_core import to_json

from prefixbench.report.view import Json

_HTML_ESCAPES = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


def clean(value: object) -> Json:
    """Dataclasses, mappings and sequences as plain JSON; a number that is not finite becomes None (missing)."""
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")  # a lone surrogate cannot be written to a file
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: clean(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {cast(str, clean(str(key))): clean(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean(item) for item in value]
    if hasattr(value, "item"):
        return clean(value.item())  # a numpy scalar
    raise TypeError(f"{type(value).__name__} has no JSON form in a report")


def dumps(value: object, *, indent: int | None = None) -> str:
    return to_json(clean(value), indent=indent).decode()


def dumps_for_script(value: object) -> str:
    """JSON for a `<script type="application/json">`: no `<`, so neither `</script>` nor `<!--` can appear."""
    return dumps(value).translate(_HTML_ESCAPES)

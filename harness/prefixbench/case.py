"""Case: one point of a sweep, and the hash that is its identity everywhere (folders, resume, comparison)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from pydantic import NonNegativeInt, PositiveInt  # checked when a record is read

Settings = dict[str, str | int | float | bool | None]


@dataclass(frozen=True)
class ServingCase:
    """What is asked of an engine. `path` is the mode asked for; which path ran is in the record.

    `plugin` False means unmodified SGLang without our plugin installed in the process. `engine_settings` and
    `workload_settings` hold only what changes the measured quantity (page size, stock backend, seed, ...).
    """

    model: str
    path: str
    plugin: bool
    prefix_tokens: NonNegativeInt
    suffix_tokens: NonNegativeInt
    output_tokens: PositiveInt
    concurrency: PositiveInt
    tensor_parallel: PositiveInt
    engine: str
    stock_backend: str
    workload: str
    engine_settings: Settings
    workload_settings: Settings
    model_settings: Settings
    kind: str = "serving"


@dataclass(frozen=True)
class KernelCase:
    """One launch shape of one implementation (ours or a peer's). Head counts are per GPU."""

    implementation: str
    prefix_tokens: NonNegativeInt
    suffix_tokens: NonNegativeInt
    batch: PositiveInt
    q_heads: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt
    page_size: PositiveInt
    dtype: str
    layout: str
    settings: Settings
    kind: str = "kernel"


@dataclass(frozen=True)
class NumericsCase:
    """The same given tokens decoded by one path, for their log-probabilities.

    `role`: "path" is compared with "reference", stock in the same batch; "noise" is stock in batches of another size.
    `fault` is what was planted in the plugin: "none" but in the control, which must be found out.
    """

    model: str
    role: Literal["reference", "noise", "path"]
    path: str
    concurrency: PositiveInt
    requests: PositiveInt
    prefix_tokens: NonNegativeInt
    suffix_tokens: NonNegativeInt
    decode_tokens: PositiveInt
    tensor_parallel: PositiveInt
    stock_backend: str
    fault: str
    engine_settings: Settings
    workload_settings: Settings
    model_settings: Settings
    kind: Literal["numerics"] = "numerics"


@dataclass(frozen=True)
class OutsideCase:
    """A serving case measured twice on the same server: by our client, and by `client` with its `data_set`."""

    serving: ServingCase
    client: str
    data_set: str
    kind: Literal["outside"] = "outside"


Change = Literal["none", "one", "all"]


@dataclass(frozen=True)
class DispatchCase:
    """A decode step that the host decides and plans: `batch` rows over `groups` prefixes (0: nothing is shared).

    `change`: how many requests are others than in the step before. Head counts are per GPU.
    """

    mode: str
    groups: NonNegativeInt
    batch: PositiveInt
    change: Change
    prefix_tokens: NonNegativeInt
    suffix_tokens: NonNegativeInt
    q_heads: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt
    settings: Settings
    kind: Literal["dispatch"] = "dispatch"


Case = ServingCase | KernelCase | NumericsCase | OutsideCase | DispatchCase


def case_hash(case: Case) -> str:
    """12 hex digits of SHA-256 over the canonical JSON of the case; field order and launch count do not matter."""
    return fields_hash(asdict(case))


def fields_hash(fields: Mapping[str, object]) -> str:
    """The hash of a case as a record's file holds it: fields that a later version added are no part of it."""
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:12]

"""Case: one point of a sweep, and the hash that is its identity everywhere (folders, resume, comparison)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

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
    prefix_tokens: int
    suffix_tokens: int
    output_tokens: int
    concurrency: int
    tensor_parallel: int
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
    prefix_tokens: int
    suffix_tokens: int
    batch: int
    q_heads: int
    kv_heads: int
    head_dim: int
    page_size: int
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
    concurrency: int
    requests: int
    prefix_tokens: int
    suffix_tokens: int
    decode_tokens: int
    tensor_parallel: int
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
    groups: int
    batch: int
    change: Change
    prefix_tokens: int
    suffix_tokens: int
    q_heads: int
    kv_heads: int
    head_dim: int
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

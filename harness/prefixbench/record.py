"""Record: the narrow waist. Everything before produces it, everything after reads only it.

Schema history
  1  first version: serving and kernel measurements, raw samples, path that ran, environment, telemetry, events;
     kinds of measurement are added without a new version: numerics, outside, dispatch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from prefixbench.case import Case, Settings

SCHEMA_VERSION = 1

Status = Literal["ok", "partial", "failed", "oom", "timeout"]


@dataclass(frozen=True)
class Gpu:
    name: str
    memory_bytes: int
    driver: str | None
    sm_count: int | None = None


@dataclass(frozen=True)
class Environment:
    """What the machine was, observed at run time; never a setting. `None` means it could not be found out."""

    hostname: str
    os: str
    python: str
    cpu: str | None
    cpu_count: int
    memory_bytes: int
    gpus: tuple[Gpu, ...]
    packages: dict[str, str | None]
    git_commit: str | None
    git_dirty: bool | None
    cuda: str | None = None


@dataclass(frozen=True)
class Launch:
    """The replicate. Records of one launch share `launch_id`, so blocks measured side by side can be paired."""

    launch_id: str
    index: int
    started_at: str
    startup_s: float | None
    server_command: tuple[str, ...] = ()


@dataclass(frozen=True)
class RequestSample:
    """One request as its client saw it; seconds since the block's start.

    `chunks` are (cumulative output tokens, arrival) in order; the first is the first token. Token counts come from
    `token_source`: "usage" (the server's count), "ids" (ids counted) or "estimated".
    """

    sent_s: float
    chunks: tuple[tuple[int, float], ...]
    prompt_tokens: int
    cached_tokens: int | None
    output_tokens: int
    token_source: Literal["usage", "ids", "estimated"]
    finish_reason: str | None
    error: str | None = None


@dataclass(frozen=True)
class StepCounters:
    """What the plugin counted in this block; `None` fields were not observable (no plugin, no timer).

    `steps` by path that ran (stock, paged, cascade, dense). `batch_histogram`: realized batch -> decode steps.
    `bytes_saved` is modelled: (rows - 1) x prefix K/V of each shared group, all layers. `decode_s` is the time of
    decode forwards (on a GPU the device's), `attention_s` the part in attention, `prefix_s` in shared-prefix attention.
    """

    steps: dict[str, int]
    decode_tokens: int
    group_steps: int
    prefix_tokens_read_once: int
    prefix_tokens_read_by_stock: int
    bytes_saved: int
    batch_histogram: dict[int, int]
    decode_s: float | None = None
    attention_s: float | None = None
    prefix_s: float | None = None
    plan_s: float | None = None
    reasons: dict[str, int] | None = None


@dataclass(frozen=True)
class TelemetrySample:
    at_s: float
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    power_w: float | None = None
    temperature_c: int | None = None
    gpu_utilisation: int | None = None
    memory_used_bytes: int | None = None
    throttle_reasons: int | None = None
    cpu_mhz: float | None = None
    load_other: float | None = None
    steal: float | None = None


@dataclass(frozen=True)
class Telemetry:
    source: Literal["nvml", "cpu", "none"]
    interval_s: float
    device: int | None
    samples: tuple[TelemetrySample, ...]
    note: str | None = None


@dataclass(frozen=True)
class Block:
    """One timed repetition inside a launch. `position` is its place in the launch's interleaved order.

    `cache_state` says how the prefix cache was prepared; `flags` are plain-word warnings found while measuring
    ("batch-below-concurrency", "cold-cache", ...): flagged blocks are excluded by rule in analysis, never here.
    """

    position: int
    started_at_unix_s: float
    wall_s: float
    requests: tuple[RequestSample, ...]
    counters: StepCounters | None
    cache_state: str
    telemetry: tuple[Telemetry, ...] = ()
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class PoolRun:
    """Consecutive slots of the KV pool in one state, for the memory picture. kind: prefix-run, pages or free."""

    start_slot: int
    length: int
    kind: Literal["prefix-run", "pages", "free"]
    node_id: int | None = None
    users: int | None = None


@dataclass(frozen=True)
class RadixEvent:
    """One event of the radix tree. kind: create, place, split, evict, flush. `detail` says where and why."""

    sequence: int
    kind: str
    node_id: int
    tokens: int
    layout: Literal["contiguous", "paged"] | None
    detail: str


@dataclass(frozen=True)
class PlacementTrace:
    """What the layout did in this launch: totals, the last events, and the pool before and after."""

    contiguous: int
    paged: int
    reasons: dict[str, int]
    events: tuple[RadixEvent, ...]
    events_dropped: int
    pool_slots: int
    pool_before: tuple[PoolRun, ...]
    pool_after: tuple[PoolRun, ...]
    device_waits: int | None = None
    """Nodes for which the scheduler waited for the device to learn their slots."""


@dataclass(frozen=True)
class ServingMeasurement:
    blocks: tuple[Block, ...]
    warmup_blocks: int
    placement: PlacementTrace | None
    dispatch_threshold_m_eff: int | None = None
    kind: Literal["serving"] = "serving"


@dataclass(frozen=True)
class KernelTiming:
    """Microseconds per launch, one entry per repetition. `clock` and `l2` say how; `graph_launches`: per replay."""

    l2: Literal["warm", "cold"]
    clock: str
    graph_launches: int
    warmup: int
    samples_us: tuple[float, ...]


@dataclass(frozen=True)
class Traffic:
    """Bytes of one launch. `source` is "ncu" for hardware counters, "model" for a formula."""

    source: Literal["ncu", "model"]
    dram_read_bytes: int | None
    dram_write_bytes: int | None
    l2_read_bytes: int | None
    l2_write_bytes: int | None = None


@dataclass(frozen=True)
class Correctness:
    """Largest absolute error against the fp64 oracle, and the bound that followed from the dtype.

    `max_abs_error` is None when the output holds NaN or infinity. `lse_error` is of the natural-log LSE; None when it
    is not finite, when the implementation returns none, and in records from before it was kept.
    """

    max_abs_error: float | None
    bound: float
    passed: bool
    oracle: str
    lse_error: float | None = None
    lse_bound: float | None = None


@dataclass(frozen=True)
class KernelMeasurement:
    timings: tuple[KernelTiming, ...]
    flops: int
    model_bytes: int
    traffic: tuple[Traffic, ...]
    correctness: Correctness | None
    copy_bandwidth_bytes_per_s: float | None
    matmul_flops_per_s: float | None
    telemetry: tuple[Telemetry, ...] = ()
    path_ran: str | None = None
    kind: Literal["kernel"] = "kernel"


@dataclass(frozen=True)
class NumericsMeasurement:
    """Natural logarithms of the probability that each position gave to the token it was forced to decode.

    `[requests][decode tokens]`; the token of the prefill is left out. `argmax`: what the position would have said.
    Measurements can be compared when `tokens_sha256`, of prompts and forced tokens, is the same.
    """

    tokens_sha256: str
    logprobs: tuple[tuple[float, ...], ...]
    argmax: tuple[tuple[int, ...], ...]
    counters: StepCounters
    kind: Literal["numerics"] = "numerics"


@dataclass(frozen=True)
class OutsideBlock:
    """One block as somebody else's client reports it, one entry per request; seconds.

    `decode_s` is from first to last token. `reported_*` are that client's own summary, kept as it gave it.
    """

    position: int
    wall_s: float
    input_tokens: int
    output_tokens: tuple[int, ...]
    first_token_s: tuple[float, ...]
    decode_s: tuple[float, ...]
    reported_tok_s: float
    reported_mean_tpot_ms: float


@dataclass(frozen=True)
class OutsidePair:
    """The same load on the same server by both clients, one after the other; `counters` are of the outside block."""

    ours: Block
    theirs: OutsideBlock
    counters: StepCounters | None


@dataclass(frozen=True)
class OutsideMeasurement:
    pairs: tuple[OutsidePair, ...]
    kind: Literal["outside"] = "outside"


@dataclass(frozen=True)
class DispatchMeasurement:
    """Host microseconds of one decode step before its kernels run, one entry per step.

    `decision_us`: the choice of the path alone, a mean over `decision_repeats` calls. `planning_us`: everything, the
    decision included; the copies to the device are started within it if `with_device_copies`.
    """

    decision_us: tuple[float, ...]
    decision_repeats: int
    planning_us: tuple[float, ...]
    with_device_copies: bool
    path_chosen: str
    kind: Literal["dispatch"] = "dispatch"


Measurement = ServingMeasurement | KernelMeasurement | NumericsMeasurement | OutsideMeasurement | DispatchMeasurement


@dataclass(frozen=True)
class Failure:
    kind: str
    message: str
    detail: str | None = None


@dataclass(frozen=True)
class Record:
    """One case in one launch. `record_id` is "<case_hash>/<launch_id>"; `labels` are honesty labels
    ("cpu", "random-weights", "synthetic-prompts", "modelled-bytes")."""

    schema_version: int
    record_id: str
    status: Status
    case_hash: str
    case: Case
    launch: Launch
    config: dict[str, object]
    overrides: tuple[str, ...]
    environment: Environment
    labels: tuple[str, ...]
    measurement: Measurement | None
    failure: Failure | None = None
    notes: Settings | None = None

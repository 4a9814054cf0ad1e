"""From a configuration to cases, and from cases to server launches that measure many of them at once.

The replicate is the server launch, and one server can measure every case that needs the same server: same model,
GPUs, engine settings and plugin. So a sweep is a list of launches; inside one, cells (the same sizes and concurrency)
follow one another in a seeded order, and within a cell the paths take turns. A cell is recorded as soon as it is done,
so a kill loses one cell at most.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from prefixbench.case import ServingCase, Settings, case_hash
from prefixbench.config import AXES, RunConfig
from prefixbench.config_checks import values


@dataclass(frozen=True)
class LaunchPlan:
    """One replicate: the cases it measures and its place in each case's series. Cases with and without the plugin need
    a server each; when they are in one plan, both servers run side by side."""

    cases: tuple[ServingCase, ...]
    index: int

    @property
    def plugin(self) -> bool:
        return any(case.plugin for case in self.cases)

    @property
    def side_by_side(self) -> bool:
        return len({case.plugin for case in self.cases}) > 1


def cases(config: RunConfig) -> tuple[ServingCase, ...]:
    """Every case of one job, in the order the axes were given; the baseline without the plugin comes last."""
    return tuple(
        _case(config, path, plugin, *sizes)
        for plugin in (True, False)
        for sizes in product(*(values(config, axis) for axis in AXES))
        for path, asked in config.path.items()
        if asked.plugin in ("both", "with" if plugin else "without")
    )


def plan(
    wanted: Sequence[ServingCase], launches: int, done: Mapping[str, int], side_by_side: bool = False
) -> tuple[LaunchPlan, ...]:
    """The launches still needed, given how many good records each case hash has.

    Launches with and without the plugin alternate, and which goes first alternates too, so that a machine that warms
    up or slows down favours neither. With `side_by_side` they are one launch and their blocks take turns.
    """
    plans: list[LaunchPlan] = []
    for index in range(launches):
        missing = tuple(case for case in wanted if done.get(case_hash(case), 0) <= index)
        parts = [missing] if side_by_side else [tuple(c for c in missing if c.plugin is on) for on in (True, False)]
        pair = [LaunchPlan(part, index) for part in parts if part]
        plans += pair if index % 2 == 0 else pair[::-1]
    return tuple(plans)


def cells(launch: LaunchPlan, seed: int) -> tuple[tuple[ServingCase, ...], ...]:
    """The launch's cases grouped by everything but the path; the order of cells is seeded and differs by launch."""
    ordered = by_size(launch.cases)
    random.Random(f"{seed} {launch.index}").shuffle(ordered)
    return tuple(ordered)


def by_size(wanted: Sequence[ServingCase]) -> list[tuple[ServingCase, ...]]:
    """Cases that differ in path or plugin only, together; they are sent the same prompts."""
    grouped: dict[tuple[int, int, int, int], list[ServingCase]] = {}
    for case in wanted:
        sizes = (case.prefix_tokens, case.suffix_tokens, case.output_tokens, case.concurrency)
        grouped.setdefault(sizes, []).append(case)
    return [tuple(group) for group in grouped.values()]


def turns(cell: Sequence[ServingCase], launch_index: int, blocks: int) -> tuple[tuple[ServingCase, ...], ...]:
    """Rounds of a cell. Each round starts one path later than the one before (counted over launches), and every
    second cycle runs backwards: over launches each path takes each place and follows each other path."""
    rounds = []
    for block in range(blocks):
        step = launch_index * blocks + block
        start = step % len(cell)
        order = [*cell[start:], *cell[:start]]
        rounds.append(tuple(order[::-1] if (step // len(cell)) % 2 else order))
    return tuple(rounds)


def has_graphs(config: RunConfig) -> bool:
    return config.engine.cuda_graph and config.gpus.device == "cuda"


def stock_backend(config: RunConfig) -> str:
    if config.engine.stock_backend != "auto":
        return config.engine.stock_backend
    return "torch_native" if config.gpus.device == "cpu" else "flashinfer"


def _case(
    config: RunConfig, path: str, plugin: bool, prefix: int, suffix: int, output: int, concurrency: int
) -> ServingCase:
    measure = config.measure
    return ServingCase(
        model=config.model.name,
        path=path,
        plugin=plugin,
        prefix_tokens=prefix,
        suffix_tokens=suffix,
        output_tokens=output,
        concurrency=concurrency,
        tensor_parallel=config.gpus.count,
        engine=config.engine.name,
        stock_backend=stock_backend(config),
        workload=config.workload.name,
        engine_settings=engine_settings(config, plugin),
        workload_settings={
            **config.workload.settings,
            "seed": config.seed,
            "measure.blocks": measure.blocks,
            "measure.warmup_blocks": measure.warmup_blocks,
            "measure.warmup_scope": measure.warmup_scope,
            "measure.warmup_output_len": measure.warmup_output_len,
            "measure.stream_interval": measure.stream_interval,
        },
        model_settings=model_settings(config),
    )


def engine_settings(config: RunConfig, plugin: bool) -> Settings:
    """What of the engine changes what is measured."""
    engine = config.engine
    settings: Settings = {
        "device": config.gpus.device,
        "page_size": engine.page_size,
        "max_running_requests": engine.max_running_requests,
        "max_total_tokens": engine.max_total_tokens,
        "chunked_prefill_size": engine.chunked_prefill_size,
        "mem_fraction_static": engine.mem_fraction_static,
        "cuda_graph_max_bs": engine.cuda_graph_max_bs if has_graphs(config) else 0,
        "extra_args": " ".join(engine.extra_args),
    }
    if engine.tokenizer:
        settings["tokenizer"] = True
    if engine.side_by_side:
        settings["side_by_side"] = True
    if plugin:
        settings |= {
            "dense_m_eff": engine.dense_m_eff,
            "min_run_tokens": engine.min_run_tokens,
            "timers": engine.timers,
        }
    return settings


def model_settings(config: RunConfig) -> Settings:
    model = config.model
    return {
        "weights": "real" if model.path else model.weights,
        "folder": Path(model.path).name if model.path else None,
        "hidden": model.hidden,
        "intermediate": model.intermediate,
        "layers": model.layers,
        "heads": model.heads,
        "kv_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "vocab": model.vocab,
        "dtype": model.dtype,
        "weights_seed": model.weights_seed,
    }

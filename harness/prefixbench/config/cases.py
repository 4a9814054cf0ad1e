"""From a configuration of `prefixbench run` to its cases, and what of each group of settings is part of a case."""

from __future__ import annotations

from itertools import product
from pathlib import Path

from prefixbench.case import ServingCase, Settings, case_hash
from prefixbench.config.checks import values
from prefixbench.config.run import AXES, RunConfig, parts


def sweep_cases(config: RunConfig) -> tuple[ServingCase, ...]:
    """Every case of one job, in the order the axes were given; the baseline without the plugin comes last. A case that
    several parts ask for is one case."""
    asked_for = (
        _case(part, path, plugin, *sizes)
        for plugin in (True, False)
        for part in parts(config).values()
        for sizes in product(*(values(part, axis) for axis in AXES))
        for path, asked in part.path.items()
        if asked.plugin in ("both", "with" if plugin else "without")
    )
    return tuple({case_hash(case): case for case in asked_for}.values())


def workload_settings(case: ServingCase) -> Settings:
    """The settings of the case's workload alone."""
    return {
        name: value
        for name, value in case.workload_settings.items()
        if name != "seed" and not name.startswith("measure.")
    }


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
    # Only where it is not the usual, so that the cases of earlier records keep their hashes.
    watch = {} if measure.watch == "always" else {"measure.watch": measure.watch}
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
            **watch,
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
    if engine.freeze_gc:
        settings["freeze_gc"] = True
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

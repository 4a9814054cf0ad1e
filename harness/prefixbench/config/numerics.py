"""The typed configuration of `prefixbench numerics`, and the cases that it asks for."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf

from prefixbench.case import NumericsCase
from prefixbench.config import checks as config_checks
from prefixbench.config.cases import engine_settings, model_settings, stock_backend
from prefixbench.config.run import PATHS, EngineConfig, GpusConfig, ModelConfig, RunConfig
from prefixbench.engines import forcing
from prefixbench.errors import UsageError
from prefixbench.hints import unknown

NO_FAULT = "none"
FAULTS = ("zero-prefix", "permute-prefix")
# Fewer requests can be exchanged in too few ways for any difference to be found significant.
LEAST_REQUESTS = 10


@dataclass
class NumericsConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    gpus: GpusConfig = field(default_factory=GpusConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    paths: list[str] = MISSING
    control: list[str] = MISSING
    control_fault: str = MISSING
    prefix_len: int = MISSING
    suffix_len: int = MISSING
    decode_len: int = MISSING
    concurrency: int = MISSING
    noise_concurrency: int = MISSING
    seed: int = MISSING
    tag: str | None = None
    runs: str = MISSING
    run_id: str = MISSING


def register_schema() -> None:
    ConfigStore.instance().store(name="numerics_schema", node=NumericsConfig)


def load(composed: DictConfig) -> NumericsConfig:
    """Composed YAML to a checked NumericsConfig; UsageError names the key, what it was and what is allowed."""
    config = OmegaConf.to_object(composed)
    if not isinstance(config, NumericsConfig):
        raise UsageError("the configuration does not start from numerics_schema; keep it first in the defaults list")
    config_checks.refuse_not_finite(config)
    config_checks.check_destination(config.runs, config.tag)
    config_checks.check_server(server_config(config, NO_FAULT))
    for key, paths in (("paths", config.paths), ("control", config.control)):
        for path in paths:
            if path not in PATHS:
                raise unknown(key, path, PATHS)
        if len(set(paths)) != len(paths):
            raise UsageError(f"{key}={list(paths)}: give each path only once")
    if not config.paths:
        raise UsageError(f"paths=[]: allowed are one or more of {', '.join(PATHS)}")
    if "stock" in config.control:
        raise UsageError("control=stock: a fault in the plugin cannot reach stock; choose among the other paths")
    if config.control_fault not in FAULTS:
        raise unknown("control_fault", config.control_fault, FAULTS)
    if config.engine.name != "sglang":
        raise UsageError(f"engine={config.engine.name}: log-probabilities need a real model; use engine=sglang")
    if config.model.weights == "dummy" and config.model.path is None:
        raise UsageError(
            f"model={config.model.name} has dummy weights, under which attention does not reach the output; "
            "use model=tiny, model=tiny-gqa4 or model.path=DIR"
        )
    _check_sizes(config)
    return config


def _check_sizes(config: NumericsConfig) -> None:
    for key, least in (("prefix_len", 1), ("suffix_len", 1), ("decode_len", 1), ("concurrency", LEAST_REQUESTS)):
        if getattr(config, key) < least:
            raise UsageError(f"{key}={getattr(config, key)}: must be at least {least}")
    config_checks.check_seed(config.seed)
    noise = config.noise_concurrency
    if noise < 1 or noise >= config.concurrency or config.concurrency % noise:
        raise UsageError(
            f"noise_concurrency={noise}: must divide concurrency={config.concurrency} and be smaller, so that stock "
            "decodes the same requests in batches of another size"
        )
    if config.concurrency > config.engine.max_running_requests:
        raise UsageError(
            f"concurrency={config.concurrency} is above engine.max_running_requests="
            f"{config.engine.max_running_requests}: the batch asked for could never run"
        )
    longest = config.prefix_len + config.suffix_len + config.decode_len + 1
    if longest > config.model.max_context:
        raise UsageError(
            f"prefix_len + suffix_len + decode_len + 1 is {longest} tokens; "
            f"{config.model.name} takes {config.model.max_context}"
        )


def server_config(config: NumericsConfig, fault: str) -> RunConfig:
    """The server of a launch. With a fault it runs without CUDA graphs: the fault changes what kernels are handed,
    and a recorded graph is handed nothing."""
    engine = replace(config.engine, extra_args=[*config.engine.extra_args, *forcing.SERVER_ARGS])
    if fault != NO_FAULT:
        engine = replace(engine, cuda_graph=False)
    return RunConfig(model=config.model, gpus=config.gpus, engine=engine)


def cases(config: NumericsConfig, server: RunConfig, fault: str) -> tuple[NumericsCase, ...]:
    """The cases of one launch: reference, noise, then the paths (of the control when a fault is planted)."""
    reference = NumericsCase(
        model=config.model.name,
        role="reference",
        path="stock",
        concurrency=config.concurrency,
        requests=config.concurrency,
        prefix_tokens=config.prefix_len,
        suffix_tokens=config.suffix_len,
        decode_tokens=config.decode_len,
        tensor_parallel=config.gpus.count,
        stock_backend=stock_backend(server),
        fault=fault,
        engine_settings=engine_settings(server, plugin=True),
        workload_settings={"seed": config.seed},
        model_settings=model_settings(server),
    )
    paths = config.paths if fault == NO_FAULT else config.control
    return (
        reference,
        replace(reference, role="noise", concurrency=config.noise_concurrency),
        *(replace(reference, role="path", path=path) for path in paths),
    )

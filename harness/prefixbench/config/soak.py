"""The typed configuration of `prefixbench soak`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf

from prefixbench.config import checks as config_checks
from prefixbench.config.run import EngineConfig, GpusConfig, ModelConfig, RunConfig
from prefixbench.errors import UsageError
from prefixbench.hints import unknown

NO_FAULT = "none"
FAULTS = (NO_FAULT, "zero-prefix", "permute-prefix")


@dataclass
class SoakConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    gpus: GpusConfig = field(default_factory=GpusConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    minutes: float = MISSING
    prompts: int = MISSING
    prefix_len: int = MISSING
    output_len: int = MISSING
    in_flight: int = MISSING
    noise_in_flight: int = MISSING
    gap_s: float = MISSING
    fault: str = MISSING
    seed: int = MISSING
    runs: str = MISSING
    run_id: str = MISSING


def register_schema() -> None:
    ConfigStore.instance().store(name="soak_schema", node=SoakConfig)


def load(composed: DictConfig) -> SoakConfig:
    """Composed YAML to a checked SoakConfig; UsageError names the key, what it was and what is allowed."""
    config = OmegaConf.to_object(composed)
    if not isinstance(config, SoakConfig):
        raise UsageError("the configuration does not start from soak_schema; keep it first in the defaults list")
    config_checks.refuse_not_finite(config)
    config_checks.check_destination(config.runs, None)
    config_checks.check_seed(config.seed)
    config_checks.check_server(server_config(config))
    if config.fault not in FAULTS:
        raise unknown("fault", config.fault, FAULTS)
    if config.engine.name != "sglang":
        raise UsageError(f"engine={config.engine.name}: a soak needs a real server; use engine=sglang")
    if config.model.weights == "dummy" and config.model.path is None:
        raise UsageError(
            f"model={config.model.name} has dummy weights, under which attention does not reach the output; "
            "use model=tiny, model=tiny-gqa4 or model.path=DIR"
        )
    if config.minutes <= 0 or config.gap_s <= 0:
        raise UsageError(f"minutes={config.minutes:g}, gap_s={config.gap_s:g}: both must be above 0")
    for key, least in (("prompts", 8), ("prefix_len", 8), ("output_len", 2), ("in_flight", 2), ("noise_in_flight", 1)):
        if getattr(config, key) < least:
            raise UsageError(f"{key}={getattr(config, key)}: must be at least {least}")
    longest = 2 * config.prefix_len + config.output_len
    if longest > config.model.max_context:
        raise UsageError(f"prompts and answers take up to {longest} tokens; {config.model.name} takes fewer")
    return config


def server_config(config: SoakConfig) -> RunConfig:
    """What the servers are started with. A planted fault cannot reach a recorded graph."""
    engine = replace(config.engine, cuda_graph=config.engine.cuda_graph and config.fault == NO_FAULT)
    return RunConfig(model=config.model, gpus=config.gpus, engine=engine)

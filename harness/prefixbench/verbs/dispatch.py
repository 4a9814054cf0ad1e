"""`prefixbench dispatch`: a Hydra application that times what the host decides and plans for one decode step."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from prefixbench import store
from prefixbench.analysis.claims.evidence import Evidence, is_gpu
from prefixbench.analysis.dispatcher.decisions import decisions, fastest_steps_ms
from prefixbench.case import case_hash
from prefixbench.config import dispatch as dispatch_config
from prefixbench.config import hydra_app
from prefixbench.config.dispatch import DispatchConfig
from prefixbench.config.overrides import compositions, one_line_errors
from prefixbench.errors import EngineError
from prefixbench.machine import environment, lock
from prefixbench.record import SCHEMA_VERSION, Launch, Record
from prefixonce.cost import CONSERVATIVE, Profile, profile_for


def main(argv: Sequence[str]) -> int:
    """Measures every point, then prints one table with the share of a measured step; 0 when all are recorded."""
    dispatch_config.register_schema()
    arguments = hydra_app.parse(argv)
    with one_line_errors():
        if hydra_app.only_shows(arguments):
            return hydra_app.launch("dispatch", "dispatch", task, argv)
        jobs = compositions("dispatch", arguments, arguments.overrides)
        asked = {(config.runs, config.against) for config in map(dispatch_config.load, jobs)}
        for root, against in asked:
            store.load(against, Path(root))  # a selector that nothing is called by must not cost a measurement
        run_id = store.new_run_id()
        code = hydra_app.launch("dispatch", "dispatch", task, [*argv, f"run_id={run_id}"])
        for root, against in sorted(asked) if code == 0 else ():
            summarize(store.of_run(Path(root), run_id), store.load(against, Path(root)), Console())
        return code


def task(composed: DictConfig) -> None:
    """One Hydra job: every case in this process, a record for each."""
    from prefixbench.measures.dispatch import measure_dispatch  # loads torch

    config = dispatch_config.load(composed)
    device, processors, profile = _device(config)
    cases = dispatch_config.cases(config, device, processors)
    job = HydraConfig.get()
    hashes = [case_hash(case) for case in cases]
    store.write_plan(Path(job.runtime.output_dir), hashes)
    files = {"config.yaml": OmegaConf.to_yaml(composed, resolve=True)}
    launch = Launch(
        f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{os.urandom(4).hex()}", 0, datetime.now(UTC).isoformat(), startup_s=None
    )
    observed = environment.observe()
    config_data, overrides = hydra_app.plain(composed), hydra_app.typed()
    first_gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0].strip() or "0"
    with lock.hold(["cpu" if device == "cpu" else f"gpu-{first_gpu}"]):
        for case, hashed in zip(cases, hashes, strict=True):
            measured = measure_dispatch(case, steps=config.steps, warmup=config.warmup, profile=profile)
            record = Record(
                schema_version=SCHEMA_VERSION,
                record_id=f"{hashed}/{launch.launch_id}",
                status="ok",
                case_hash=hashed,
                case=case,
                launch=launch,
                config=config_data,
                overrides=overrides,
                environment=observed,
                labels=("cpu",) if device == "cpu" else (),
                measurement=measured,
                notes={
                    "sweep": config.run_id,
                    "tag": config.tag,
                    "profile": profile.device,
                    "plugin_source": environment.plugin_digest(),
                },
            )
            store.save(record, Path(config.runs), files)


def _device(config: DispatchConfig) -> tuple[str, int, Profile]:
    """The device, how many processors are planned for, and the cost model that `auto` asks."""
    import torch

    has_gpu = torch.cuda.is_available()
    if config.device == "cuda" and not has_gpu:
        raise EngineError("device=cuda: torch finds no CUDA GPU here; use device=cpu or device=auto")
    if config.device == "cpu" or not has_gpu:
        return "cpu", config.processors, CONSERVATIVE
    found = torch.cuda.get_device_properties(0)
    return "cuda", found.multi_processor_count, profile_for(found.name)


_COLUMNS = "  {:<8} {:>7} {:>6} {:>7}  {:<8} {:>12} {:>12} {:>12} {:>14}"


def summarize(records: Sequence[Record], against: Sequence[Record], console: Console) -> None:
    """Lines of fixed width: a pipe or a log has no terminal to fit a table to."""
    points = [point for point in Evidence.of(against).points if is_gpu(str(point.key["device"]))]
    steps_ms = fastest_steps_ms(points)
    heading = ("mode", "groups", "batch", "change", "path", "decision us", "planning us", "its p99", "of a step")
    lines = [_COLUMNS.format(*heading)]
    for row in decisions(records).to_dict("records"):
        names = [row[name] for name in ("mode", "groups", "batch", "change", "path_chosen")]
        figures = [f"{row['decision_us']:.3g}", f"{row['planning_us']:.1f}", f"{row['planning_p99_us']:.1f}"]
        lines.append(_COLUMNS.format(*names, *figures, _share(float(row["planning_us"]), row["batch"], steps_ms)))
    without = "" if steps_ms else "; no decode step of a GPU is on record to compare with (against=SELECTOR)"
    lines.append(f"{len(records)} points recorded, host microseconds per step, medians{without}")
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _share(planning_us: float, batch: int, steps_ms: Mapping[int, float]) -> str:
    return f"{planning_us / 10 / steps_ms[batch]:.2f}%" if batch in steps_ms else "-"

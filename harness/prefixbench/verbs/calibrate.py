"""`prefixbench calibrate`: times a small design of cells, fits the cost model behind `auto`, writes its profile."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from hydra import compose, initialize_config_dir
from rich.console import Console

from prefixbench import store
from prefixbench.analysis.dispatcher.calibration import Calibration, calibrate
from prefixbench.analysis.dispatcher.timed_cells import STOCK_PEERS
from prefixbench.analysis.stats import Interval
from prefixbench.config import config_dir, hydra_app
from prefixbench.config import kernels as kernels_config
from prefixbench.config.overrides import one_line_errors, quoted
from prefixbench.jobs import kernels as kernels_runner
from prefixbench.measures.kernel import registry
from prefixbench.record import Record
from prefixbench.verbs import kernels as kernels_cli
from prefixbench.verbs.parser import Parser
from prefixbench.verbs.record_arguments import add_runs, select
from prefixonce.cost import slug


def main(argv: Sequence[str]) -> int:
    """Returns 0 when a profile was written from all points, 1 when some failed and take no part in it."""
    options = _parser().parse_args(argv)
    records = select(options.records, options.runs) if options.records else _measure(options)
    found = calibrate(records)
    profile = found.fitted.profile
    file = options.output or Path(f"{slug(profile.device)}.json")
    profile.dump(file, found.about)
    console = Console()
    failed = [record for record in records if record.status != "ok"]
    for line in (*_lines(found), *_failures(failed), f"wrote {file}; a server takes it with PREFIXONCE_PROFILE={file}"):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="prefixbench calibrate",
        description="Times stock, cascade and dense on the cells of conf/kernels/calibration.yaml (without a GPU: the "
        "torch paths on those of calibration-cpu.yaml) and fits the cost model behind `auto` to them.",
    )
    parser.add_argument("override", nargs="*", help="key=value of `prefixbench kernels`, such as repetitions=20")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="default: a GPU if present")
    parser.add_argument("--from", dest="records", nargs="+", metavar="SELECTOR", help="fit to these records instead")
    parser.add_argument("-o", "--output", type=Path, help="file of the profile; default: the device's name + .json")
    add_runs(parser)
    return parser


def _measure(options: argparse.Namespace) -> list[Record]:
    """One run of the kernel bench over the design for this device."""
    kernels_config.register_schema()
    device = kernels_runner.resolve_device(options.device)
    design = "calibration" if device.type == "cuda" else "calibration-cpu"
    run_id = store.new_run_id()
    overrides = [f"kernels={design}", f"device={device.type}", f"runs={quoted(str(options.runs))}", *options.override]
    with one_line_errors():
        with initialize_config_dir(str(config_dir()), version_base="1.3"):
            config = kernels_config.load(compose("kernels", overrides=overrides))
        shape = kernels_runner.plan_cells(kernels_config.requests(config), device)[0].shape
        stock = next(name for name in STOCK_PEERS if name in registry.serving(shape, device))
        overrides += [f"implementation=[{stock},cascade,dense]", f"run_id={run_id}"]
        hydra_app.launch("calibrate", "kernels", kernels_cli.task, overrides)
    return store.of_run(options.runs, run_id)


def _lines(found: Calibration) -> list[str]:
    profile, grid = found.fitted.profile, found.grid
    lines = [
        f"{profile.device}: {profile.source}",
        f"{found.fitted.cells} cells; error of the fitted times: median, 95%, largest",
        *(f"  {p.value:<8} {r.median:7.1%} {r.p95:7.1%} {r.largest:7.1%}" for p, r in found.fitted.residuals.items()),
    ]
    numbers = {"memory_bytes_per_us": profile.memory_bytes_per_us}
    numbers |= {f"stock.{name}": value for name, value in asdict(profile.stock).items()}
    numbers |= {f"shared.{name}": value for name, value in asdict(profile.shared).items()}
    lines += [f"  {name:<29} {value:,.4g}" for name, value in numbers.items()]
    if found.dense is not None:
        lines.append(f"dense over cascade from M_eff {_said(found.dense)}")
    for prefix, interval in found.sharing.items():
        lines.append(f"sharing over {grid.stock} at a prefix of {prefix} tokens from M_eff {_said(interval)}")
    return lines


def _said(interval: Interval) -> str:
    return f"{interval.estimate:,.0f} ({interval.low:,.0f} to {interval.high:,.0f}, {interval.n} cells)"


def _failures(failed: Sequence[Record]) -> list[str]:
    if not failed:
        return []
    reasons = dict.fromkeys(record.failure.message if record.failure else record.status for record in failed)
    return [f"{len(failed)} points failed and take no part in the fit:", *(f"  {reason}" for reason in [*reasons][:5])]

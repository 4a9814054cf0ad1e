"""`prefixbench numerics`: a Hydra application that asks whether a path is further from stock than stock from itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from prefixbench.analysis.numerics import QUANTILES, Deviation, Verdict, verdicts
from prefixbench.config import hydra_app
from prefixbench.config import numerics as numerics_config
from prefixbench.config.run import PATHS
from prefixbench.jobs import numerics as numerics_runner
from prefixbench.record import Record
from prefixbench.verbs.measured import measure


def main(argv: Sequence[str]) -> int:
    """0 when every path is inside and every control outside, 1 when not so or something was not measured."""
    numerics_config.register_schema()
    return measure("numerics", argv, task, lambda composed: numerics_config.load(composed).runs, summarize)


def task(composed: DictConfig) -> None:
    """One Hydra job."""
    config = numerics_config.load(composed)
    job = numerics_runner.Job(
        config=config,
        resolved=hydra_app.plain(composed),
        config_yaml=OmegaConf.to_yaml(composed, resolve=True),
        overrides=hydra_app.typed(),
        folder=Path(HydraConfig.get().runtime.output_dir),
    )
    console = Console(highlight=False)
    numerics_runner.run(job, lambda line: console.print(line, markup=False, soft_wrap=True))


_COLUMNS = "  {:<16} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {:>7} {:>9} {:>6}  {}"


def summarize(records: Sequence[Record], console: Console) -> int:
    """One table per launch, stock's own noise first; returns the exit code."""
    found = verdicts(records)
    lines: list[str] = []
    for launch_id in dict.fromkeys(verdict.record.launch.launch_id for verdict in found):
        lines += _table([verdict for verdict in found if verdict.record.launch.launch_id == launch_id])
    wrong = [verdict for verdict in found if not verdict.as_it_must_be]
    lines.append(f"{len(records)} cases recorded, {len(found) - len(wrong)} of {len(found)} verdicts as they must be")
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return 1 if wrong or not found else 0


def _table(launch: Sequence[Verdict]) -> list[str]:
    """Lines of fixed width: a pipe or a log has no terminal to fit a table to."""
    case = launch[0].case
    script = f"prefix {case.prefix_tokens}, {case.decode_tokens} forced tokens x {case.requests} requests in one batch"
    planted = f", FAULT PLANTED: {case.fault}" if launch[0].is_control else ""
    quantiles = [f"p{100 * q:g}" for q in QUANTILES]
    heading = ("", "positions", "mean", "median", *quantiles, "max", "other", "ratio", "p", "verdict")
    lines = [f"|log-probability - stock's|, {case.model}, {script}{planted}", _COLUMNS.format(*heading)]
    noise = next((verdict.agreement.noise for verdict in launch if verdict.agreement), None)
    if noise is not None:
        lines.append(_row("stock, its noise", noise, ("", "", f"stock in batches of {launch[0].noise_concurrency}")))
    for verdict in sorted(launch, key=lambda verdict: PATHS.index(verdict.case.path)):
        found = verdict.agreement
        if found is None:
            lines.append(f"  {verdict.case.path:<16} not measured: {verdict.why_not}")
            continue
        lines.append(_row(verdict.case.path, found.path, (f"{found.ratio:.3g}", f"{found.p_value:.3f}", verdict.said)))
    return [*lines, ""]


def _row(name: str, deviation: Deviation, rest: Sequence[str]) -> str:
    figures = [deviation.mean, deviation.median, *deviation.quantiles, deviation.largest]
    shown = ["-" if figure is None else f"{figure:.2e}" for figure in figures]
    return _COLUMNS.format(name, deviation.positions, *shown, f"{deviation.other_argmax:.2%}", *rest).rstrip()

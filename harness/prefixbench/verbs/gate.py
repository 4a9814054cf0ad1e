"""`prefixbench gate`: is the candidate slower than the baseline? Says pass, fail, undecided or not comparable."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from prefixbench.analysis.gate.judge import GateConfig, evaluate
from prefixbench.analysis.gate.selftest import DRAWS, replay, self_test
from prefixbench.config.gate import DEFAULT_FILE, load_config
from prefixbench.errors import StoreError, UsageError
from prefixbench.output import write_whole
from prefixbench.verbs import gate_output as output
from prefixbench.verbs.parser import Parser
from prefixbench.verbs.record_arguments import add_runs, select

_EPILOG = """exit codes
  0   pass: every regression beyond the margin is excluded
  1   fail: a metric is worse with confidence and by the minimum magnitude, or a point that worked has failed;
      with --self-test: an error rate is out of bounds
  2   undecided: neither; the message says how many launches would decide
  3   not comparable: something that is not under test differs; the message names it with both values
  4   a record could not be read or an output not written
  64  bad option, configuration or selector"""


class GateUsageError(UsageError):
    """A bad option; not 2, which is the gate's own word for undecided."""

    exit_code = 64


def main(argv: Sequence[str]) -> int:
    """Returns the outcome's exit code; see --help."""
    try:
        options = _parser().parse_args(argv)
        config = _config(options)
        return _test_itself(options, config) if options.self_test or options.replay else _gate(options, config)
    except UsageError as error:
        raise GateUsageError(str(error)) from None


def _config(options: argparse.Namespace) -> GateConfig:
    given = {name: getattr(options, name) for name in _OVERRIDES if getattr(options, name) is not None}
    if given.get("primary") == "none":
        given["primary"] = None
    return load_config(options.config, given)


def _gate(options: argparse.Namespace, config: GateConfig) -> int:
    if not options.baseline or not options.candidate:
        raise GateUsageError("--baseline and --candidate are needed, or --self-test")
    baseline, candidate = (select(words, options.runs) for words in (options.baseline, options.candidate))
    anchor = select(options.anchor, options.runs) if options.anchor else []
    both = {r.record_id for r in baseline} & {r.record_id for r in candidate}
    if both:
        raise GateUsageError(f"{len(both)} records are in both selections, such as {min(both)}; narrow one of them")
    result = evaluate(baseline, candidate, config, anchor)
    console = _console()
    if result.rows:
        console.print(output.result_table(result))
    for line in output.result_lines(result):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    _write(
        (options.junit, lambda: output.result_junit(result)),
        (options.markdown, lambda: output.result_markdown(result)),
        (options.json, lambda: output.result_json(result)),
    )
    return result.exit_code


def _test_itself(options: argparse.Namespace, config: GateConfig) -> int:
    if options.draws < 1:
        raise GateUsageError(f"--draws {options.draws}: must be at least 1")
    rates = self_test(config.rule, options.draws) if options.self_test else []
    if options.replay:
        real = replay(select(options.replay, options.runs), config, options.draws)
        if not real:
            needed = 2 * config.rule.min_launches
            raise GateUsageError(f"--replay needs at least {needed} launches of every case, of unchanged code")
        rates += real
    _console().print(output.rates_table(rates))
    _write(
        (options.junit, lambda: output.rates_junit(rates)),
        (options.markdown, lambda: output.rates_markdown(rates)),
        (options.json, lambda: output.rates_json(rates)),
    )
    return 0 if all(rate.ok for rate in rates) else 1


def _console() -> Console:
    """As wide as the terminal; a log file is not 80 columns wide."""
    return Console(width=None if sys.stdout.isatty() else 140)


def _write(*outputs: tuple[Path | None, Callable[[], str]]) -> None:
    """Every output that can be written; the first that could not is the error."""
    errors: list[StoreError] = []
    for file, text in outputs:
        try:
            if file is not None:
                write_whole(file, text())
        except StoreError as error:
            errors.append(error)
    if errors:
        raise errors[0]


_OVERRIDES = (
    "alpha",
    "min_magnitude",
    "margin",
    "min_launches",
    "primary",
    "metrics",
    "exclude",
    "under_test",
    "allow",
)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="prefixbench gate",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--baseline", nargs="+", metavar="WORD", help="selector of the records to compare with")
    parser.add_argument("--candidate", nargs="+", metavar="WORD", help="selector of the records under test")
    parser.add_argument("--anchor", nargs="+", metavar="WORD", help="selector of a baseline that never moves")
    add_runs(parser)
    parser.add_argument("--config", type=Path, default=DEFAULT_FILE, help="settings; default: conf/gate.yaml")
    rule = parser.add_argument_group("settings that replace those of the file")
    rule.add_argument("--alpha", type=float, help="chance of red on unchanged code, over all metrics")
    rule.add_argument("--min-magnitude", type=float, help="smallest regression that can be red (0.01 is 1%%)")
    rule.add_argument("--margin", type=float, help="a pass excludes regressions beyond this (0.05 is 5%%)")
    rule.add_argument("--min-launches", type=int, help="fewer launches on a side are undecided")
    rule.add_argument("--primary", metavar="METRIC", help="the metric that holds most of alpha; none: all are equal")
    rule.add_argument("--metrics", nargs="+", metavar="METRIC", help="what to compare")
    rule.add_argument("--exclude", nargs="+", metavar="FLAG", help="leave out blocks with a flag that begins like this")
    rule.add_argument("--under-test", nargs="+", metavar="PACKAGE", help="packages that may differ")
    rule.add_argument("--allow", nargs="+", metavar="KEY", help="other keys that may differ, such as 'cache state'")
    outputs = parser.add_argument_group("outputs beside the terminal")
    outputs.add_argument("--junit", type=Path, metavar="FILE", help="JUnit XML")
    outputs.add_argument("--markdown", type=Path, metavar="FILE", help="Markdown, for a job summary or a pull request")
    outputs.add_argument("--json", type=Path, metavar="FILE", help="everything, for programs")
    test = parser.add_argument_group("the gate's own test")
    test.add_argument("--self-test", action="store_true", help="error rates on simulated comparisons, with bounds")
    test.add_argument("--replay", nargs="+", metavar="WORD", help="error rates on real launches of unchanged code")
    test.add_argument("--draws", type=int, default=DRAWS, help=f"comparisons per scenario; default: {DRAWS}")
    return parser

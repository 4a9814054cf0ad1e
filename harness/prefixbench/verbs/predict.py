"""`prefixbench predict`: expected step time and speed-up per path, from a roofline model with its error bound."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import product

from rich import box
from rich.console import Console
from rich.table import Table

from prefixbench.analysis.roofline.checks import Hardware, Residual, load_hardware
from prefixbench.analysis.roofline.fit import on_paper
from prefixbench.analysis.roofline.model import Ceilings, Load, ModelShape
from prefixbench.analysis.roofline.predict import FITTED_ON, Prediction, Range, model_of, predict
from prefixbench.analysis.roofline.records import kernel_checks, step_checks
from prefixbench.errors import UsageError
from prefixbench.hints import unknown
from prefixbench.verbs.parser import Parser
from prefixbench.verbs.record_arguments import add_runs, select

_DEFAULTS = {"model": "llama-3.1-8b", "gpu": FITTED_ON, "prefix_len": "16384", "concurrency": "256"}
_DEFAULTS |= {"suffix_len": "64", "output_len": "128", "gpus": "1"}
_CUSTOM = ("copy_gb_s", "matmul_tflop_s", "l2_gb_s", "memory_gb")
# What the H200 shows: shared pages come from L2 this much faster than from memory.
_L2_OVER_COPY = 2.3
_MOST_DIGITS = 10
_LEAST_CUSTOM, _MOST_CUSTOM = 1e-3, 1e6
_EPILOG = """settings (key=value; prefix_len, concurrency and gpus may be lists)
  model=llama-3.1-8b       a model of conf/model
  gpu=h200                 a GPU of conf/hardware.yaml, or gpu=custom with
                           copy_gb_s=2000 matmul_tflop_s=500 [l2_gb_s=...] [memory_gb=80]
  prefix_len=16384         shared prefix, tokens
  concurrency=256          requests in flight
  suffix_len=64            unique prompt tokens per request
  output_len=128           output tokens per request
  gpus=1                   tensor parallel (the all-reduce is not modelled)"""


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    hardware = load_hardware()
    console = Console(width=None if sys.stdout.isatty() else 160)
    if options.paper:
        console.print(_residual_table("the seed's machine on paper: ceilings only, nothing fitted", on_paper(hardware)))
        return 0
    settings = _settings(options.setting)
    records = select(options.records, options.runs) if options.records else []
    gpu = _gpu(settings, hardware)
    fitted = model_of(gpu, hardware, kernel_checks(records, hardware), step_checks(records, hardware))
    model = hardware.model(settings["model"])
    suffix, output = _numbers(settings, "suffix_len")[0], _numbers(settings, "output_len")[0]
    prefixes, concurrencies, counts = (_numbers(settings, name) for name in ("prefix_len", "concurrency", "gpus"))
    _check(model, max(prefixes) + suffix + output, counts)
    predictions = [
        prediction
        for prefix, concurrency, gpus in product(prefixes, concurrencies, counts)
        for prediction in predict(model, fitted, Load(prefix, suffix + output // 2, concurrency, gpus), suffix + output)
    ]
    if options.json:
        data = [{**asdict(p), "pays": p.pays} for p in predictions]
        sys.stdout.write(json.dumps(data, indent=1, allow_nan=False) + "\n")
        return 0
    console.print(_table(predictions, f"{model.name} on {gpu.name}: a model, not a measurement"))
    console.print(_basis(gpu, bool(records), fitted.gpu.name in {c.gpu for c in hardware.kernels}), highlight=False)
    if options.residuals:
        console.print(_residual_table("what the model is off by", fitted.residuals))
    return 0


def _settings(words: Sequence[str]) -> dict[str, str]:
    given = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise UsageError(f"{word!r} is no setting; allowed: key=value, such as prefix_len=2048")
        if name not in _DEFAULTS and name not in _CUSTOM:
            raise unknown("setting", name, [*_DEFAULTS, *_CUSTOM])
        if name in given:
            raise UsageError(f"{name} is given twice; several values are one list, such as prefix_len=512,2048")
        given[name] = value
    if given.get("gpu") != "custom" and given.keys() & set(_CUSTOM):
        raise UsageError(f"{', '.join(sorted(given.keys() & set(_CUSTOM)))}: only with gpu=custom")
    return {**_DEFAULTS, **given}


def _check(model: ModelShape, most_tokens: int, gpu_counts: Sequence[int]) -> None:
    """UsageError for what no server would start with: heads that cannot be dealt out, requests beyond the context."""
    if most_tokens > model.max_context:
        raise UsageError(
            f"prefix_len + suffix_len + output_len = {most_tokens}: {model.name} has a context of {model.max_context}"
        )
    for count in gpu_counts:
        if model.heads % count or model.kv_heads % count:
            raise UsageError(
                f"gpus={count}: must divide the {model.heads} heads and {model.kv_heads} K/V heads of {model.name}"
            )


def _gpu(settings: Mapping[str, str], hardware: Hardware) -> Ceilings:
    if settings["gpu"] != "custom":
        return hardware.gpu(settings["gpu"])
    missing = [name for name in ("copy_gb_s", "matmul_tflop_s") if name not in settings]
    if missing:
        raise UsageError(f"gpu=custom needs {' and '.join(missing)}")
    copy = 1e9 * _positive(settings, "copy_gb_s")
    l2 = 1e9 * _positive(settings, "l2_gb_s") if "l2_gb_s" in settings else _L2_OVER_COPY * copy
    memory = 1e9 * _positive(settings, "memory_gb") if "memory_gb" in settings else math.inf
    return Ceilings("custom", copy, 1e12 * _positive(settings, "matmul_tflop_s"), l2, memory, "given by the user")


def _positive(settings: Mapping[str, str], name: str) -> float:
    try:
        value = float(settings[name])
    except ValueError:
        value = math.nan
    if not _LEAST_CUSTOM <= value <= _MOST_CUSTOM:
        limits = f"{_LEAST_CUSTOM:g} to {_MOST_CUSTOM:,.0f}"
        raise UsageError(f"{name}={settings[name][:100]!r}: a positive number is needed, from {limits}")
    return value


def _numbers(settings: Mapping[str, str], name: str) -> list[int]:
    words = settings[name].split(",")
    least = 0 if name in ("prefix_len", "suffix_len") else 1
    if not all(word.isdecimal() and len(word) < _MOST_DIGITS and int(word) >= least for word in words):
        raise UsageError(
            f"{name}={settings[name][:100]!r}: whole numbers from {least} on are needed, such as {name}=512,2048"
        )
    if len(words) > 1 and name in ("suffix_len", "output_len"):
        raise UsageError(f"{name}={settings[name]!r}: one number is needed")
    return [int(word) for word in words]


def _table(predictions: Sequence[Prediction], title: str) -> Table:
    table = Table(title=title, box=box.SIMPLE)
    for heading in ("prefix", "in flight", "GPUs", "path", "ms per step", "tok/s", "speed-up", "prefix share", "pays"):
        table.add_column(heading, justify="left" if heading in ("path", "pays") else "right")
    for p in predictions:
        speedup = "1" if p.path == "stock" else _range(p.speedup, "{:.2f}x")
        note = "" if p.fits else " (does not fit into memory)"
        sizes = (str(p.load.prefix_tokens), str(p.load.concurrency), str(p.load.tensor_parallel))
        figures = (_range(p.step_ms, "{:.1f}"), _range(p.tok_s, "{:,.0f}"), speedup, f"{p.prefix_share:.0%}")
        table.add_row(*sizes, p.path, *figures, ("—" if p.path == "stock" else p.pays) + note)
    return table


def _basis(gpu: Ceilings, has_records: bool, is_fitted: bool) -> str:
    if not is_fitted:
        return (
            f"No kernel of {gpu.name} is known: efficiencies are the {FITTED_ON}'s, and the ranges are how far "
            "reported A100 figures, and ratios of them, lie from such a prediction."
        )
    source = "published figures and the given records" if has_records else "published figures of peers' kernels"
    return f"Fitted to {source}; the range is the largest residual of what each path rests on. --residuals lists them."


def _residual_table(title: str, rows: Sequence[Residual]) -> Table:
    table = Table(title=title, box=box.SIMPLE)
    for heading in ("figure", "GPU", "measured or reported", "model", "residual"):
        table.add_column(heading, justify="left" if heading in ("figure", "GPU") else "right")
    for row in rows:
        residual = f"{math.expm1(row.log_error):+.0%}"
        table.add_row(row.what, row.gpu, _number(row.measured), _number(row.predicted), residual)
    return table


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 100 or value >= 1e6 else f"{value:,.0f}"


def _range(value: Range, text: str) -> str:
    return f"{text.format(value.expected)} ({text.format(value.low)} to {text.format(value.high)})"


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="prefixbench predict",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("setting", nargs="*", metavar="key=value")
    parser.add_argument("--records", nargs="+", metavar="WORD", help="selector of records to fit and check with")
    add_runs(parser)
    parser.add_argument("--residuals", action="store_true", help="list what the model is off by")
    parser.add_argument("--paper", action="store_true", help="the reported figures beside the seed's machine on paper")
    parser.add_argument("--json", action="store_true", help="for programs")
    return parser

"""What the roofline model is fitted to and checked with: conf/hardware.yaml and the model shapes of conf/model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from prefixbench.analysis.roofline.model import (
    Attention,
    Ceilings,
    Efficiencies,
    Load,
    ModelShape,
    PathName,
    prefix_ideal_s,
    prefix_seconds,
    suffix_ideal_s,
    suffix_seconds,
    unique_seconds,
)
from prefixbench.config import config_dir
from prefixbench.errors import UsageError
from prefixbench.hints import unknown

CONF = config_dir()
HEAD_DIM = 128


@dataclass(frozen=True)
class KernelCheck:
    """A measured launch of one layer. `op` says what served the prefix; a suffix, if any, is included in the time.

    `suffix` launches have no prefix, `unique` ones share nothing.
    """

    gpu: str
    op: str
    prefix: int
    suffix: int
    batch: int
    heads: int
    kv_heads: int
    us: float
    what: str = ""

    @property
    def layer(self) -> Attention:
        return Attention(self.heads, self.kv_heads, HEAD_DIM)

    def ideal_s(self, gpu: Ceilings) -> float:
        if self.op == "suffix":
            return suffix_ideal_s(gpu, self.layer, self.suffix, self.batch)
        return prefix_ideal_s(gpu, self.layer, self.prefix, self.batch, self.op)

    def predicted_s(self, gpu: Ceilings, found: Efficiencies) -> float:
        if self.op == "unique":
            return unique_seconds(gpu, self.layer, self.prefix, self.batch)
        suffix_s = suffix_seconds(gpu, self.layer, self.suffix, self.batch, found)
        if self.op == "suffix":
            return suffix_s
        return prefix_seconds(gpu, self.layer, self.prefix, self.batch, self.op, found) + suffix_s


@dataclass(frozen=True)
class StepCheck:
    """A measured decode step, or a throughput as the step that it implies."""

    gpu: str
    model: str
    path: PathName
    prefix: int
    suffix: int
    batch: int
    ms: float
    what: str = ""
    tensor_parallel: int = 1

    @property
    def load(self) -> Load:
        return Load(self.prefix, self.suffix, self.batch, self.tensor_parallel)


@dataclass(frozen=True)
class BytesCheck:
    """Reported traffic of one launch."""

    gpu: str
    layout: str
    prefix: int
    batch: int
    heads: int
    kv_heads: int
    bytes: float
    what: str


@dataclass(frozen=True)
class Residual:
    """A measured or reported figure beside the model's, in the figure's own unit."""

    what: str
    gpu: str
    measured: float
    predicted: float

    @property
    def log_error(self) -> float:
        return math.log(self.measured / self.predicted)


@dataclass(frozen=True)
class Hardware:
    """conf/hardware.yaml and the model shapes of conf/model."""

    gpus: Mapping[str, Ceilings]
    models: Mapping[str, ModelShape]
    kernels: tuple[KernelCheck, ...]
    steps: tuple[StepCheck, ...]
    reported_kernels: tuple[KernelCheck, ...]
    reported_steps: tuple[StepCheck, ...]
    reported_bytes: tuple[BytesCheck, ...]

    def gpu(self, name: str) -> Ceilings:
        if name not in self.gpus:
            raise unknown("gpu", name, self.gpus)
        return self.gpus[name]

    def model(self, name: str) -> ModelShape:
        if name not in self.models:
            raise unknown("model", name, self.models)
        return self.models[name]


def load_hardware(folder: Path = CONF) -> Hardware:
    data = yaml.safe_load((folder / "hardware.yaml").read_text())
    reported = data["reported"]
    return Hardware(
        gpus={name: _ceilings(name, values) for name, values in data["gpus"].items()},
        models={file.stem: _shape(file) for file in sorted((folder / "model").glob("*.yaml"))},
        kernels=tuple(KernelCheck(**row) for row in data["kernels"]),
        steps=tuple(StepCheck(**row) for row in data["steps"]),
        reported_kernels=tuple(KernelCheck(**row) for row in reported if "op" in row),
        reported_steps=tuple(_as_step(row) for row in reported if "tok_s" in row),
        reported_bytes=tuple(BytesCheck(**{**row, "bytes": float(row["bytes"])}) for row in reported if "bytes" in row),
    )


def _ceilings(name: str, values: Mapping[str, Any]) -> Ceilings:
    return Ceilings(name=name, source=values["source"], **{k: float(v) for k, v in values.items() if k != "source"})


def _shape(file: Path) -> ModelShape:
    data = yaml.safe_load(file.read_text())
    sizes = {name: int(data[name]) for name in ModelShape.__dataclass_fields__ if name not in ("name", "element_bytes")}
    widths = {"float32": 4, "bfloat16": 2, "float16": 2}
    if data["dtype"] not in widths:
        raise UsageError(f"{file}: dtype {data['dtype']!r} has no known size; allowed: {', '.join(widths)}")
    return ModelShape(name=data["name"], element_bytes=widths[data["dtype"]], **sizes)


def _as_step(row: Mapping[str, Any]) -> StepCheck:
    fields = {k: v for k, v in row.items() if k != "tok_s"}
    return StepCheck(ms=1e3 * row["batch"] / row["tok_s"], **fields)

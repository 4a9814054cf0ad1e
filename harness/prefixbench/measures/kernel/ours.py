"""Our paged, cascade and dense kernels through `prefixonce.attend`; on a CPU the torch paths that stand in for them."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from prefixbench.measures.kernel.implementation import (
    Implementation,
    Prepared,
    Result,
    choice_of,
    decode_step,
    head_spec,
)
from prefixbench.measures.kernel.inputs import Inputs, Shape
from prefixonce import Path, cpu
from prefixonce.limits import unsupported_reason


def implementations() -> tuple[Implementation, ...]:
    """Named like the paths that they are."""
    paths = (Path.PAGED, Path.CASCADE, Path.DENSE)
    return tuple(
        Implementation(path.value, path, partial(_unsupported, path), partial(_prepare, path)) for path in paths
    )


def _unsupported(path: Path, shape: Shape, device: torch.device) -> str | None:
    if path is not Path.PAGED and not shape.prefix_tokens:
        return "there is no prefix to read once"
    if path is Path.DENSE and shape.layout == "shared-slots":
        return "the prefix is not contiguous"
    if device.type != "cuda":
        return None
    return unsupported_reason(head_spec(shape), torch.cuda.get_device_capability(device))


def _prepare(path: Path, inputs: Inputs) -> Prepared:
    return _prepare_gpu(path, inputs) if inputs.device.type == "cuda" else _prepare_cpu(path, inputs)


def _prepare_gpu(path: Path, inputs: Inputs) -> Prepared:
    from prefixonce.attend import Pass, StepPlanner, attend

    shape = inputs.shape
    step = decode_step(shape, inputs.prefix_slots)
    table = inputs.row_slots.to(torch.int32)
    planner = StepPlanner(
        head_spec(shape), max_batch=shape.batch, max_tokens=max(1, table.numel()), device=inputs.device
    )
    passes = planner.update(step, choice_of(step, path), table, torch.arange(shape.batch, device=inputs.device))
    outs = [torch.full_like(q, torch.nan) for q in inputs.q]
    lse = torch.full(inputs.q[0].shape[:2], torch.nan, dtype=torch.float32, device=inputs.device)
    ran = Path.DENSE if Pass.DENSE in passes else Path.CASCADE if Pass.GATHER in passes else Path.PAGED

    def run(i: int) -> object:
        attend(planner, inputs.q[i], inputs.k[i], inputs.v[i], outs[i], scale=inputs.scale, lse=lse)
        return outs[i], lse

    return Prepared(run, _as_result, {"path_ran": ran.value, "passes": str(passes)})


def _prepare_cpu(path: Path, inputs: Inputs) -> Prepared:
    step = decode_step(inputs.shape, inputs.prefix_slots)
    plan = cpu.plan(step, choice_of(step, path), inputs.row_slots.to(torch.int32), torch.arange(inputs.shape.batch))

    def run(i: int) -> object:
        return cpu.run(plan, inputs.q[i], inputs.k[i], inputs.v[i], scale=inputs.scale), None

    return Prepared(run, _as_result, {"path_ran": path.value, "arithmetic": "torch on the CPU"})


def _as_result(ran: object) -> Result:
    assert isinstance(ran, tuple)
    out, lse = ran
    assert isinstance(out, Tensor)
    return Result(out, lse)

"""Records -> checks of the roofline model: our own kernels and steps in place of, or beside, the published ones."""

from __future__ import annotations

from collections.abc import Sequence

from prefixbench.analysis import frame
from prefixbench.analysis.roofline.checks import HEAD_DIM, Hardware, KernelCheck, StepCheck
from prefixbench.analysis.roofline.model import PATHS, PathName
from prefixbench.record import Record


def gpu_key(device: str, hardware: Hardware) -> str | None:
    """The GPU of conf/hardware.yaml whose every name part occurs in the device's name."""
    plain = device.lower()
    return next((key for key in hardware.gpus if all(part in plain for part in key.split("-"))), None)


def kernel_checks(records: Sequence[Record], hardware: Hardware) -> list[KernelCheck]:
    """Dense and cascade launches without a suffix, L2 warm, mean over process launches."""
    rows = frame.kernels(records)
    if rows.empty:
        return []
    usable = rows[
        rows["implementation"].isin(["dense", "cascade"])
        & (rows["layout"] != "unique")
        & (rows["suffix_tokens"] == 0)
        & (rows["head_dim"] == HEAD_DIM)
        & (rows["l2"] == "warm")
    ]
    checks = []
    shape = ["device", "implementation", "prefix_tokens", "batch", "q_heads", "kv_heads"]
    for key, group in usable.groupby(shape):
        device, op, *sizes = map(str, key)
        prefix, batch, heads, kv_heads = map(int, sizes)
        gpu = gpu_key(device, hardware)
        if gpu is not None:
            us = float(group["kernel_us"].mean())
            checks.append(KernelCheck(gpu, op, prefix, 0, batch, heads, kv_heads, us))
    return checks


def step_checks(records: Sequence[Record], hardware: Hardware) -> list[StepCheck]:
    """Steps of every path at every point of a known model and GPU."""
    checks = []
    for point in frame.points(frame.launches(frame.blocks(records, exclude=frame.UNTRUSTWORTHY))):
        gpu, model = gpu_key(str(point.key["device"]), hardware), str(point.key["model"])
        if gpu is None or model not in hardware.models:
            continue
        prefix, suffix, output, parallel = (
            int(str(point.key[name])) for name in ("prefix_tokens", "suffix_tokens", "output_tokens", "tensor_parallel")
        )
        for path in PATHS:
            rate, batch = (point.sample(path, name) for name in ("decode_tok_s", "steady_batch"))
            if rate and batch:
                mean_rate, mean_batch = (sum(s.values()) / len(s) for s in (rate, batch))
                name: PathName = path
                size = round(mean_batch)
                checks.append(
                    StepCheck(
                        gpu, model, name, prefix, suffix + output // 2, size, 1e3 * mean_batch / mean_rate, "", parallel
                    )
                )
    return checks

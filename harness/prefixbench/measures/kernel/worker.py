"""A process of its own that runs each case once: to compile ahead, or to be watched by Nsight Compute.

    python -m prefixbench.measures.kernel.worker < job.json

Prints one JSON line per case, `{"index": i, "error": null | text}`. With `profile`, the launches of each case lie
between `cudaProfilerStart` and `cudaProfilerStop` and begin with a marker kernel, so that the profiler's list of
launches can be cut into cases.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass

import torch

from prefixbench.measures.kernel import registry
from prefixbench.measures.kernel.implementation import Prepared
from prefixbench.measures.kernel.inputs import Shape, make_inputs

MARKER_KERNEL = "spin_kernel"
"""What `torch.cuda._sleep` launches; no implementation does."""


@dataclass(frozen=True)
class Job:
    """`cases` are (implementation, shape). Cases are not begun after `budget_s`."""

    cases: tuple[tuple[str, Shape], ...]
    profile: bool
    budget_s: float
    seed: int
    device: str = "cuda"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        given = json.loads(text)
        given["cases"] = tuple((name, Shape(*shape)) for name, shape in given["cases"])
        return cls(**given)


def main() -> int:
    job = Job.from_json(sys.stdin.read())
    start_s = time.monotonic()
    for index, (name, shape) in enumerate(job.cases):
        error = None
        if time.monotonic() - start_s > job.budget_s:
            error = f"the time budget of {job.budget_s:.0f} s was spent before it"
        else:
            try:
                _run_once(name, shape, job)
            except Exception as failure:  # noqa: BLE001 (peers raise anything, and the next case may be fine)
                error = f"{type(failure).__name__}: {str(failure).strip()[:300]}"
        sys.stdout.write(json.dumps({"index": index, "error": error}) + "\n")
        sys.stdout.flush()
    return 0


def _run_once(name: str, shape: Shape, job: Job) -> None:
    device = torch.device(job.device)
    prepared = registry.named(name).prepare(make_inputs(shape, sets=1, device=device, seed=job.seed))
    prepared.run(0)
    if device.type == "cuda":
        torch.cuda.synchronize()
        if job.profile:
            _profile(prepared)


def _profile(prepared: Prepared) -> None:
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    runtime.cudaProfilerStart()
    torch.cuda._sleep(1)  # type: ignore[no-untyped-call]
    prepared.run(0)
    torch.cuda.synchronize()
    runtime.cudaProfilerStop()


if __name__ == "__main__":
    sys.exit(main())

"""What compute-sanitizer watches: every path on problems with runs, slots, suffixes and odd sizes, checked as always.

compute-sanitizer --tool memcheck python tests/kernels/sanitized.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kernel_problems import Problem, bound, build, random_shape, shared  # the tests' folder is no package
from prefixonce.dispatch import Limits, choose
from prefixonce.step import Mode

HEADS = (32, 8, 128)


def check(problem: Problem, modes: tuple[Mode, ...]) -> None:
    for mode in modes:
        error, lse_error = problem.errors(problem.solve(mode))
        assert error <= bound(problem), (mode, problem.shape, error)
        assert lse_error <= 2e-5, (mode, problem.shape, lse_error)


def check_growing(problem: Problem) -> None:
    """Three steps of one batch, the last two of which only lengthen the plan of the first."""
    planner, rows_id = problem.planner(max_tokens=20_000), object()
    choice = choose(problem.step, Mode.DENSE, Limits(dense_m_eff=0, min_rows=1))
    for steps in (2, 1, 0):
        now = problem.before(steps, rows_id)
        planner.update(now.step, choice, now.table, now.table_rows)
        error, lse_error = now.errors(now.run(planner))
        assert error <= bound(now), (steps, error)
        assert lse_error <= 2e-5, (steps, lse_error)


def main() -> None:
    for prefix, suffix in ((900, 70), (1300, 0)):
        shape = shared(40, prefix, suffix, q_heads=32, kv_heads=8, head_dim=128, dtype=torch.bfloat16)
        check(build(shape, "cuda"), (Mode.CASCADE, Mode.DENSE))
        if suffix:
            check_growing(build(shape, "cuda"))
    for seed in (1, 2, 5):
        check(
            build(random_shape(seed, HEADS, torch.bfloat16, most_tokens=400), "cuda"),
            (Mode.PAGED, Mode.CASCADE, Mode.DENSE),
        )


if __name__ == "__main__":
    main()

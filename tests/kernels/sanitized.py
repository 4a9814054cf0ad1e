"""What compute-sanitizer watches: every path on problems with runs, slots, suffixes and odd sizes, checked as always.

compute-sanitizer --tool memcheck python tests/kernels/sanitized.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kernel_problems import Problem, bound, build, random_shape, shared  # the tests' folder is no package
from prefixonce.step import Mode

HEADS = (32, 8, 128)


def check(problem: Problem, modes: tuple[Mode, ...]) -> None:
    for mode in modes:
        error, lse_error = problem.errors(problem.solve(mode))
        assert error <= bound(problem), (mode, problem.shape, error)
        assert lse_error <= 2e-5, (mode, problem.shape, lse_error)


def main() -> None:
    for prefix, suffix in ((900, 70), (1300, 0)):
        shape = shared(40, prefix, suffix, q_heads=32, kv_heads=8, head_dim=128, dtype=torch.bfloat16)
        check(build(shape, "cuda"), (Mode.CASCADE, Mode.DENSE))
    for seed in (1, 2, 5):
        check(
            build(random_shape(seed, HEADS, torch.bfloat16, most_tokens=400), "cuda"),
            (Mode.PAGED, Mode.CASCADE, Mode.DENSE),
        )


if __name__ == "__main__":
    main()

"""Runs the Triton kernels in the interpreter, in this process and for one test, whatever was imported before."""

from __future__ import annotations

import pytest


@pytest.fixture
def interpreted(monkeypatch):
    """Swaps the compiled kernels of the portable modules, and Triton's own library, for their interpreted twins.

    fp16 only: the interpreter has no bfloat16 products.
    """
    import triton.experimental.gluon.language  # noqa: F401  imports Triton's library, so before that is swapped
    from triton import language
    from triton.language import standard
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    from prefixonce import attend, cascade, merge, paged, planner

    monkeypatch.setattr(attend, "_LARGE_MERGE_ROWS", 0)  # fewer programs, each of which costs milliseconds here
    for module in (language, standard, merge, paged, cascade, planner, attend):
        for name, value in list(vars(module).items()):
            if isinstance(value, JITFunction):
                monkeypatch.setattr(module, name, InterpretedFunction(value.fn))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """The same checks in the interpreter and, marked `gpu`, on the device (where Hopper's own kernel takes part)."""
    if request.param == "cpu":
        request.getfixturevalue("interpreted")
    return request.param

"""Decode graphs of SGLang 0.5.16 in variants: the stock graph of a batch size, and one per set of our launches.

SGLang looks a graph up by a key made in `_make_graph_key`; a variant is a label in that key. Capture runs once per
variant, replay picks the variant that the planned step needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from prefixonce.plugin.cuda import Variant

Hook = tuple[str, Callable[..., Any], HookType]
_RUNNER = "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner"


class GraphVariants:
    """`current` is the variant of the step that is being captured or replayed; None is SGLang's own graph."""

    def __init__(self) -> None:
        self.current: Variant | None = None

    def hooks(self) -> tuple[Hook, ...]:
        return (
            (f"{_RUNNER}.capture_one_shape", self._around_capture, HookType.AROUND),
            (f"{_RUNNER}._make_graph_key", self._after_key, HookType.AFTER),
        )

    def _around_capture(self, capture: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> None:
        # Stock first: the wrapped backend keeps one set of wrappers per batch size, made by its only capture.
        capture(runner, *args, **kwargs)
        if not runner.capture_forward_mode.is_decode():
            return
        try:
            for variant in Variant:
                self.current = variant
                capture(runner, *args, **kwargs)
        finally:
            self.current = None

    def _after_key(self, key: Any, _runner: Any, *_args: Any, **_kwargs: Any) -> Any:
        if self.current is None:
            return key
        label = self.current.label if key.variant_label is None else f"{key.variant_label}+{self.current.label}"
        return replace(key, variant_label=label)

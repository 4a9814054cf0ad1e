"""Prometheus counters beside SGLang's own, brought up to date whenever SGLang logs its statistics."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from prefixonce.plugin.counters import Counters
from prefixonce.plugin.placement import Placement
from prefixonce.plugin.runtime import Runtime
from prefixonce.step import Path

_FIGURE = re.compile(r"\d+(\.\d+)?")


class Series(NamedTuple):
    """One line of /metrics without SGLang's labels."""

    name: str
    labels: tuple[str, ...] = ()


# Name without Prometheus' ending _total: labels of our own, help.
_HELP: dict[str, tuple[tuple[str, ...], str]] = {
    "prefixonce_decode_steps": (("path",), "Decode steps by the path that served them."),
    "prefixonce_stock_decode_steps": (("reason",), "Decode steps left to the wrapped stock backend, by reason."),
    "prefixonce_decode_tokens": ((), "Tokens decoded."),
    "prefixonce_prefix_groups": ((), "Groups of requests whose shared prefix was read once, over all decode steps."),
    "prefixonce_prefix_tokens_read": ((), "Tokens of shared prefixes read by one layer, once per group and step."),
    "prefixonce_kv_bytes_saved": (
        (),
        "K/V bytes that reading shared prefixes once saved; modelled from token counts, not measured.",
    ),
    "prefixonce_nodes_placed": (("layout", "reason"), "Radix nodes by the layout they got when created, and why."),
    "prefixonce_tokens_placed": (("layout",), "Tokens of radix nodes by the layout the node got when created."),
}


class Metrics:
    """Counts in Prometheus what runtime and placement counted since the last time; decode steps pay nothing."""

    def __init__(self, runtime: Runtime, placement: Placement) -> None:
        self._runtime = runtime
        self._placement = placement
        self._before_reset: Counter[Series] = Counter()
        self._published: dict[Series, int] = {}
        self._metrics: dict[str, Any] = {}

    def settle(self) -> None:
        """To be called before the runtime's counters are reset: Prometheus' counters never go back."""
        self._before_reset.update(_of_steps(self._runtime.counters))

    def publish(self, labels: Mapping[str, Any], counter: Callable[..., Any] | None) -> None:
        """`labels` are SGLang's; `counter` is the class it was told to use instead of prometheus_client's, if any."""
        totals = self._before_reset.copy()
        totals.update(_of_steps(self._runtime.counters))
        totals.update(_of_placement(self._placement))
        for series, total in totals.items():
            self._child(series, labels, counter).inc(total - self._published.get(series, 0))
            self._published[series] = total

    def _child(self, series: Series, labels: Mapping[str, Any], counter: Callable[..., Any] | None) -> Any:
        own, documentation = _HELP[series.name]
        metric = self._metrics.get(series.name)
        if metric is None:
            # Imported late: prometheus_client looks for its multi-process folder only once, and SGLang sets it first.
            from prometheus_client import Counter as PrometheusCounter

            metric = (counter or PrometheusCounter)(series.name, documentation, labelnames=[*labels, *own])
            self._metrics[series.name] = metric
        return metric.labels(**labels, **dict(zip(own, series.labels, strict=True)))


def _of_steps(counters: Counters) -> Counter[Series]:
    # Paths that never ran are shown as 0, so that a rate over them is defined from the start.
    found = Counter({Series("prefixonce_decode_steps", (path.value,)): counters.steps[path] for path in Path})
    for reason, count in counters.stock_reasons.items():
        # Reasons carry figures; as labels they must be few.
        found[Series("prefixonce_stock_decode_steps", (_FIGURE.sub("N", reason),))] += count
    found[Series("prefixonce_decode_tokens")] = counters.decode_tokens
    found[Series("prefixonce_prefix_groups")] = counters.group_steps
    found[Series("prefixonce_prefix_tokens_read")] = counters.prefix_tokens_read_once
    found[Series("prefixonce_kv_bytes_saved")] = counters.bytes_saved
    return found


def _of_placement(placement: Placement) -> Counter[Series]:
    found: Counter[Series] = Counter()
    for (layout, reason), count in placement.nodes.items():
        found[Series("prefixonce_nodes_placed", (layout, _FIGURE.sub("N", reason)))] += count
    for layout, tokens in placement.tokens.items():
        found[Series("prefixonce_tokens_placed", (layout,))] += tokens
    return found

"""The selection as the sections need it: records, their frames, and the points of the sweep with what is missing."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pandas as pd

from prefixbench.analysis import frame
from prefixbench.analysis.attribution import MIN_ACTIVE_SHARE, RUNS_AS, Rung
from prefixbench.analysis.claims.evidence import NOT_MEASUREMENTS, Evidence
from prefixbench.analysis.frame import Point
from prefixbench.analysis.stats import Interval, Sample, instability, mean_interval, ratio
from prefixbench.case import ServingCase
from prefixbench.record import Record
from prefixbench.report.words import listing, path_rank

# The arm that speaks for the run in headline and attribution: the first of these that was measured.
HEADLINE_ARMS = ("auto", "full", "dense", "cascade", "paged")
LADDER = ("stock", "cascade", "full", "auto")
PLAIN, WITH_PLUGIN = "stock", "stock+plugin"
# Realized batches within this share of the concurrency count as what was asked.
BATCH_TOLERANCE = 0.02
_ALWAYS_SAID = ("prefix_tokens", "concurrency")


def path_of(arm: str) -> str:
    """The path whose colour an arm has: `stock+plugin` is stock."""
    return arm.partition("+")[0]


def arm_rank(arm: str) -> tuple[int, str]:
    return path_rank(path_of(arm)), arm


@dataclass(frozen=True)
class Family:
    """Points that differ in their prefix length alone: one chart, one option of a switch."""

    label: str
    points: tuple[Point, ...]

    @property
    def arms(self) -> list[str]:
        return sorted({arm for point in self.points for arm in point.arms}, key=arm_rank)


class Material:
    """Everything a section may read. Frames are computed once, on first use."""

    def __init__(self, records: Sequence[Record], selector: str) -> None:
        self.records = tuple(records)
        self.selector = selector
        self.evidence = Evidence(self.records)
        self._samples: dict[tuple[int, str, str], Sample] = {}

    @property
    def with_kernels(self) -> tuple[Record, ...]:
        """The records that say on what the page's kernels ran; deciding and planning is the host's work anywhere."""
        return tuple(record for record in self.records if record.case.kind != "dispatch") or self.records

    @property
    def invented(self) -> tuple[str, ...]:
        """Labels that say that nothing was measured; what they stand on is shown, never claimed."""
        return tuple(sorted({label for record in self.records for label in record.labels} & set(NOT_MEASUREMENTS)))

    @property
    def blocks(self) -> pd.DataFrame:
        return self.evidence.blocks

    @property
    def launches(self) -> pd.DataFrame:
        return self.evidence.launches

    @property
    def kernels(self) -> pd.DataFrame:
        return self.evidence.kernels

    @cached_property
    def points(self) -> tuple[Point, ...]:
        return tuple(
            sorted(self.evidence.points, key=lambda p: (_int(p, "prefix_tokens"), _int(p, "concurrency"), p.variant))
        )

    @cached_property
    def families(self) -> tuple[Family, ...]:
        grouped: defaultdict[tuple[str, ...], list[Point]] = defaultdict(list)
        for point in self.points:
            rest = tuple(str(value) for key, value in point.key.items() if key not in ("prefix_tokens", "concurrency"))
            grouped[(f"{_int(point, 'concurrency'):09d}", *rest, point.variant)].append(point)
        return tuple(Family(self.family_label(points), tuple(points)) for _, points in sorted(grouped.items()))

    @cached_property
    def _columns(self) -> Mapping[str, list[Any]]:
        """The launches as lists: asking pandas for each of thousands of samples takes most of a report's time."""
        names = ("launch_id", "arm", *frame.METRICS, *frame.CLOCKS, *frame.STEPS)
        return {name: self.launches[name].tolist() for name in names}

    @cached_property
    def _positions(self) -> Mapping[int, Mapping[str, list[int]]]:
        """By point and arm: where its launches stand in `_columns`."""
        arms = self._columns["arm"]
        found: dict[int, defaultdict[str, list[int]]] = {}
        for point in self.points:
            by_arm = found.setdefault(id(point), defaultdict(list))
            for position in point.rows.index.tolist():
                by_arm[arms[position]].append(position)
        return found

    def sample(self, point: Point, arm: str, column: str = "decode_tok_s") -> Sample:
        """Launch id -> value; empty when the arm was not measured at this point."""
        key = (id(point), arm, column)
        if key not in self._samples:
            launches, values = self._columns["launch_id"], self._columns[column]
            places = self._positions[id(point)].get(arm, ())
            self._samples[key] = {launches[i]: values[i] for i in places if not math.isnan(values[i])}
        return self._samples[key]

    @cached_property
    def headline_point(self) -> Point | None:
        """By rule, not by result: where stock and a path of ours ran, in several launches if any point was, the longest
        prefix, then most requests, then most launches."""
        able = [p for p in self.points if self.baseline(p) and self.headline_arm(p)]

        def rank(point: Point) -> tuple[bool, int, int, int]:
            launches = self.headline_launches(point)
            return launches > 1, _int(point, "prefix_tokens"), _int(point, "concurrency"), launches

        return max(able, key=rank, default=None)

    def headline_launches(self, point: Point) -> int:
        """Of the arm with fewer: an interval needs two."""
        arms = (self.baseline(point), self.headline_arm(point))
        return min(len(self.sample(point, arm or "")) for arm in arms)

    def headline_arm(self, point: Point) -> str | None:
        return next((arm for arm in HEADLINE_ARMS if self.sample(point, arm)), None)

    def baseline(self, point: Point) -> str | None:
        """Unmodified SGLang; where it was not measured, the plugin told to do nothing."""
        return next((arm for arm in (PLAIN, WITH_PLUGIN) if self.sample(point, arm)), None)

    def mean(self, point: Point, arm: str, metric: str = "decode_tok_s") -> Interval:
        return mean_interval(list(self.sample(point, arm, metric).values()))

    def speedup(self, point: Point, arm: str, metric: str = "decode_tok_s") -> Interval | None:
        baseline = self.baseline(point)
        value, reference = self.sample(point, arm, metric), self.sample(point, baseline or "", metric)
        return ratio(value, reference) if value and reference else None

    def why_missing(self, point: Point, arm: str, metric: str = "decode_tok_s") -> str:
        """Why an arm has no value at a point: not run, failed, left out, or not defined."""
        rows = point.rows[point.rows["arm"] == arm]
        if rows.empty:
            return self.failures.get((arm, _int(point, "prefix_tokens"), _int(point, "concurrency")), "not run")
        blocks = self.blocks[self.blocks["record_id"].isin(rows["record_id"])]
        reasons = [reason for reason in blocks["exclusion"] if reason]
        for text in blocks["missing"]:
            reasons += [part.partition(": ")[2] for part in text.split("; ") if part.startswith(f"{metric}:")]
        return "; ".join(dict.fromkeys(reasons)) or "no block was measured"

    @cached_property
    def failures(self) -> Mapping[tuple[str, int, int], str]:
        """Arm, prefix and concurrency of the points that have no measurement -> why."""
        return {
            (frame.arm_name(r.case), r.case.prefix_tokens, r.case.concurrency): (
                f"{r.status}: {' '.join(r.failure.message.split())}" if r.failure else r.status
            )
            for r in self.records
            if isinstance(r.case, ServingCase) and r.measurement is None
        }

    def rung(self, point: Point, arm: str) -> Rung:
        """The arm as attribution sees it: its throughput, and the steps that each kernel really served."""
        return Rung(path_of(arm), self.sample(point, arm), self.step_shares(point, arm))

    def step_shares(self, point: Point, arm: str) -> Mapping[str, float] | None:
        """Share of decode steps that each kernel served over all launches of the arm; None without counters."""
        steps = [sum(self.sample(point, arm, column).values()) for column in frame.STEPS]
        total = sum(steps)
        return {kernel: n / total for kernel, n in zip(frame.KERNELS, steps, strict=True)} if total > 0 else None

    def inactive(self, point: Point, arm: str) -> str | None:
        """One sentence when a path did not really run, else None."""
        if arm not in RUNS_AS or not self.sample(point, arm):
            return None
        share = self.rung(point, arm).share_of(RUNS_AS)
        names = " or ".join(sorted(RUNS_AS[arm]))
        where = f"at {self.point_label(point)}"
        if share is None:
            return f"It is not known whether {names} ran {where}: nothing counted the steps of path {arm}."
        if share >= MIN_ACTIVE_SHARE:
            return None
        return f"{names} active on {share:.0%} of steps {where}; path {arm} was asked for and gets no credit."

    def advice(self, point: Point, arm: str) -> str | None:
        """What makes this mean shaky and what to do about it."""
        return instability(list(self.sample(point, arm).values()))

    def point_label(self, point: Point) -> str:
        return f"{_int(point, 'prefix_tokens'):,} shared tokens, {self.family_label([point])}"

    def family_label(self, points: Sequence[Point]) -> str:
        """Requests in flight as they really were, and what tells this family from the others."""
        facts = _facts(points[0])
        extra = [f"{name.replace('_', ' ')} {facts[name]}" for name in self._telling if name in facts]
        return ", ".join([in_flight(points), *extra])

    @cached_property
    def _telling(self) -> tuple[str, ...]:
        """The facts that tell apart points with as many in flight which no fact before them tells apart."""
        facts = [_facts(point) for point in self.points]
        known = [str(point.key["concurrency"]) for point in self.points]
        telling = []
        for name in dict.fromkeys(name for one in facts for name in one):
            finer = [f"{before}|{one.get(name)}" for before, one in zip(known, facts, strict=True)]
            if len(set(finer)) > len(set(known)):
                telling.append(name)
                known = finer
        return tuple(telling)


def _facts(point: Point) -> dict[str, str]:
    """Everything about a point but its prefix and how many are in flight, the most telling first."""
    settings = json.loads(str(point.key["settings"]))
    return {
        **{name: str(value) for name, value in point.key.items() if name not in (*_ALWAYS_SAID, "settings")},
        **{name: str(value) for group in settings.values() for name, value in group.items()},
        **json.loads(point.variant or "{}"),
    }


def in_flight(points: Sequence[Point]) -> str:
    """`32 in flight`, or what ran when it was not what was asked: a label never promises a batch that did not run."""
    asked = _int(points[0], "concurrency")
    realized = sorted({round(b) for point in points for b in point.rows["realized_batch"].dropna()})
    if all(abs(batch - asked) <= BATCH_TOLERANCE * asked for batch in realized):
        return f"{asked} in flight"
    ran = str(realized[0]) if len(realized) == 1 else f"{realized[0]} to {realized[-1]}"
    return f"{ran} in flight ({asked} asked for)"


def devices(material: Material) -> str:
    names = {frame.device_name(record.environment) for record in material.with_kernels}
    return listing(sorted(names))


def _int(point: Point, name: str) -> int:
    return int(str(point.key[name]))

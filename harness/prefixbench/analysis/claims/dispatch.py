"""The judge of the claim about the dispatcher's own cost: D2."""

from __future__ import annotations

import pandas as pd

from prefixbench.analysis.claims.evidence import Evidence, Finding, Judge, figure, is_gpu, not_run
from prefixbench.analysis.claims.reported import Claim
from prefixbench.analysis.dispatcher.decisions import SHARING_ARMS, decisions, fastest_steps_ms
from prefixbench.analysis.stats import mean_interval


def judge_decision(claim: Claim, evidence: Evidence) -> Finding:
    """D2: the decision alone, in the slowest case in which the batch stays as it was; any machine counts."""
    rows = decisions(evidence.records)
    steady = rows if rows.empty else rows[rows["change"] == "none"]
    if steady.empty:
        return not_run("the decision alone was not timed: `prefixbench dispatch` does it", _planning(evidence))
    slowest = steady.sort_values("decision_us").iloc[-1]
    same = steady[(steady["case_hash"] == slowest["case_hash"]) & (steady["device"] == slowest["device"])]
    cost = mean_interval(list(same["decision_us"]))
    holds = (cost.high if cost.high is not None else cost.estimate or 0) < claim.number("limit_us")
    return Finding(
        "reproduced" if holds else "differs",
        f"the slowest case of a batch that stays as it was: mode {slowest['mode']}, {slowest['batch']} requests",
        "; ".join([figure(cost, "{:.2f} us"), *_when_requests_change(rows), *_whole_plan(steady, evidence)]),
        cost,
        str(slowest["device"]),
        tuple(same["record_id"]),
    )


def _when_requests_change(rows: pd.DataFrame) -> list[str]:
    said = {"one": "when a request was exchanged", "all": "when all were"}
    slowest = rows.groupby("change")["decision_us"].max()
    return [f"{slowest[change]:.3g} us {text}" for change, text in said.items() if change in slowest]


def _whole_plan(steady: pd.DataFrame, evidence: Evidence) -> list[str]:
    """All planning of the largest batch, beside the fastest step of a GPU at that batch if there is one."""
    most = steady[steady["batch"] == steady["batch"].max()]
    planning_us, batch = float(most["planning_us"].max()), int(most["batch"].iloc[0])
    text = f"all planning at {batch} requests {planning_us:.0f} us"
    step_ms = fastest_steps_ms([p for p in evidence.points if is_gpu(str(p.key["device"]))]).get(batch)
    return [text if step_ms is None else f"{text}, {planning_us / 10 / step_ms:.2g}% of a step of {step_ms:.1f} ms"]


def _planning(evidence: Evidence) -> Finding | None:
    for point in evidence.points:
        for arm in SHARING_ARMS[::-1]:
            rows = point.rows[(point.rows["arm"] == arm) & (point.rows["plan_s"] > 0)]
            steps = rows[[c for c in rows.columns if c.startswith("steps_")]].to_numpy().sum()
            if len(rows) and steps > 0:
                per_step = 1e6 * float(rows["plan_s"].sum()) / float(steps)
                text = f"{per_step:.0f} us of planning per step, of which the decision is a part"
                return Finding("not run here", "", text, None, str(point.key["device"]), tuple(rows["record_id"]))
    return None


JUDGES: dict[str, Judge] = {"D2": judge_decision}

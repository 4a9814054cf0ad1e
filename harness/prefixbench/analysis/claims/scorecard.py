"""Every claim with what was measured of it: reproduced, differs, or not run here and why. Never blank, never assumed.

A claim about speed or traffic on a GPU is judged from GPU records only; random weights are no obstacle there, because
timing depends on shapes alone. What a CPU measured is shown beside it as what it is. Claims about decisions (D2, P1)
hold on any machine. Records of a fake engine count for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prefixbench.analysis.claims import dispatch as claims_dispatch
from prefixbench.analysis.claims import kernel as claims_kernel
from prefixbench.analysis.claims import serving as claims_serving
from prefixbench.analysis.claims.evidence import Evidence, Finding, Judge, Verdict
from prefixbench.analysis.claims.reported import Claim, load_claims
from prefixbench.record import Record

VERDICTS: tuple[Verdict, ...] = ("reproduced", "differs", "not run here")
JUDGES: dict[str, Judge] = {**claims_kernel.JUDGES, **claims_dispatch.JUDGES, **claims_serving.JUDGES}


@dataclass(frozen=True)
class ScoreRow:
    claim: Claim
    finding: Finding

    @property
    def claim_id(self) -> str:
        return self.claim.claim_id

    @property
    def verdict(self) -> Verdict:
        return self.finding.verdict


def scorecard(
    records: Sequence[Record], claims: Sequence[Claim] | None = None, evidence: Evidence | None = None
) -> list[ScoreRow]:
    """One row per claim, in order; `claims` default to conf/claims.yaml, `evidence` saves framing the records again."""
    evidence = evidence or Evidence.of(records)
    return [ScoreRow(claim, JUDGES[claim.claim_id](claim, evidence)) for claim in claims or load_claims()]


def counts(rows: Sequence[ScoreRow]) -> dict[Verdict, int]:
    return {verdict: sum(row.verdict == verdict for row in rows) for verdict in VERDICTS}

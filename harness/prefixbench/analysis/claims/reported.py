"""The reported claims by id, read from conf/claims.yaml."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

from prefixbench.config import config_dir
from prefixbench.errors import UsageError

CLAIM_IDS = ("K1", "K2", "K3", "K4", "D1", "D2", "D3", "R1", "R2", "R3", "A1", "A2", "S1", "P1")
DEFAULT_FILE = config_dir() / "claims.yaml"


@dataclass(frozen=True)
class Claim:
    """One claim as its authors report it. `values` are the numbers that its verdict compares with."""

    claim_id: str
    claim: str
    reported: str
    formula: str
    values: dict[str, float | str]
    source: str

    def number(self, name: str) -> float:
        return float(self.values[name])


def load_claims(file: Path = DEFAULT_FILE) -> tuple[Claim, ...]:
    """Every known claim in order; UsageError when one is missing or unknown."""
    try:
        data = yaml.safe_load(file.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"{file} is no file of claims: {' '.join(str(error).split())}") from None
    found = data.get("claims") if isinstance(data, dict) else None
    if not isinstance(found, dict):
        raise UsageError(f"{file} is no file of claims: it has no mapping `claims`, as in {DEFAULT_FILE.name}")
    if set(found) != set(CLAIM_IDS):
        differing = ", ".join(sorted(set(found) ^ set(CLAIM_IDS)))
        raise UsageError(
            f"{file}: claims {differing} are missing or unknown; exactly {', '.join(CLAIM_IDS)} are judged"
        )
    return tuple(Claim(claim_id=name, source=data["source"], **found[name]) for name in CLAIM_IDS)

"""The gate's error rates keep their bounds, and the test of them notices a gate that does not."""

from __future__ import annotations

import numpy as np
import pytest

from harness.builders import CPU, serving_record
from prefixbench.analysis.gate import selftest as gate_selftest
from prefixbench.analysis.gate.family import Rule
from prefixbench.analysis.gate.judge import GateConfig

DRAWS = 1500


@pytest.mark.parametrize("scenario", gate_selftest.SCENARIOS, ids=lambda s: s.name)
def test_every_bound_is_kept(scenario: gate_selftest.Scenario) -> None:
    rate = gate_selftest.simulate(scenario, Rule(), draws=DRAWS, seed=1)
    assert rate.ok, f"{rate.red:.3f} red"


def test_a_careless_gate_is_noticed() -> None:
    careless = Rule(alpha=0.3, min_magnitude=0.0)
    assert not gate_selftest.simulate(gate_selftest.UNCHANGED[0], careless, draws=DRAWS).ok
    blind = Rule(alpha=1e-6)
    assert not gate_selftest.simulate(gate_selftest.SLOWER[0], blind, draws=DRAWS).ok


def test_replay_of_real_launches() -> None:
    rng = np.random.default_rng(5)
    records = [
        serving_record(path, launch, float(step * np.exp(rng.normal(0, 0.01))), environment=CPU)
        for launch in range(10)
        for path, step in (("stock", 0.02), ("cascade", 0.01))
    ]
    unchanged, slower, halved = gate_selftest.replay(records, GateConfig(), draws=300)
    assert unchanged.red <= gate_selftest.MOST_RED
    assert halved.red == 1.0
    assert unchanged.red < slower.red <= 1.0
    assert gate_selftest.replay(records[:6], GateConfig()) == []

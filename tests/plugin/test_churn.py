"""A full pool under traffic that comes and goes: prefixes stay contiguous, but not without reclaim, bulk or halves."""

import pytest

pytestmark = pytest.mark.engine


def churn():
    """90 simulated seconds; the pool is full after twenty."""
    from prefixbench.measures.fragmentation import Machine, simulate
    from prefixbench.measures.traffic import Traffic

    traffic = Traffic(
        prefixes=12,
        prefix_life_s=20.0,
        prefix_tokens=600,
        suffix_tokens=40,
        output_tokens=60,
        spread=0.6,
        longest_prefix_tokens=4000,
    )
    machine = Machine(pool_tokens=49152, max_running=32, longest_request_tokens=9000, chunk_tokens=2048)
    found = simulate(traffic, machine, seconds=90, sample_s=1.0, seed=1)
    assert min(sample.free_tokens for sample in found.samples) < 0.05 * machine.pool_tokens
    return found


def test_prefixes_stay_contiguous_in_a_full_pool_where_they_were_written():
    found = churn()
    assert found.contiguous_share(from_s=30) >= 0.95
    kept, moved = (found.nodes_placed[f"contiguous: {why}"] for why in ("already contiguous", "moved into a run"))
    assert moved < 0.15 * (kept + moved)


@pytest.mark.parametrize(
    ("target", "replacement"),
    [
        ("prefixonce.plugin.sglang_0516.reclaim.Reclaimer.make_room", lambda *_: False),
        ("prefixonce.plugin.sglang_0516.allocator.RunKeeper.bulk_tokens", 0),
        ("prefixonce.plugin.sglang_0516.tree._HALVINGS", 0),
    ],
    ids=["no run is made by evicting", "no eviction in bulk", "no halves"],
)
def test_without_one_of_the_measures_they_do_not(monkeypatch, target, replacement):
    monkeypatch.setattr(target, replacement)
    assert churn().contiguous_share(from_s=30) < 0.95

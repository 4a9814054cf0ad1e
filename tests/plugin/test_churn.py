"""A full pool under traffic that comes and goes: prefixes stay contiguous, but not without reclaim, bulk or halves."""

import pytest

pytestmark = pytest.mark.engine


def contiguous_share():
    """Of the shared prefix tokens, in the last of 90 simulated seconds; the pool is full after twenty."""
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
    return found.contiguous_share(from_s=30)


def test_prefixes_stay_contiguous_in_a_full_pool():
    assert contiguous_share() >= 0.95


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
    assert contiguous_share() < 0.95

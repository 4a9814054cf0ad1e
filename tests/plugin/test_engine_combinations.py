"""Settings of SGLang that meet our hooks in other ways: overlap and page size crossed, mixed chunks, ranks, tenants."""

import pytest

from plugin.agreement import agreement, noise_of, prompt, request, run
from prefixbench.engines.checkpoint import write_tiny
from prefixonce.step import Mode

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def arriving():
    """Late prompts meet running ones, so that chunks of a prefill and decode rows can share a batch."""
    base = prompt(600, 300)
    requests = [request(base + prompt(610 + i, 1 + i), 14 + i, after_s=0.05 * (i % 3)) for i in range(6)]
    return [*requests, request(prompt(650, 400), 4, after_s=0.1)], base


@pytest.mark.parametrize(
    "options",
    [
        {"page_size": 1, "disable_overlap_schedule": True},
        {"page_size": 16, "disable_overlap_schedule": False},
        {"page_size": 16, "enable_mixed_chunk": True},
        {"page_size": 1, "tp_size": 2},
    ],
    ids=["page1-no-overlap", "page16-overlap", "mixed-chunk", "two-ranks"],
)
def test_full_agrees_with_stock(start, arriving, options):
    check_full(start, arriving, options)


def test_four_ranks_with_the_heads_of_a_32b_model(start, arriving, tmp_path):
    """Two KV heads and ten query heads per rank; every rank must take the same path in every step."""
    model = write_tiny(tmp_path / "model", seed=0, vocab=4096, heads=40, kv_heads=8, hidden=320)
    check_full(start, arriving, {"page_size": 1, "tp_size": 4, "model_path": str(model)})


def check_full(start, arriving, options):
    requests, base = arriving
    engine = start(**options, chunked_prefill_size=128, env={"PREFIXONCE_DENSE_M_EFF": "16"})
    try:
        reference, _ = run(engine, Mode.STOCK, requests, base)
        noise = noise_of(engine, reference, requests, base)
        answers, counters = run(engine, Mode.FULL, requests, base)
        ranks = engine.state()["ranks"]
    finally:
        engine.close()
    difference = agreement(reference, answers)
    assert difference.within(noise), f"{difference}; noise {noise}"
    assert counters["steps"]["dense"] > 0, counters
    assert [rank["rank"] for rank in ranks] == list(range(options.get("tp_size", 1)))
    assert len({rank["digest"] for rank in ranks}) == 1, ranks
    assert all(rank["steps"]["dense"] == counters["steps"]["dense"] for rank in ranks), ranks


def test_equal_tokens_of_two_namespaces_are_not_shared(start):
    base = prompt(700, 200)
    tenants = [request(base + prompt(710 + i, 3), 12, extra_key=f"tenant-{i % 2}") for i in range(6)]
    engine = start(env={"PREFIXONCE_PATH": "cascade"})
    try:
        for key in ("tenant-0", "tenant-1"):
            engine.generate([request(base, 1, extra_key=key)])
        assert engine.steer(prefixonce_reset=1)
        answers = engine.generate(tenants)
        two_namespaces = engine.counters()
        engine.flush()
        engine.generate([request(base, 1, extra_key="tenant-0")])
        assert engine.steer(prefixonce_reset=1)
        (alone,) = engine.generate([request(base + prompt(720, 3), 12, extra_key="tenant-1")])
    finally:
        engine.close()
    # A group has at most the three rows of one tenant; all six would share if the keys were not looked at.
    once, by_rows = (two_namespaces[f"prefix_tokens_read_{how}"] for how in ("once", "by_stock"))
    assert once < by_rows <= 3 * once
    assert [answer["cached_tokens"] for answer in answers] == [200] * 6
    assert alone["cached_tokens"] == 0

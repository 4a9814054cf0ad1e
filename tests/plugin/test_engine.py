"""The plugin inside real SGLang on a CPU: every path against stock, with controls that must fail."""

import json

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from plugin.agreement import agreement, noise_of, prompt, request, run
from prefixonce.step import Mode

pytestmark = pytest.mark.engine

NEVER = {"not the step that was planned", "the slot lists outgrow the static buffers"}


# Page size and overlap are independent of each other in SGLang: two engines meet every value of both.
@pytest.fixture(scope="module", params=[(1, True), (16, False)], ids=["page1-overlap", "page16"])
def engine(request, start, tmp_path_factory):
    page_size, overlap = request.param
    trace = tmp_path_factory.mktemp("trace") / "steps"
    started = start(
        page_size=page_size,
        disable_overlap_schedule=not overlap,
        chunked_prefill_size=128,
        env={
            "PREFIXONCE_DENSE_M_EFF": "24",
            "ENGINE_HOST_TRACE": str(trace),
        },
    )
    started.trace = trace
    yield started
    assert not NEVER & set(started.counters()["reasons"])
    started.close()


@pytest.fixture(scope="module")
def stock_answers(engine, families):
    requests, prefixes = families
    answers, counters = run(engine, Mode.STOCK, requests, *prefixes)
    assert set(counters["steps"]) - {"stock"} == {"paged", "cascade", "dense"}
    assert sum(counters["steps"].values()) == counters["steps"]["stock"] > 0
    return answers, noise_of(engine, answers, requests, *prefixes)


@pytest.mark.parametrize(
    ("mode", "ran"),
    [
        (Mode.PAGED, "paged"),
        (Mode.CASCADE, "cascade"),
        (Mode.DENSE, "dense"),
        (Mode.FULL, "dense"),
        (Mode.AUTO, "dense"),
    ],
)
def test_every_path_agrees_with_stock(engine, families, stock_answers, mode, ran):
    requests, prefixes = families
    reference, noise = stock_answers
    answers, counters = run(engine, mode, requests, *prefixes)
    difference = agreement(reference, answers)
    assert difference.within(noise), f"{mode}: {difference}; stock's own noise: {noise}"
    assert counters["steps"][ran] > 0, counters
    assert counters["steps"]["stock"] <= 2, counters
    if mode is not Mode.PAGED:
        assert counters["prefix_tokens_read_by_stock"] > 4 * counters["prefix_tokens_read_once"]


def test_copies_of_one_whole_prompt_get_one_answer(engine):
    whole = prompt(3, 512)
    requests = [request(whole, 6) for _ in range(64)]
    reference, _ = run(engine, Mode.STOCK, requests[:2], whole)
    answers, counters = run(engine, Mode.CASCADE, requests, whole)
    noise = agreement(reference[:1], reference[1:])
    assert len({tuple(answer["tokens"]) for answer in answers}) == 1
    assert agreement(reference[:1] * 64, answers).within(noise)
    assert counters["steps"]["cascade"] > 0


def test_nodes_split_under_requests_that_run_on_them(engine):
    base = prompt(4, 1024)
    late = [base[:512] + prompt(40, 40), base[:256] + prompt(41, 40)]
    requests = [request(base + prompt(60 + i, 3), 50) for i in range(8)]
    requests += [request(late[0], 8, after_s=0.1), request(late[1], 8, after_s=0.2)]
    reference, _ = run(engine, Mode.STOCK, requests, base)
    noise = noise_of(engine, reference, requests, base)
    engine.trace.unlink()
    answers, counters = run(engine, Mode.FULL, requests, base)
    difference = agreement(reference, answers)
    assert difference.within(noise), f"{difference}; noise {noise}"
    steps = [json.loads(line) for line in engine.trace.read_text().splitlines()]
    assert max(step["rows"] for step in steps) > 8, "the late prompts were meant to run beside the others"
    # The eight keep their whole prefix, now a chain of three nodes, whatever joins above it.
    assert all([8, 1024, 1024] in step["groups"] for step in steps if step["rows"] >= 8)
    splits = [event for event in engine.state()["placement"]["events"] if event[1] == "split"]
    assert len(splits) >= 2, "the late prompts were meant to split the prefix"
    assert counters["steps"]["dense"] > 0


def test_the_old_content_of_a_run_is_never_read_again(engine):
    first, second = prompt(5, 300), prompt(6, 300)
    tails = [prompt(70 + i, 4) for i in range(8)]
    reference, _ = run(engine, Mode.STOCK, [request(second + tail, 10) for tail in tails], second)
    noise = noise_of(engine, reference, [request(second + tail, 10) for tail in tails], second)
    run(engine, Mode.DENSE, [request(first + tail, 10) for tail in tails], first)
    answers, counters = run(engine, Mode.DENSE, [request(second + tail, 10) for tail in tails], second)
    assert counters["steps"]["dense"] > 0
    assert agreement(reference, answers).within(noise)


def test_requests_that_come_diverge_finish_and_are_aborted(engine, families):
    _, (first, second) = families
    requests = [request(first + prompt(80 + i, 2 + 3 * i), 10 + 7 * (i % 4), after_s=0.15 * (i % 5)) for i in range(10)]
    requests += [request(second, 30), request(second, 30, after_s=0.2)]
    requests += [request(first + prompt(99, 5), 400, abort_after_s=0.4)]
    reference, _ = run(engine, Mode.STOCK, requests, first, second)
    noise = noise_of(engine, reference[:-1], requests[:-1], first, second)
    answers, counters = run(engine, Mode.AUTO, requests, first, second)
    assert answers[-1]["finish"] == "abort"
    difference = agreement(reference, answers)
    assert difference.within(noise), f"{difference}; noise {noise}"
    assert counters["steps"]["dense"] + counters["steps"]["cascade"] > 0


def test_the_state_is_json_and_the_picture_covers_the_pool(engine):
    assert engine.steer(prefixonce_snapshot=1)
    state = json.loads(json.dumps(engine.state()))
    placement = state["placement"]
    assert placement["pool_slots"] >= 11000
    for picture in (placement["pool_before"], placement["pool_after"]):
        assert sum(length for _, length, *_ in picture) == placement["pool_slots"]
        assert {kind for _, _, kind, *_ in picture} >= {"free", "prefix-run"}
        highest = max(start for start, _, kind, *_ in picture if kind == "prefix-run")
        assert highest < placement["pool_slots"] / 2, "a prefill takes no run, but slots that are loose"
    assert state["sglang_version"] == "0.5.16"
    assert state["rank"] == 0


@pytest.mark.parametrize(
    "command",
    [
        {"prefixonce_path": 6},
        {"prefixonce_path": 1.5},
        {"prefixonce_reset": 0},
        {"prefixonce_faster": 1},
        {"prefixonce_path": 2, "pp_max_micro_batch_size": 8},
    ],
)
def test_a_command_that_is_not_understood_changes_nothing(engine, command):
    assert engine.steer(prefixonce_path=Mode.FULL.value)
    assert not engine.steer(**command)
    assert engine.state()["mode"] == "full"


schedules = st.lists(
    st.builds(
        lambda family, shared, tail, new, after: (family, shared, tail, new, after / 20),
        st.integers(0, 2),
        st.sampled_from([0, 16, 33, 64, 130, 260]),
        st.integers(1, 20),
        st.integers(1, 14),
        st.integers(0, 8),
    ),
    min_size=4,
    max_size=12,
)


@seed(20260501)
@settings(max_examples=4, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schedules, st.sampled_from([Mode.CASCADE, Mode.FULL, Mode.AUTO]))
def test_random_schedules_agree_with_stock(engine, schedule, mode):
    bases = [prompt(200 + family, 260) for family in range(3)]
    requests = [
        request(bases[family][:shared] + prompt(300 + i, tail), new, after_s=after)
        for i, (family, shared, tail, new, after) in enumerate(schedule)
    ]
    reference, _ = run(engine, Mode.STOCK, requests)
    noise = noise_of(engine, reference, requests)
    answers, _ = run(engine, mode, requests)
    difference = agreement(reference, answers)
    assert difference.within(noise), f"{difference}; noise {noise}"

"""Engines under stress or broken on purpose: controls that must fail, retraction, a tiny pool, refused starts."""

import json
import socket
import urllib.request

import pytest

from plugin.agreement import FLOOR, MARGIN, agreement, noise_of, prompt, request, run
from plugin.engine_host import PLUGIN_ARGS, EngineDiedError, hook_is_lost
from prefixonce.step import Mode

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("fault", ["zero-prefix", "permute-prefix"])
def test_a_path_that_reads_the_prefix_wrongly_is_found_out(start, families, fault):
    requests, prefixes = families
    engine = start(env={"PREFIXONCE_TEST_FAULT": fault, "PREFIXONCE_DENSE_M_EFF": "24"})
    try:
        reference, _ = run(engine, Mode.STOCK, requests, *prefixes)
        for mode in (Mode.CASCADE, Mode.FULL):
            answers, counters = run(engine, mode, requests, *prefixes)
            assert counters["steps"]["cascade"] + counters["steps"]["dense"] > 0
            assert agreement(reference, answers).largest > 1000 * MARGIN * FLOOR
        assert "A FAULT IS PLANTED" in engine.log.read_text()
        assert engine.state()["fault"] == fault
    finally:
        engine.close()


def test_the_plugin_on_the_stock_path_changes_nothing(zygote, model, start, families):
    requests, _ = families
    plain = zygote.engine(model_path=model, max_total_tokens=12000)
    try:
        assert plain.state() is None
        reference = plain.generate(requests)
    finally:
        plain.close()
    engine = start(env={"PREFIXONCE_PATH": "stock"})
    try:
        assert engine.state()["mode"] == "stock"
        difference = agreement(reference, engine.generate(requests))
    finally:
        engine.close()
    assert difference.compared >= 0.9 * difference.total
    assert difference.largest <= MARGIN * FLOOR


@pytest.mark.parametrize("page_size", [1, 16])
def test_retracted_requests_and_an_overfull_pool(start, page_size):
    prefixes = [prompt(400 + i, 260) for i in range(5)]
    requests = [
        request(prefixes[i % 5] + prompt(420 + i, 2 + i % 7), 8 + i % 9, after_s=0.05 * (i % 4)) for i in range(20)
    ]
    engine = start(
        page_size=page_size,
        max_total_tokens=1200,
        patches={"sglang.srt.managers.scheduler.TEST_RETRACT": True},
        env={"PREFIXONCE_DENSE_M_EFF": "8", "PREFIXONCE_PATH": "full"},
    )
    try:
        reference, _ = run(engine, Mode.STOCK, requests)
        noise = noise_of(engine, reference, requests)
        answers, counters = run(engine, Mode.FULL, requests)
        difference = agreement(reference, answers)
        placement = engine.state()["placement"]
    finally:
        engine.close()
    assert difference.within(noise), f"{difference}; noise {noise}"
    assert sum(answer["retractions"] for answer in answers) > 0
    assert counters["steps"]["dense"] + counters["steps"]["cascade"] > 0
    kinds = {event[1] for event in placement["events"]} | ({"flush"} if placement["events_dropped"] else set())
    assert {"create", "place", "evict"} <= kinds
    assert placement["contiguous"] > 0


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"patches": {"sglang.__version__": "0.5.99"}}, "prefixonce: SGLang 0.5.99 is unknown; allowed: 0.5.16"),
        ({"patches": {"prefixonce.plugin.runtime.Runtime": None}}, "prefixonce: 'NoneType' object is not callable"),
        (
            {"patches": {"sglang.srt.plugins.hook_registry._wrap_fn": hook_is_lost}},
            "prefixonce: SGLang 0.5.16 did not take the hook on",
        ),
        ({"env": {"PREFIXONCE_PAHT": "full"}}, "prefixonce: PREFIXONCE_PAHT is unknown; allowed: PREFIXONCE_PATH"),
        ({"disable_radix_cache": True}, "prefixonce: --disable-radix-cache (no prefix cache) is not supported"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "prefixonce: --kv-cache-dtype (quantised KV cache) is not supported"),
        ({"radix_cache_backend": None}, "prefixonce: --decode-attention-backend prefixonce and --radix-cache-backend"),
        ({"decode_attention_backend": None}, "prefixonce: --decode-attention-backend prefixonce and --radix-cache"),
        ({"prefill_attention_backend": "prefixonce"}, "prefixonce: prefixonce serves decode only"),
    ],
)
def test_what_cannot_be_served_rightly_does_not_start(start, options, line):
    with pytest.raises(EngineDiedError) as died:
        start(**options)
    lines = [text for text in str(died.value).splitlines() if line in text]
    assert lines, str(died.value)


def test_the_http_server_reports_and_obeys(zygote, model):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = zygote.server(
        f"--model-path {model} --host 127.0.0.1 --port {port} --device cpu --attention-backend torch_native "
        "--decode-attention-backend prefixonce --radix-cache-backend prefixonce --dtype float32 --page-size 16 "
        "--disable-cuda-graph --max-total-tokens 6000 --skip-tokenizer-init --skip-server-warmup "
        "--sleep-on-idle".split(),
        env={"PREFIXONCE_PATH": "stock"},
    )

    def call(path, body=None):
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        asked = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)
        with urllib.request.urlopen(asked, timeout=120) as answer:
            return json.loads(answer.read() or "null")

    def generate(prompts):
        return call("/generate", {"input_ids": prompts, "sampling_params": {"temperature": 0, "max_new_tokens": 8}})

    def is_up():
        try:
            return call("/server_info") is not None
        except OSError:
            return False

    try:
        server.wait_until(is_up)
        base = prompt(7, 200)
        generate([base])
        prompts = [base + prompt(500 + i, 2) for i in range(6)]
        assert call("/server_info")["internal_states"][0]["prefixonce"]["mode"] == "stock"
        assert call("/set_internal_state", {"server_args": {"prefixonce_path": Mode.CASCADE.value}})
        call("/set_internal_state", {"server_args": {"prefixonce_reset": 1}})
        answers = generate(prompts)
        assert [answer["meta_info"]["cached_tokens"] for answer in answers] == [192] * 6
        state = call("/server_info")["internal_states"][0]["prefixonce"]
        assert state["mode"] == "cascade"
        assert state["counters"]["steps"]["cascade"] > 0
        assert state["counters"]["steps"]["stock"] == 0
        assert state["placement"]["contiguous"] == 1
    finally:
        server.stop()


def test_a_server_that_may_not_serve_exits_with_one_line(zygote, model):
    arguments = {"model-path": model, "device": "cpu", "attention-backend": "torch_native", "pp-size": "2"}
    arguments |= {name.replace("_", "-"): value for name, value in PLUGIN_ARGS.items()}
    server = zygote.server([part for name, value in arguments.items() for part in (f"--{name}", value)])
    try:
        assert server.exit_line() == (
            "SystemExit: prefixonce: --pp-size (pipeline parallelism) is not supported by prefixonce; leave it out"
        )
    finally:
        server.stop()

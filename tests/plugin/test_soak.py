"""A soak of seconds on real servers: everything happens and is right, and a prefix that is read wrongly is found."""

import socket

import pytest

from prefixbench.config.run import EngineConfig
from prefixbench.engines.sglang import SglangServer
from prefixbench.jobs.soak import STRICT, attack, reference
from prefixbench.measures.soak import prompts

pytestmark = pytest.mark.engine

ENGINE = EngineConfig(start_timeout_s=300.0, stall_timeout_s=300.0)
ASKED = prompts(24, prefix_tokens=300, output_tokens=16, vocabulary=4096, seed=1)


@pytest.fixture(scope="module")
def serve(zygote, model):
    """Starts servers on a tiny model, with SGLang's strictest checks on; the fixture stops them."""
    running = []

    def start(*options, env=None):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        arguments = (
            f"--model-path {model} --host 127.0.0.1 --port {port} --device cpu --dtype float32 --disable-cuda-graph "
            "--attention-backend torch_native --max-total-tokens 3000 --skip-tokenizer-init --skip-server-warmup "
            "--chunked-prefill-size 128 --page-size 16 --sleep-on-idle --decode-log-interval 4"
        )
        # SGLang reads this one when it is imported, which was before the fork.
        patches = {"sglang.srt.managers.scheduler.TEST_RETRACT": True}
        patches |= {"sglang.srt.managers.scheduler.TEST_RETRACT_INTERVAL": 11}
        server = zygote.server([*arguments.split(), *options], env=STRICT | (env or {}), patches=patches)
        running.append(server)
        client = SglangServer(server, (), f"http://127.0.0.1:{port}", model, bool(options), ENGINE)
        client.ready()
        return client, server

    yield start
    for server in running:
        server.stop()


@pytest.fixture(scope="module")
def expected(serve):
    client, stock = serve()
    found = reference(client.url, ASKED, in_flight=12, noise_in_flight=3)
    stock.stop()
    return found


PLUGIN = ("--decode-attention-backend", "prefixonce", "--radix-cache-backend", "prefixonce", "--enable-metrics")


def soak(serve, expected, seconds, **variables):
    client, server = serve(*PLUGIN, env={"PREFIXONCE_DENSE_M_EFF": "16"} | variables)
    summary = attack(client, ASKED, expected, server.log, seconds=seconds, gap_s=0.05, in_flight=12, seed=5)
    return summary, client


def test_a_soak_meets_everything_and_no_fault(serve, expected):
    assert expected.noise.comparable > 0.9
    summary, client = soak(serve, expected, seconds=10)
    assert summary.faults == ()
    assert summary.answers >= 20
    assert set(summary.sent) == {"stream", "whole", "abort", "hang-up"}
    assert "no fault" in summary.line()
    _check_metrics(client, summary)


def _check_metrics(client, summary):
    """Prometheus shows the same steps, as of SGLang's last statistics, with SGLang's labels."""
    import requests

    lines = requests.get(f"{client.url}/metrics", timeout=30).text.splitlines()
    ours = [line.rpartition(" ") for line in lines if line.startswith("prefixonce_")]
    shown = {name: float(value) for name, _, value in ours}
    steps = {name: value for name, value in shown.items() if name.startswith("prefixonce_decode_steps_total{")}
    assert all('tp_rank="0"' in name and "model_name=" in name for name in steps)
    assert {name.partition('path="')[2].partition('"')[0] for name in steps} == {"stock", "paged", "cascade", "dense"}
    assert 0.5 * sum(summary.steps.values()) < sum(steps.values()) <= sum(summary.steps.values())
    assert any("modelled" in line for line in lines if line.startswith("# HELP prefixonce_kv_bytes_saved"))
    assert any(name.startswith("prefixonce_nodes_placed_total{") and 'layout="contiguous"' in name for name in shown)


def test_a_server_that_reads_the_prefix_wrongly_is_found_out(serve, expected):
    summary, _ = soak(serve, expected, seconds=4, PREFIXONCE_TEST_FAULT="zero-prefix")
    assert any("from stock's, allowed are" in fault for fault in summary.faults), summary.faults
    assert "FAULTS" in summary.line()

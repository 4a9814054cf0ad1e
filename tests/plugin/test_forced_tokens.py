"""Teacher forcing through a real server: what is right is found inside, what reads the prefix wrongly outside."""

import socket
from pathlib import Path

import pytest

from plugin.agreement import prompt
from prefixbench.analysis.numerics import agreement
from prefixbench.case import NumericsCase
from prefixbench.config.run import EngineConfig
from prefixbench.engines.forcing import SERVER_ARGS
from prefixbench.engines.sglang import SglangServer
from prefixbench.measures.numerics import measure, not_proven, write_script

pytestmark = pytest.mark.engine

VOCAB, REQUESTS, DECODE_TOKENS, PREFIX_TOKENS = 4096, 12, 24, 260


@pytest.fixture(scope="module")
def server(zygote, model):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # The fault reaches shared prefixes only: stock and paged, which share nothing, stay right on the same server.
    forked = zygote.server(
        [
            *("--model-path", model, "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"),
            *("--attention-backend", "torch_native", "--decode-attention-backend", "prefixonce"),
            *("--radix-cache-backend", "prefixonce", "--dtype", "float32", "--max-total-tokens", "6000"),
            *("--disable-cuda-graph", "--skip-tokenizer-init", "--skip-server-warmup", "--sleep-on-idle", *SERVER_ARGS),
        ],
        env={"PREFIXONCE_PATH": "stock", "PREFIXONCE_TEST_FAULT": "permute-prefix", "PREFIXONCE_DENSE_M_EFF": "1"},
    )
    engine = EngineConfig(start_timeout_s=300.0, stall_timeout_s=300.0)
    started = SglangServer(forked, (), f"http://127.0.0.1:{port}", Path(model), True, engine)
    started.ready()
    yield started
    forked.stop()


def test_forced_tokens_tell_a_right_path_from_a_wrong_one(server):
    prefix = tuple(prompt(1, PREFIX_TOKENS, vocab=VOCAB))
    prompts = tuple((*prefix, *prompt(10 + i, 3, vocab=VOCAB)) for i in range(REQUESTS))
    script = write_script(server, prefix, prompts, DECODE_TOKENS, VOCAB)
    assert len(set(script.forced)) == REQUESTS

    def measured(role, path, concurrency=REQUESTS):
        case = NumericsCase(
            *("tiny", role, path, concurrency, REQUESTS, PREFIX_TOKENS, 3, DECODE_TOKENS, 1, "torch_native"),
            *("permute-prefix", {}, {}, {}),
        )
        found = measure(server, case, script, VOCAB)
        assert not_proven(case, found.counters) is None
        return found

    reference, noise = measured("reference", "stock"), measured("noise", "stock", 3)
    verdicts = {path: agreement(reference, noise, measured("path", path)) for path in ("paged", "cascade", "full")}
    assert {path: verdict.inside for path, verdict in verdicts.items()} == {
        "paged": True,
        "cascade": False,
        "full": False,
    }
    # Greedy text would have diverged for good; forced positions stay comparable to the last one.
    assert verdicts["cascade"].path.positions == REQUESTS * DECODE_TOKENS
    assert verdicts["cascade"].path.largest > 1000 * verdicts["paged"].path.largest

"""Engines shared by the tests of this folder: one import of SGLang, one engine per configuration."""

import pytest

from plugin.agreement import prompt, request
from plugin.engine_host import PLUGIN_ARGS, Zygote


@pytest.fixture(scope="session")
def zygote(tmp_path_factory):
    host = Zygote(tmp_path_factory.mktemp("engines"))
    yield host
    host.close()


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    from prefixbench.engines.checkpoint import write_tiny

    return str(write_tiny(tmp_path_factory.mktemp("tiny"), seed=0, vocab=4096))


@pytest.fixture(scope="session")
def start(zygote, model):
    """Starts an engine with the plugin; the caller closes it."""

    def started(**options):
        return zygote.engine(**({"model_path": model, "max_total_tokens": 12000} | PLUGIN_ARGS | options))

    return started


@pytest.fixture(scope="session")
def families():
    """Two shared prompts (chunked prefill makes each a chain of nodes) and two requests that share with nobody."""
    first, second = prompt(1, 420), prompt(2, 200)
    requests = [request(first + prompt(10 + i, 1 + i % 5), 20) for i in range(8)]
    requests += [request(second + prompt(30 + i, 3), 12 + i) for i in range(4)]
    requests += [request(prompt(50 + i, 90), 16) for i in range(2)]
    return requests, (first, second)

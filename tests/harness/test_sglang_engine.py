"""How SGLang is started: one plugin or none, settings from the configuration alone, state read strictly."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra import compose, initialize_config_dir

from prefixbench.config import checks as config_checks
from prefixbench.config import config_dir
from prefixbench.config.cases import engine_settings
from prefixbench.config.run import RunConfig, register_schema
from prefixbench.engines import checkpoints, client, plugin_state
from prefixbench.engines.base import SendPlan, ServerFailedError
from prefixbench.engines.process import fatal_line
from prefixbench.engines.sglang import SglangServer, server_command, server_environment
from prefixbench.errors import UsageError
from prefixbench.record import PoolRun, RadixEvent, StepCounters


@pytest.fixture
def config() -> Callable[..., RunConfig]:
    def load(*overrides: str) -> RunConfig:
        register_schema()
        with initialize_config_dir(str(config_dir()), version_base="1.3"):
            return config_checks.load(compose("config", overrides=list(overrides)))

    return load


def options(command: tuple[str, ...]) -> dict[str, str]:
    return {name: value for name, value in itertools.pairwise(command) if name.startswith("--")}


def test_with_and_without_the_plugin_differ_in_the_plugin_alone(config: Callable[..., RunConfig]) -> None:
    cpu = config()
    ours = options(server_command(cpu, Path("m"), 1, plugin=True, seed=1))
    stock = options(server_command(cpu, Path("m"), 1, plugin=False, seed=1))
    assert {name for name in ours if ours[name] != stock.get(name)} == {
        "--decode-attention-backend",
        "--radix-cache-backend",
    }
    assert stock["--decode-attention-backend"] == stock["--attention-backend"] == "torch_native"
    assert ours["--decode-attention-backend"] == ours["--radix-cache-backend"] == "prefixonce"


def test_gpu_servers_capture_graphs_and_take_flashinfer(config: Callable[..., RunConfig]) -> None:
    gpu = config("gpus='2'", "model=llama-3.1-8b", "engine.chunked_prefill_size=4096", "engine.extra_args=['--x','1']")
    command = server_command(gpu, Path("m"), 1, plugin=False, seed=1)
    given = options(command)
    assert given["--attention-backend"] == "flashinfer"
    assert given["--tp-size"] == "2"
    assert given["--cuda-graph-max-bs-decode"] == "256"
    assert given["--load-format"] == "dummy"
    assert given["--chunked-prefill-size"] == "4096"
    assert "--disable-cuda-graph" not in command
    assert "--device" not in command
    assert command[-2:] == ("--x", "1")


def test_environment_has_one_plugin_or_none_and_nothing_inherited(config: Callable[..., RunConfig]) -> None:
    inherited = {
        "PATH": "/bin",
        "PREFIXONCE_PATH": "full",
        "PREFIXONCE_TEST_FAULT": "zero-prefix",
        "SGLANG_PLUGINS": "x",
    }
    ours = server_environment(config("engine.dense_m_eff=64"), True, inherited)
    assert ours["SGLANG_PLUGINS"] == "prefixonce"
    assert {name for name in ours if name.startswith("PREFIXONCE_")} == {
        "PREFIXONCE_PATH",
        "PREFIXONCE_DENSE_M_EFF",
        "PREFIXONCE_MIN_RUN_TOKENS",
        "PREFIXONCE_TIMERS",
    }
    assert (ours["PREFIXONCE_DENSE_M_EFF"], ours["PREFIXONCE_PATH"]) == ("64", "stock")
    stock = server_environment(config(), False, inherited)
    assert stock["SGLANG_PLUGINS"] not in ("", "prefixonce"), "an empty whitelist admits every plugin"
    assert not any(name.startswith("PREFIXONCE_") for name in stock)
    assert stock["SGLANG_PLATFORM"] == "prefixonce_cpu"
    assert "SGLANG_PLATFORM" not in server_environment(config("gpus='1'"), False, {})


def test_two_servers_may_load_on_the_same_gpus_at_once(config: Callable[..., RunConfig]) -> None:
    """Beside another that loads, ranks see unequal free memory; alone, SGLang's check stands."""
    check = "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"
    beside = config("sweep=large")
    assert server_environment(beside, True, {})[check] == server_environment(beside, False, {})[check] == "0"
    assert check not in server_environment(config("gpus='2'"), True, {})


STATE = {
    "ranks": [{"rank": 0, "steps": {"cascade": 3}, "digest": "a1"}],
    "counters": {
        "steps": {"cascade": 3},
        "decode_tokens": 24,
        "group_steps": 3,
        "prefix_tokens_read_once": 6144,
        "prefix_tokens_read_by_stock": 49152,
        "bytes_saved": 1024,
        "batch_histogram": {"8": 3},
        "decode_s": 0.5,
        "attention_s": None,
        "prefix_s": None,
        "plan_s": 0.01,
        "reasons": {"asked": 3},
    },
    "placement": {
        "contiguous": 1,
        "paged": 2,
        "reasons": {"long enough": 1},
        "events": [[1, "create", 7, 2048, "contiguous", "slots 1..2048"]],
        "events_dropped": 0,
        "pool_slots": 4096,
        "pool_before": [[1, 4096, "free", None, None]],
        "pool_after": [[1, 2048, "prefix-run", 7, 8], [2049, 2048, "free", None, None]],
    },
}


def test_plugin_state_becomes_the_records_types() -> None:
    assert plugin_state.plugin_state({"internal_states": [{"prefixonce": STATE}]}) == STATE
    assert plugin_state.plugin_state({"internal_states": [{}]}) is None
    counters = plugin_state.read_counters(STATE)
    assert counters == StepCounters(
        {"cascade": 3}, 24, 3, 6144, 49152, 1024, {8: 3}, 0.5, None, None, 0.01, {"asked": 3}
    )
    placement = plugin_state.read_placement(STATE)
    assert placement.events == (RadixEvent(1, "create", 7, 2048, "contiguous", "slots 1..2048"),)
    assert placement.pool_after[0] == PoolRun(1, 2048, "prefix-run", 7, 8)


def test_a_state_that_does_not_fit_is_refused_by_name() -> None:
    broken = {**STATE, "counters": {**STATE["counters"], "decode_tokens": "many"}}
    with pytest.raises(ServerFailedError, match="the plugin reports decode_tokens"):
        plugin_state.read_counters(broken)


def test_ranks_that_decided_differently_are_no_measurement() -> None:
    other = {"rank": 1, "steps": {"stock": 3}, "digest": "b2"}
    with pytest.raises(ServerFailedError, match=r"decided differently: rank 0: .*cascade.*; rank 1: .*stock"):
        plugin_state.read_counters({**STATE, "ranks": [*STATE["ranks"], other]})


@pytest.mark.parametrize(
    ("log", "line"),
    [
        (
            "starting\n[2030-01-01 00:00:00] ValueError: bad page\nkilled\n",
            "[2030-01-01 00:00:00] ValueError: bad page",
        ),
        (
            "Traceback\n  File x\ntorch.OutOfMemoryError: CUDA out of memory\n",
            "torch.OutOfMemoryError: CUDA out of memory",
        ),
        ("prefixonce: MLA is not supported\nscheduler died\n", "prefixonce: MLA is not supported"),
        ("only\nlines\n", "lines"),
        ("", "(its log is empty)"),
    ],
)
def test_the_fatal_line_of_a_log(log: str, line: str) -> None:
    assert fatal_line(log) == line


def test_checkpoints_are_written_once(
    config: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = config("model=qwen2.5-14b", "gpus='1'").model
    folder = checkpoints.prepare(model)
    written = (folder / "config.json").stat().st_mtime_ns
    shape = json.loads((folder / "config.json").read_text())
    assert (shape["model_type"], shape["num_key_value_heads"], shape["hidden_size"]) == ("qwen2", 8, 5120)
    assert checkpoints.prepare(model) == folder
    assert (folder / "config.json").stat().st_mtime_ns == written
    assert checkpoints.prepare(replace(model, layers=2)) != folder
    assert not [path for path in folder.parent.iterdir() if path.name.startswith(".")]


def test_real_weights_must_have_the_shape_that_was_named(config: Callable[..., RunConfig], tmp_path: Path) -> None:
    model = config("model=llama-3.1-8b", "gpus='1'", f"model.path={tmp_path}").model
    with pytest.raises(UsageError, match=r"needs a folder with a Hugging Face config\.json"):
        checkpoints.prepare(model)
    shape = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    (tmp_path / "config.json").write_text(json.dumps({**shape, "num_key_value_heads": 4, "vocab_size": 128256}))
    with pytest.raises(UsageError, match="num_key_value_heads is 4 where model=llama-3"):
        checkpoints.prepare(model)
    (tmp_path / "config.json").write_text(json.dumps({**shape, "num_key_value_heads": 8, "vocab_size": 128256}))
    assert checkpoints.prepare(model) == tmp_path


class _Process:
    stopped = False

    def wait_until(self, _is_ready: object, _timeout_s: float) -> None: ...

    def stop(self) -> None:
        self.stopped = True


@pytest.mark.parametrize(("asked", "status"), [("true", 200), ("false", 200), ("true", 404)])
def test_the_collector_leaves_a_ready_server_alone(
    config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch, asked: str, status: int
) -> None:
    """With and without the plugin: a full collection of what SGLang imports holds a server up for half a second."""
    process, calls = _Process(), []
    engine = config(f"engine.freeze_gc={asked}").engine
    server = SglangServer(process, ("python",), "http://127.0.0.1:1", Path("m"), False, engine)  # type: ignore[arg-type]
    monkeypatch.setattr(server, "_check_plugin", lambda: None)
    monkeypatch.setattr(server, "_call", lambda *call: calls.append(call) or SimpleNamespace(status_code=status))
    if status == 200:
        server.ready()
        assert calls == ([("POST", "/freeze_gc")] if asked == "true" else [])
    else:
        with pytest.raises(ServerFailedError, match=r"HTTP 404; engine\.freeze_gc=false"):
            server.ready()
        assert process.stopped


def test_a_frozen_server_is_another_case(config: Callable[..., RunConfig]) -> None:
    """Records from before are not compared with it unseen, and keep their hashes."""
    frozen, as_before = (engine_settings(config(f"engine.freeze_gc={asked}"), True) for asked in ("true", "false"))
    assert frozen == as_before | {"freeze_gc": True}


@pytest.mark.parametrize("fails", [False, True])
def test_the_client_collects_nothing_while_it_reads(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    seen = []

    async def run(_block: object) -> tuple[()]:
        seen.append(gc.isenabled())
        if fails:
            raise client.StalledError("nothing came")
        return ()

    monkeypatch.setattr(client._Block, "run", run)
    with pytest.raises(client.StalledError) if fails else contextlib.nullcontext():
        client.send_block("http://127.0.0.1:1", (), SendPlan(None, 8), 1.0)
    assert seen == [False]
    assert gc.isenabled()

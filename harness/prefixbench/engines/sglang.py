"""SGLang as its users run it: `python -m sglang.launch_server`, spoken to over HTTP, switched through its own calls."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import requests

from prefixbench.config.cases import has_graphs, stock_backend
from prefixbench.config.run import EngineConfig, RunConfig
from prefixbench.engines import checkpoints, tokenizer
from prefixbench.engines.base import SendPlan, ServerFailedError
from prefixbench.engines.client import HoldError, StalledError, send_block
from prefixbench.engines.plugin_state import plugin_state, read_counters, read_placement
from prefixbench.engines.process import ServerProcess, end_orphans, without_proxy
from prefixbench.errors import EngineError
from prefixbench.machine import environment
from prefixbench.record import PlacementTrace, RequestSample, StepCounters
from prefixbench.workloads import PromptSpec

_CPU_POOL_TOKENS = 131072
_CALL_TIMEOUT_S = 120.0
_GENERATE_TIMEOUT_S = 600.0
_CPU_PLATFORM = "prefixonce_cpu"
_PLUGIN = "prefixonce"
_NOTHING: Mapping[str, str] = {}
_NO_PLUGIN = "no-plugin"  # SGLANG_PLUGINS is a whitelist whose empty value means "all": name one that does not exist


def create(config: RunConfig) -> SglangEngine:
    return SglangEngine(config)


class SglangEngine:
    def __init__(self, config: RunConfig) -> None:
        self._config = config
        is_cpu = config.gpus.device == "cpu"
        self.device_indices = None if is_cpu else tuple(range(config.gpus.count))
        self.resources = ("cpu",) if is_cpu else tuple(_device_name(index) for index in range(config.gpus.count))
        self.labels = (*(("cpu",) if is_cpu else ()), *(() if config.model.path else ("random-weights",)))

    def check(self) -> None:
        if importlib.util.find_spec("sglang") is None:
            raise EngineError("engine=sglang needs SGLang, which is not installed; pip install 'prefixonce[sglang]'")
        if self._config.gpus.device == "cpu":
            if _CPU_PLATFORM not in {e.name for e in importlib.metadata.entry_points(group="sglang.srt.platforms")}:
                raise EngineError(
                    "gpus=cpu needs the distribution prefixonce-platform-cpu; pip install ./kernels/platform-cpu"
                )
            return
        here = len(environment.gpus())
        if here < self._config.gpus.count:
            raise EngineError(f"gpus={self._config.gpus.count} was asked for and {here} are visible here; use gpus=cpu")

    def plugin_source(self) -> str:
        return environment.plugin_digest()

    def start(
        self, plugin: bool, seed: int, log: Path, fault: str | None = None, strict: Mapping[str, str] = _NOTHING
    ) -> SglangServer:
        server = self.begin(plugin, seed, log, fault, strict)
        server.ready()
        return server

    def begin(
        self, plugin: bool, seed: int, log: Path, fault: str | None = None, strict: Mapping[str, str] = _NOTHING
    ) -> SglangServer:
        """`fault` is planted in the plugin (PREFIXONCE_TEST_FAULT): for controls, which must be found out. `strict`
        are environment variables with which SGLang checks or disturbs itself."""
        end_orphans()
        folder = checkpoints.prepare(self._config.model)
        if self._config.engine.tokenizer:
            tokenizer.ensure(folder, self._config.model.vocab)
        port = _free_port()
        command = server_command(self._config, folder, port, plugin, seed)
        variables = {**server_environment(self._config, plugin, os.environ), **strict}
        if fault is not None:
            variables["PREFIXONCE_TEST_FAULT"] = fault
        process = ServerProcess(command, variables, log)
        shown = tuple({sys.executable: "python", str(folder): folder.name}.get(word, word) for word in command)
        return SglangServer(process, shown, f"http://127.0.0.1:{port}", folder, plugin, self._config.engine)


class SglangServer:
    def __init__(
        self,
        process: ServerProcess,
        command: tuple[str, ...],
        url: str,
        model_folder: Path,
        plugin: bool,
        engine: EngineConfig,
    ) -> None:
        self.command = command
        self.startup_s = 0.0
        self.url = url
        self.model_folder = model_folder
        self._process = process
        self._plugin = plugin
        self._stall_s = engine.stall_timeout_s
        self._start_timeout_s = engine.start_timeout_s
        self._freeze_gc = engine.freeze_gc
        self._began_s = time.perf_counter()
        self._http = requests.Session()
        self._http.trust_env = False  # a proxy of this machine's environment does not lead to this machine's server

    def ready(self) -> None:
        try:
            self._process.wait_until(self._is_healthy, self._start_timeout_s)
            self.startup_s = time.perf_counter() - self._began_s
            self._check_plugin()
            if self._freeze_gc:
                self._freeze_collector()
        except BaseException:
            self.stop()
            raise

    def _check_plugin(self) -> None:
        """A server must never be measured under another one's name: SGLang skips a plugin that fails and serves on."""
        if (plugin_state(self._info()) is not None) is not self._plugin:
            raise ServerFailedError(
                f"the server {'does not report' if self._plugin else 'reports'} the plugin prefixonce, "
                f"which this launch {'needs' if self._plugin else 'must not have'}; its log says why"
            )

    def _freeze_collector(self) -> None:
        answer = self._call("POST", "/freeze_gc")
        if answer.status_code != 200:
            raise ServerFailedError(
                f"/freeze_gc answered HTTP {answer.status_code}; engine.freeze_gc=false leaves it out"
            )

    def set_path(self, path: str) -> None:
        from prefixonce.step import Mode

        self._control({"prefixonce_path": Mode.parse(path).value})

    def flush(self) -> bool:
        return self._call("POST", "/flush_cache").status_code == 200

    def snapshot_pool(self) -> None:
        if plugin_state(self._info()) is not None:
            self._control({"prefixonce_snapshot": 1})

    def prime(self, prompt: Sequence[int]) -> None:
        # Two tokens: a request that ends with its first is stored as finished output, which the plugin never places in
        # a contiguous run; a prefix enters the tree after its prefill.
        (sample,) = self.send((PromptSpec(tuple(prompt), 2),), SendPlan(1, 1))
        if sample.error is not None:
            raise ServerFailedError(f"priming a prefix of {len(prompt)} tokens failed: {sample.error}")

    def send(self, requests: Sequence[PromptSpec], how: SendPlan) -> tuple[RequestSample, ...]:
        try:
            samples = send_block(self.url, requests, how, self._stall_s)
        except StalledError as error:
            stacks = self._process.stacks() or self._process.tail()
            raise ServerFailedError(str(error), "timeout", stacks) from None
        except HoldError as error:
            self._process.check_alive()
            raise ServerFailedError(str(error), detail=self._process.tail()) from None
        if any(sample.error is not None for sample in samples):
            self._process.check_alive()
        return samples

    def generate(self, body: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        answer = self._call("POST", "/generate", body, _GENERATE_TIMEOUT_S)
        if answer.status_code != 200:
            raise ServerFailedError(f"/generate answered HTTP {answer.status_code}: {answer.text[:300]}")
        answers: Sequence[Mapping[str, Any]] = _json(answer, "/generate")
        return answers

    def counters(self) -> StepCounters | None:
        state = plugin_state(self._info())
        return None if state is None else read_counters(state)

    def placement(self) -> PlacementTrace | None:
        state = plugin_state(self._info())
        return None if state is None else read_placement(state)

    def log_tail(self) -> str:
        return self._process.tail()

    def stop(self) -> None:
        self._http.close()
        self._process.stop()

    def _is_healthy(self) -> bool:
        try:
            return self._http.get(f"{self.url}/health", timeout=5).status_code == 200
        except requests.RequestException:
            return False

    def _info(self) -> Mapping[str, Any]:
        answer = self._call("GET", "/server_info")
        if answer.status_code != 200:
            raise ServerFailedError(f"/server_info answered HTTP {answer.status_code}: {answer.text[:300]}")
        info: Mapping[str, Any] = _json(answer, "/server_info")
        return info

    def _control(self, values: Mapping[str, int]) -> None:
        answer = self._call("POST", "/set_internal_state", {"server_args": dict(values)})
        if answer.status_code != 200 or not all(_json(answer, "/set_internal_state")):
            raise ServerFailedError(f"the server refused {dict(values)}: HTTP {answer.status_code} {answer.text[:300]}")

    def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, timeout_s: float = _CALL_TIMEOUT_S
    ) -> requests.Response:
        try:
            return self._http.request(method, f"{self.url}{path}", json=body, timeout=timeout_s)
        except requests.RequestException as error:
            self._process.check_alive()
            raise ServerFailedError(f"{path} was not answered: {error}", detail=self._process.tail()) from None


def _json(answer: requests.Response, path: str) -> Any:
    try:
        return answer.json()
    except requests.JSONDecodeError:
        raise ServerFailedError(f"{path} answered something that is no JSON: {answer.text[:300]}") from None


def server_command(config: RunConfig, folder: Path, port: int, plugin: bool, seed: int) -> tuple[str, ...]:
    """The command line of one launch; everything that differs between launches with and without the plugin is here."""
    engine, gpus = config.engine, config.gpus
    is_cpu = gpus.device == "cpu"
    backend = stock_backend(config)
    pool_tokens = engine.max_total_tokens or (_CPU_POOL_TOKENS if is_cpu else None)
    options: dict[str, object] = {
        "model-path": folder,
        "host": "127.0.0.1",
        "port": port,
        "random-seed": seed,
        "load-format": "dummy" if config.model.weights == "dummy" and config.model.path is None else "auto",
        "dtype": config.model.dtype,
        "attention-backend": backend,
        "decode-attention-backend": _PLUGIN if plugin else backend,
        "page-size": engine.page_size,
        "max-running-requests": engine.max_running_requests,
        "tp-size": gpus.count,
        "grammar-backend": "none",
        "sampling-backend": "pytorch",
        "decode-log-interval": 100,
        "log-level-http": "warning",
        "mem-fraction-static": engine.mem_fraction_static,
    }
    if plugin:
        options["radix-cache-backend"] = _PLUGIN
    if pool_tokens is not None:
        options["max-total-tokens"] = pool_tokens
    if engine.chunked_prefill_size is not None:
        options["chunked-prefill-size"] = engine.chunked_prefill_size
    if is_cpu:
        options["device"] = "cpu"
    if engine.side_by_side:
        options["sleep-on-idle"] = None  # a scheduler that waits would else keep a core from the one that is measured
    if has_graphs(config):
        options["cuda-graph-max-bs-decode"] = engine.cuda_graph_max_bs
    flags = ["--disable-prefill-cuda-graph" if has_graphs(config) else "--disable-cuda-graph"]
    if not engine.tokenizer:
        flags.append("--skip-tokenizer-init")
    spelled = [
        text for name, value in options.items() for text in (f"--{name}", *(() if value is None else (str(value),)))
    ]
    return (sys.executable, "-m", "sglang.launch_server", *spelled, *flags, *engine.extra_args)


def server_environment(config: RunConfig, plugin: bool, inherited: Mapping[str, str]) -> dict[str, str]:
    """The server's environment: exactly one plugin or none, and the plugin's settings from the configuration alone."""
    environment = {name: value for name, value in inherited.items() if not name.startswith("PREFIXONCE_")}
    environment |= without_proxy(inherited)
    environment["SGLANG_PLUGINS"] = _PLUGIN if plugin else _NO_PLUGIN
    if config.gpus.device == "cpu":
        environment["SGLANG_PLATFORM"] = _CPU_PLATFORM
    if config.engine.side_by_side and config.gpus.count > 1:
        # While two servers load, one rank's GPU has more free memory than the other's, which SGLang would refuse.
        environment["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] = "0"
    if plugin:
        environment |= {
            "PREFIXONCE_PATH": "stock",
            "PREFIXONCE_DENSE_M_EFF": str(config.engine.dense_m_eff),
            "PREFIXONCE_MIN_RUN_TOKENS": str(config.engine.min_run_tokens),
            "PREFIXONCE_TIMERS": str(int(config.engine.timers)),
        }
    return environment


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _device_name(index: int) -> str:
    visible = environment.visible_devices(index + 1)
    return f"gpu-{visible[index] if index < len(visible) else index}"

"""Real SGLang engines for tests. One process imports SGLang once; every engine is forked from it and starts in seconds.

SGLang itself spawns fresh interpreters, which costs a full import per process. On a CPU nothing forbids forking
them instead; scheduler, radix tree, KV pool, tokenizer manager and their messages are unchanged.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import importlib
import importlib.util
import json
import multiprocessing
import multiprocessing.connection
import os
import pkgutil
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

STOCK_ARGS = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "dtype": "float32",
    "disable_cuda_graph": True,
    "skip_tokenizer_init": True,
    "random_seed": 1,
    "log_level": "info",
    "max_running_requests": 64,
    # An idle scheduler polls without a pause otherwise, and takes a core from the tests that run beside it.
    "sleep_on_idle": True,
}
PLUGIN_ARGS = {"decode_attention_backend": "prefixonce", "radix_cache_backend": "prefixonce"}
_PR_SET_PDEATHSIG = 1
_START_TIMEOUT_S = 300
_CALL_TIMEOUT_S = 300


def quick_start() -> dict[str, str]:
    """Variables with which SGLang starts a Llama on a CPU in seconds: without the modules of some 200 other models, and
    without torch.compile, which two ranks would run a C++ compiler for."""
    (package,) = importlib.util.find_spec("sglang").submodule_search_locations
    models = {path.stem for path in Path(package, "srt", "models").glob("*.py")}
    others = sorted(models - {"__init__", "llama", "registry", "utils"})
    return {"SGLANG_DISABLED_MODEL_ARCHS": ",".join(others), "TORCH_COMPILE_DISABLE": "1"}


class Zygote:
    """Imports SGLang for the CPU platform and forks engines from it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._count = 0
        address = str(directory / "zygote.sock")
        self._log = (directory / "zygote.log").open("wb")
        listener = multiprocessing.connection.Listener(address, "AF_UNIX")
        self._process = subprocess.Popen(
            [sys.executable, __file__, address],
            env={
                **os.environ,
                **quick_start(),
                "SGLANG_PLATFORM": "prefixonce_cpu",
                # One thread per engine: on a busy machine more threads wait for each other.
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")]),
            },
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._connection = listener.accept()
        listener.close()

    def engine(self, *, env=None, patches=None, **server_args) -> Engine:
        """`patches`: {"module.NAME": value} set in the engine's processes after the import."""
        engine = Engine(*self._fork("engine", env, patches, STOCK_ARGS | server_args))
        engine.receive(_START_TIMEOUT_S)
        return engine

    def server(self, command_line: list[str], *, env=None, patches=None) -> Server:
        """`python -m sglang.launch_server` with this command line."""
        return Server(*self._fork("server", env, patches, command_line))

    def _fork(self, kind, env, patches, arguments):
        self._count += 1
        name = str(self._directory / f"{kind}-{self._count}")
        listener = multiprocessing.connection.Listener(f"{name}.sock", "AF_UNIX")
        self._connection.send((kind, f"{name}.sock", f"{name}.log", env or {}, patches or {}, arguments))
        connection = listener.accept()
        listener.close()
        return connection, Path(f"{name}.log")

    def close(self) -> None:
        self._connection.close()
        try:
            self._process.wait(30)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._log.close()


class EngineDiedError(Exception):
    """The engine stopped instead of answering; the text is the end of its log."""


class Engine:
    """The test's end of a running engine."""

    def __init__(self, connection, log: Path) -> None:
        self._connection = connection
        self.log = log

    def generate(self, requests: list[dict]) -> list[dict]:
        """Each request: input_ids, max_new_tokens, and optionally after_s (send later), abort_after_s, top (log-probs),
        extra_key (its namespace in the tree).

        Answers: tokens, logprobs (one per token), top (per token the sorted top log-probabilities), cached_tokens.
        """
        return self._call("generate", requests)

    def state(self) -> dict:
        return self._call("state")

    def counters(self) -> dict:
        return self.state()["counters"]

    def steer(self, **command: float) -> bool:
        return self._call("steer", command)

    def flush(self) -> None:
        """Waits until the engine is idle: an answer arrives a little before its request is off the books."""
        for _ in range(100):
            if self._call("flush"):
                return
            time.sleep(0.1)
        raise EngineDiedError("the cache was not flushed: the engine does not become idle")

    def close(self) -> None:
        with contextlib.suppress(EngineDiedError):
            self._call("close")
        self._connection.close()

    def receive(self, timeout_s: float):
        try:
            if not self._connection.poll(timeout_s):
                raise EngineDiedError(f"no answer in {timeout_s} s\n{self._tail()}")
            ok, answer = self._connection.recv()
        except (EOFError, ConnectionError):
            raise EngineDiedError(self._tail()) from None
        if not ok:
            raise EngineDiedError(f"{answer}\n{self._tail()}")
        return answer

    def _call(self, name: str, *args):
        try:
            self._connection.send((name, args))
        except (BrokenPipeError, ConnectionError):
            raise EngineDiedError(self._tail()) from None
        return self.receive(_CALL_TIMEOUT_S)

    def _tail(self) -> str:
        return self.log.read_text(errors="replace")[-6000:]


class Server:
    """A forked HTTP server, with the methods of `prefixbench.engines.process.ServerProcess`."""

    def __init__(self, connection, log: Path) -> None:
        self._connection = connection
        self.log = log
        self._group = connection.recv()
        self._ended: str | None = None

    def wait_until(self, is_ready: Callable[[], bool], timeout_s: float = _START_TIMEOUT_S) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not is_ready():
            self.check_alive()
            if time.monotonic() > deadline_s:
                raise EngineDiedError(f"not ready in {timeout_s} s\n{self.tail()}")
            time.sleep(0.1)

    def check_alive(self) -> None:
        if self._ended is None and self._connection.poll():
            try:
                self._ended = self._connection.recv()
            except EOFError:
                self._ended = "killed"
        if self._ended is not None:
            raise EngineDiedError(f"{self._ended}\n{self.tail()}")

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-6000:]

    def exit_line(self, timeout_s: float = _START_TIMEOUT_S) -> str:
        """How the server ended: its SystemExit or exception, in one line."""
        assert self._connection.poll(timeout_s), f"still running after {timeout_s} s\n{self.tail()}"
        return self._connection.recv()

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._group, signal.SIGKILL)


def _zygote_main(address: str) -> None:
    for module in ("entrypoints.engine", "entrypoints.http_server", "managers.scheduler", "models.registry"):
        importlib.import_module(f"sglang.srt.{module}")
    # Every flush of SGLang's cache collects garbage, which would search all that was imported each time.
    gc.collect()
    gc.freeze()
    context = multiprocessing.get_context("fork")
    connection = multiprocessing.connection.Client(address, "AF_UNIX")
    while True:
        try:
            order = connection.recv()
        except EOFError:
            # The test process has ended, maybe killed: no engine may go on without it, a scheduler would spin for ever.
            os.killpg(os.getpgrp(), signal.SIGKILL)
        context.Process(target=_begin, args=order).start()


def _begin(kind: str, address: str, log: str, env: dict, patches: dict, arguments) -> None:
    connection = multiprocessing.connection.Client(address, "AF_UNIX")
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(env)
    for path, value in patches.items():
        owner, _, name = path.rpartition(".")
        assert hasattr(pkgutil.resolve_name(owner), name), path
        setattr(pkgutil.resolve_name(owner), name, value)
    start_method = multiprocessing.set_start_method
    multiprocessing.set_start_method = lambda *_args, **_kwargs: start_method("fork", force=True)
    trace = env.get("ENGINE_HOST_TRACE")
    if trace:
        _trace_steps(Path(trace))
    {"engine": _serve_engine, "server": _serve_http}[kind](connection, arguments)


def _serve_http(connection, command_line: list[str]) -> None:
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a group of its own, which the zygote does not kill
    connection.send(os.getpgrp())
    sys.argv = ["sglang.launch_server", *command_line]
    try:
        runpy.run_module("sglang.launch_server", run_name="__main__")
    except BaseException as error:
        connection.send(f"{type(error).__name__}: {error}")
        raise


def _serve_engine(connection, server_args: dict) -> None:
    try:
        import sglang

        engine = sglang.Engine(**server_args)
    except BaseException:
        connection.send((False, traceback.format_exc()))
        raise
    connection.send((True, None))
    while True:
        name, args = connection.recv()
        if name == "close":
            engine.shutdown()
            connection.send((True, None))
            break
        try:
            connection.send((True, _CALLS[name](engine, *args)))
        except Exception:  # noqa: BLE001  reported by the process that asked
            connection.send((False, traceback.format_exc()))


def hook_is_lost(function, _hook, _kind):
    """In place of SGLang's wrapper of hooked functions."""
    return function


def _trace_steps(path: Path) -> None:
    """Writes one JSON line per planned decode step: its path and groups as (rows, prefix tokens, dense tokens)."""
    from prefixonce.plugin.runtime import Runtime

    take = Runtime.take

    def traced(self, seq_lens, fits):
        planned = take(self, seq_lens, fits)
        if planned is not None:
            groups = [(len(g.rows), g.prefix_tokens, g.contiguous_tokens) for g in planned.step.groups]
            line = {"path": planned.choice.path.value, "rows": len(seq_lens), "groups": groups}
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")
        return planned

    Runtime.take = traced


def _generate(engine, requests: list[dict]) -> list[dict]:
    from sglang.srt.managers.io_struct import GenerateReqInput

    async def one(request: dict) -> dict:
        await asyncio.sleep(request.get("after_s", 0))
        rid = f"{id(request)}-{time.monotonic_ns()}"
        asked = GenerateReqInput(
            input_ids=request["input_ids"],
            sampling_params={"temperature": 0, "max_new_tokens": request["max_new_tokens"], "ignore_eos": True},
            return_logprob=True,
            top_logprobs_num=request.get("top", 0),
            extra_key=request.get("extra_key"),
            rid=rid,
        )
        job = asyncio.ensure_future(anext(engine.tokenizer_manager.generate_request(asked, None)))
        if "abort_after_s" in request:
            await asyncio.sleep(request["abort_after_s"])
            engine.tokenizer_manager.abort_request(rid)
        answer = await job
        meta = answer["meta_info"]
        return {
            "tokens": answer["output_ids"],
            "logprobs": [entry[0] for entry in meta["output_token_logprobs"]],
            "top": [sorted((e[0] for e in step), reverse=True) for step in meta.get("output_top_logprobs") or []],
            "cached_tokens": meta["cached_tokens"],
            "finish": meta["finish_reason"]["type"],
            "retractions": meta.get("num_retractions", 0),
        }

    async def everything() -> list[dict]:
        return await asyncio.gather(*(one(request) for request in requests))

    return engine.loop.run_until_complete(everything())


def _state(engine) -> dict:
    return engine.get_server_info()["internal_states"][0].get("prefixonce")


def _steer(engine, command: dict) -> bool:
    from sglang.srt.managers.io_struct import SetInternalStateReq

    answer = engine.loop.run_until_complete(
        engine.tokenizer_manager.set_internal_state(SetInternalStateReq(server_args=command))
    )
    return all(getattr(part, "updated", part) for part in answer)


def _flush(engine) -> bool:
    return bool(engine.flush_cache().success)


_CALLS = {"generate": _generate, "state": _state, "steer": _steer, "flush": _flush}

if __name__ == "__main__":
    _zygote_main(sys.argv[1])

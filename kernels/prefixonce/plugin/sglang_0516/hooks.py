"""Registers the plugin with SGLang 0.5.16 and connects the parts when the scheduler builds them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from pkgutil import resolve_name
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend
from sglang.srt.managers.io_struct import SetInternalStateReqOutput
from sglang.srt.mem_cache.registry import register_radix_cache_backend
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.server_args import add_attention_backend_choices

from prefixonce.cost import CONSERVATIVE, profile_for
from prefixonce.errors import PrefixOnceError, UnsupportedError
from prefixonce.plugin.backend import PrefixOnceBackend
from prefixonce.plugin.kernels import kernels_for
from prefixonce.plugin.metrics import Metrics
from prefixonce.plugin.placement import Placement
from prefixonce.plugin.runtime import Runtime
from prefixonce.plugin.sglang_0516.allocator import RunKeeper
from prefixonce.plugin.sglang_0516.control import Control, split_command
from prefixonce.plugin.sglang_0516.graphs import GraphVariants
from prefixonce.plugin.sglang_0516.refusals import NAME, check_server_args, shape_of_model
from prefixonce.plugin.sglang_0516.tree import KvPool, PlacingRadixCache
from prefixonce.plugin.timers import timers_for

_LOG_STATS = "sglang.srt.observability.metrics_collector.SchedulerMetricsCollector.log_stats"

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


def stop(error: Exception) -> NoReturn:
    """SGLang logs and survives an ordinary exception of a plugin; only SystemExit stops the server."""
    raise SystemExit(f"{NAME}: {' '.join(str(error).split())}") from error


def fatal(function: Callable[P, R]) -> Callable[P, R]:
    @wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except PrefixOnceError as error:
            stop(error)
        except Exception as error:
            logger.exception("%s: unexpected error", NAME)
            stop(error)

    return guarded


class Plugin:
    """One per process. In the parent only the option checks run; backend and tree exist in scheduler processes."""

    def __init__(self, runtime: Runtime, sglang_version: str) -> None:
        self._runtime = runtime
        self._sglang_version = sglang_version
        self._graphs = GraphVariants()
        self._runner: Any = None
        self._tree: PlacingRadixCache | None = None
        self._keeper: RunKeeper | None = None
        self._metrics: Metrics | None = None
        self._control: Control | None = None

    def install(self) -> None:
        add_attention_backend_choices([NAME])
        register_attention_backend(NAME)(fatal(self._build_backend))
        register_radix_cache_backend(NAME, fatal(self._build_tree))
        for target, hook, kind in self._hooks():
            HookRegistry.register(target, hook, kind)

    def _hooks(self) -> tuple[tuple[str, Callable[..., Any], HookType], ...]:
        return (
            ("sglang.srt.server_args.ServerArgs.check_server_args", self._after_check, HookType.AFTER),
            ("sglang.srt.managers.schedule_batch.alloc_for_extend", self._around_allocation, HookType.AROUND),
            ("sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new", self._after_batch, HookType.AFTER),
            ("sglang.srt.model_executor.model_runner.ModelRunner.forward", self._around_forward, HookType.AROUND),
            ("sglang.srt.managers.scheduler.Scheduler.get_internal_state", self._after_get_state, HookType.AFTER),
            ("sglang.srt.managers.scheduler.Scheduler.set_internal_state", self._around_set_state, HookType.AROUND),
            (_LOG_STATS, self._after_log_stats, HookType.AFTER),
            *self._graphs.hooks(),
        )

    def _build_backend(self, runner: Any) -> PrefixOnceBackend:
        check_server_args(runner.server_args)
        self._check_hooks()
        stock_name = runner.server_args.attention_backend
        stock = ATTENTION_BACKENDS.get(stock_name)
        if stock is None:
            raise UnsupportedError(f"--attention-backend {stock_name!r} is unknown; name the stock backend to wrap")
        device, settings, shape = str(runner.device), self._runtime.settings, shape_of_model(runner)
        if device != "cpu":
            if settings.fault.corrupts and not runner.server_args.disable_cuda_graph:
                raise UnsupportedError(f"PREFIXONCE_TEST_FAULT={settings.fault} needs --disable-cuda-graph")
            gpu = torch.cuda.get_device_name()
            self._runtime.cost = profile = settings.profile or profile_for(gpu)
            level = logging.WARNING if profile is CONSERVATIVE else logging.INFO
            logger.log(level, "%s: cost profile for %s: %s", NAME, gpu, profile.source)
        kernels = kernels_for(
            device,
            shape,
            self._runtime,
            max_batch=runner.req_to_token_pool.size,
            pool_slots=runner.token_to_kv_pool.size,
            dtype=runner.dtype,
        )
        self._runtime.shape, self._runner = shape, runner
        self._runtime.timers = timers_for(device, lambda: self._runtime.counters, details=settings.timers)
        return PrefixOnceBackend(runner, stock(runner), kernels, self._runtime, self._graphs)

    def _build_tree(self, context: Any) -> PlacingRadixCache:
        check_server_args(context.server_args)
        if self._runner is None:
            raise UnsupportedError(f"the tree was built without the attention backend {NAME}; give both options")
        settings, params, runner = self._runtime.settings, context.params, self._runner
        allocator = params.token_to_kv_pool_allocator
        self._keeper = keeper = RunKeeper(allocator, settings.min_run_tokens)
        on_cuda = str(runner.device).startswith("cuda")
        overlapped = on_cuda and not context.server_args.disable_overlap_schedule
        pool = KvPool(allocator, keeper, runner.token_to_kv_pool, runner.forward_stream if overlapped else None)
        self._tree = PlacingRadixCache(params, pool, Placement(pool, settings.min_run_tokens))
        self._runtime.rows = self._tree.rows
        self._metrics = Metrics(self._runtime, self._tree.placement)
        self._control = Control(
            self._runtime, self._tree, self._metrics, rank=context.tp_rank, sglang_version=self._sglang_version
        )
        logger.info("%s serves decode: path %s, %s", NAME, self._runtime.mode.name.lower(), settings)
        if str(settings.fault) != "none":
            logger.error("%s: A FAULT IS PLANTED ON PURPOSE (%s); the answers are wrong", NAME, settings.fault)
        return self._tree

    def _check_hooks(self) -> None:
        """SGLang only logs a hook that found no target, so look at what is really in place."""
        for target, _, _ in self._hooks():
            if not hasattr(resolve_name(target), "__wrapped__"):
                raise UnsupportedError(f"SGLang {self._sglang_version} did not take the hook on {target}")

    def _after_check(self, _result: object, server_args: Any) -> None:
        fatal(check_server_args)(server_args)

    def _around_allocation(self, allocate: Callable[..., Any], batch: Any) -> Any:
        if self._keeper is None:
            return allocate(batch)
        with self._keeper.prefill(batch.extend_lens):
            return allocate(batch)

    def _after_batch(self, _result: object, _cls: type, batch: Any, runner: Any, **_options: Any) -> None:
        if self._tree is None or runner is not self._runner:
            return
        self._graphs.current = None
        if not batch.forward_mode.is_decode():
            self._runtime.drop_plan()
            if batch.forward_mode.is_extend() and batch.prefix_lens is not None:
                self._tree.new_slots.launched(batch.reqs, batch.prefix_lens, batch.extend_lens, batch.out_cache_loc)
            return
        self._runtime.plan(batch.reqs, batch.seq_lens_cpu.numpy())

    def _around_forward(
        self, forward: Callable[..., Any], runner: Any, forward_batch: Any, *args: Any, **kw: Any
    ) -> Any:
        if runner is not self._runner or not forward_batch.forward_mode.is_decode():
            return forward(runner, forward_batch, *args, **kw)
        with self._runtime.timers.span("decode_s"):
            return forward(runner, forward_batch, *args, **kw)

    def _after_get_state(self, result: Any, scheduler: Any, _request: object) -> None:
        if self._control is not None:
            self._runtime.timers.settle()
            result.internal_state[NAME] = self._control.state(scheduler.tp_cpu_group)

    def _after_log_stats(self, _result: object, collector: Any, _stats: object) -> None:
        if self._metrics is not None:
            self._metrics.publish(collector.labels, collector._counter_cls)

    def _around_set_state(self, stock: Callable[..., Any], scheduler: Any, request: Any) -> Any:
        ours, theirs = split_command(request.server_args)
        if self._control is None or not ours:
            return stock(scheduler, request)
        problem = "one call cannot carry SGLang's and our settings" if theirs else self._control.apply(ours)
        if problem is not None:
            logger.error("%s: %s", NAME, problem)
        return SetInternalStateReqOutput(updated=problem is None)

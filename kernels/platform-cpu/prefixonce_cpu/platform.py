"""The platform object SGLang asks for devices, pools and allocators; chosen with SGLANG_PLATFORM=prefixonce_cpu."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.platforms.cpu import CpuSRTPlatform
from sglang.srt.platforms.device_mixin import PlatformEnum

if TYPE_CHECKING:
    from torch.profiler import ProfilerActivity

NAME = "prefixonce_cpu"


class TorchCpuPlatform(CpuSRTPlatform):  # type: ignore[misc]
    """A CPU on which every operator takes its generic torch form.

    It counts as out of tree although its device is "cpu": the in-tree CPU branches need compiled CPU kernels.
    """

    _enum = PlatformEnum.OOT

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Tensor parallel ranks talk through gloo and share this machine's cores.

        Set here, in the parent, because SGLang's scheduler processes read both from the environment: it would load
        the NCCL library that a CUDA build of torch brings along, and want a NUMA node per rank.
        """
        super().apply_server_args_defaults(server_args)
        if server_args.tp_size == 1:
            return
        os.environ.setdefault("SGLANG_NCCL_SO_PATH", "none-on-a-cpu")
        os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", _share_cores(server_args.tp_size))

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        return "native"

    def get_mha_kv_pool_cls(self) -> type:
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        pool: type = MHATokenToKVPool
        return pool

    def get_paged_allocator_cls(self) -> Callable[..., object]:
        from prefixonce_cpu.allocator import build_allocator

        return build_allocator

    # Without the two below SGLang's start_profile raises and takes the scheduler with it.
    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"

    def get_torch_profiler_activity(self) -> ProfilerActivity:
        from torch.profiler import ProfilerActivity

        return ProfilerActivity.CPU


def _share_cores(ranks: int) -> str:
    """Cores of each rank in SGLang's spelling, such as 0,1|2,3; ranks share cores where there are too few."""
    cores = sorted(os.sched_getaffinity(0))
    shares = [cores[rank::ranks] or [cores[rank % len(cores)]] for rank in range(ranks)]
    return "|".join(",".join(map(str, share)) for share in shares)


def activate() -> str | None:
    """Entry point: only when asked for by name, so that installing this never takes over a GPU machine."""
    if os.environ.get("SGLANG_PLATFORM") != NAME:
        return None
    return "prefixonce_cpu.platform:TorchCpuPlatform"

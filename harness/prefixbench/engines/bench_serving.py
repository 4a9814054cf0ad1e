"""SGLang's own serving benchmark, run as its users run it, against a server that is already there.

One process runs SGLang's command line block after block: importing SGLang takes longer than a block.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from prefixbench.engines.base import ServerFailedError
from prefixbench.record import OutsideBlock
from prefixbench.workloads import PromptSpec

MODULE = "sglang.benchmark.serving"
DATA_SETS = ("autobench", "generated-shared-prefix")

# Runs in the child: a JSON list of arguments per line on stdin, SGLang's entry point for each, a line when it is done.
_DRIVER = f"""
import json, sys, traceback
from {MODULE} import cli_main
for line in sys.stdin:
    sys.argv = ["{MODULE}", *json.loads(line)]
    try:
        cli_main()
        print("#done", flush=True)
    except (Exception, SystemExit):
        print("#failed " + json.dumps(traceback.format_exc()), flush=True)
"""


class BenchServing:
    """SGLang's client. `requests` are what our own client sends, `system_tokens` of each being shared."""

    def __init__(self, requests: Sequence[PromptSpec], in_flight: int, system_tokens: int, data_set: str) -> None:
        self._requests = requests
        self._in_flight = in_flight
        self._system_tokens = system_tokens
        self._data_set = data_set

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="prefixbench-outside-")
        self._prompts = Path(self._folder.name, "prompts.jsonl")
        rows = ({"prompt": list(r.input_ids), "output_len": r.max_new_tokens} for r in self._requests)
        self._prompts.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        # Its cache of prompts lies below HOME and its key does not name the vocabulary.
        environment = {**os.environ, "HOME": self._folder.name, "SGLANG_PLUGINS": "no-plugin"}
        self._process = subprocess.Popen(
            (sys.executable, "-u", "-c", _DRIVER),
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()

    def arguments(self, url: str, model: Path, seed: int, output: Path) -> tuple[str, ...]:
        """SGLang's command line for one block."""
        first = self._requests[0]
        own_tokens = len(first.input_ids) - self._system_tokens
        chosen: dict[str, object] = {
            # The very prompts, as token ids; the cache is prepared as for our own client.
            "autobench": {"dataset-path": self._prompts, "warmup-requests": 0},
            # SGLang's own prompts of the same sizes, as text; its warm-up request brings the prefix into the cache.
            "generated-shared-prefix": {
                "gsp-num-groups": 1,
                "gsp-prompts-per-group": len(self._requests),
                "gsp-system-prompt-len": self._system_tokens,
                "gsp-question-len": own_tokens,
                "gsp-output-len": first.max_new_tokens,
                "warmup-requests": 1,
            },
        }
        options: dict[str, object] = {
            "backend": "sglang",
            "base-url": url,
            "model": model,
            "dataset-name": self._data_set,
            **chosen[self._data_set],  # type: ignore[dict-item]
            "num-prompts": len(self._requests),
            "max-concurrency": self._in_flight,
            "seed": seed,
            "ready-check-timeout-sec": 0,
            "output-file": output,
        }
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        return (*words, "--output-details", "--disable-tqdm")

    def run(self, url: str, model: Path, seed: int, position: int, timeout_s: float) -> OutsideBlock:
        """One block; ServerFailedError when SGLang's client fails or does not end."""
        output = Path(self._folder.name, f"{position}.jsonl")
        self._say(self.arguments(url, model, seed, output), timeout_s)
        return read_block(json.loads(output.read_text()), position)

    def _say(self, arguments: Sequence[str], timeout_s: float) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        watchdog = threading.Timer(timeout_s, self._process.kill)
        watchdog.start()
        said: list[str] = []
        try:
            self._process.stdin.write(json.dumps(list(arguments)) + "\n")
            self._process.stdin.flush()
            for line in self._process.stdout:
                if line.startswith("#done"):
                    return
                if line.startswith("#failed "):
                    said.append(json.loads(line.removeprefix("#failed ")))
                    break
                said.append(line)
        except BrokenPipeError:
            pass
        finally:
            watchdog.cancel()
        end = next((line.strip() for line in reversed("".join(said).splitlines()) if line.strip()), "no output")
        raise ServerFailedError(f"{MODULE} gave no result: {end}", detail="".join(said)[-8000:])


def read_block(data: Mapping[str, Any], position: int) -> OutsideBlock:
    """What SGLang's client wrote, without texts; seconds. `decode_s` is the time from first to last token."""
    failed = [error for error in data["errors"] if error]
    if failed:
        raise ServerFailedError(f"{len(failed)} of {len(data['errors'])} requests of {MODULE} failed", detail=failed[0])
    return OutsideBlock(
        position=position,
        wall_s=data["duration"],
        input_tokens=data["total_input_tokens"],
        output_tokens=tuple(data["output_lens"]),
        first_token_s=tuple(data["ttfts"]),
        decode_s=tuple(sum(gaps) for gaps in data["itls"]),
        reported_tok_s=data["output_throughput"],
        reported_mean_tpot_ms=data["mean_tpot_ms"],
    )

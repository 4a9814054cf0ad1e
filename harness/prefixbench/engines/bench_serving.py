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
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from prefixbench.engines.base import ServerFailedError
from prefixbench.engines.process import without_proxy
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


@dataclass(frozen=True)
class Load:
    """What SGLang's client is to send: `autobench` are these very prompts as token ids, `generated-shared-prefix` its
    own random text of the same sizes, of which `prefix_tokens` are shared."""

    data_set: str
    requests: Sequence[PromptSpec]
    prefix_tokens: int
    in_flight: int
    seed: int

    @property
    def primes_itself(self) -> bool:
        """True where only the client knows the prefix: its warm-up request brings it into the cache."""
        return self.data_set == "generated-shared-prefix"


class BenchServing:
    """SGLang's client in a process of its own, from `with` on."""

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="prefixbench-outside-")
        # Its cache of prompts lies below HOME, and the key of that cache does not name the vocabulary.
        environment = {
            **os.environ,
            **without_proxy(os.environ),
            "HOME": self._folder.name,
            "SGLANG_PLUGINS": "no-plugin",
        }
        self._process = subprocess.Popen(
            (sys.executable, "-c", _DRIVER),
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
        self._process.communicate()
        self._folder.cleanup()

    def run(self, url: str, model: Path, load: Load, position: int, timeout_s: float) -> OutsideBlock:
        """One block; ServerFailedError when SGLang's client fails or does not end."""
        folder = Path(self._folder.name)
        prompts, output = folder / "prompts.jsonl", folder / f"{position}.jsonl"
        rows = ({"prompt": list(r.input_ids), "output_len": r.max_new_tokens} for r in load.requests)
        prompts.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        self._say(arguments(load, url, model, prompts, output), timeout_s)
        return read_block(json.loads(output.read_text()), position)

    def _say(self, words: Sequence[str], timeout_s: float) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        watchdog = threading.Timer(timeout_s, self._process.kill)
        watchdog.start()
        said: list[str] = []
        try:
            self._process.stdin.write(json.dumps(list(words)) + "\n")
            self._process.stdin.flush()
            for line in self._process.stdout:
                if line.startswith("#done"):
                    return
                if line.startswith("#failed "):
                    said.append(json.loads(line.removeprefix("#failed ")))
                    break
                said.append(line)
        except BrokenPipeError:
            said += self._process.stdout.readlines()
        finally:
            watchdog.cancel()
        text = "".join(said)
        end = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "it ended without a word")
        raise ServerFailedError(f"{MODULE} gave no result: {end}", detail=text[-8000:])


def arguments(load: Load, url: str, model: Path, prompts: Path, output: Path) -> tuple[str, ...]:
    """SGLang's command line for one block; `prompts` is the file of the `autobench` data set."""
    first = load.requests[0]
    options: dict[str, object] = {
        "backend": "sglang",
        "base-url": url,
        "model": model,
        "dataset-name": load.data_set,
        "num-prompts": len(load.requests),
        "max-concurrency": load.in_flight,
        "warmup-requests": int(load.primes_itself),
        "seed": load.seed,
        "ready-check-timeout-sec": 0,
        "output-file": output,
    }
    if load.data_set == "autobench":
        options["dataset-path"] = prompts
    else:
        options |= {
            "gsp-num-groups": 1,
            "gsp-prompts-per-group": len(load.requests),
            "gsp-system-prompt-len": load.prefix_tokens,
            "gsp-question-len": len(first.input_ids) - load.prefix_tokens,
            "gsp-output-len": first.max_new_tokens,
        }
    spelled = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return (*spelled, "--output-details", "--disable-tqdm")


def read_block(data: Mapping[str, Any], position: int) -> OutsideBlock:
    """What SGLang's client wrote, without texts. A request that failed makes the whole block useless."""
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

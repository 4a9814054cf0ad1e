"""One `prefixbench numerics` job: a launch for the paths, one with a fault for the control, a record for every case."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from prefixbench import store
from prefixbench.analysis.numerics import OUTSIDE, Agreement, agreement
from prefixbench.case import NumericsCase, case_hash
from prefixbench.config.numerics import NO_FAULT, NumericsConfig, cases, server_config
from prefixbench.engines import sglang
from prefixbench.engines.base import ServerFailedError
from prefixbench.machine import environment, lock
from prefixbench.measures.numerics import Script, Subject, measure, not_proven, write_script
from prefixbench.record import SCHEMA_VERSION, Failure, Launch, NumericsMeasurement, Record, Status
from prefixbench.workloads import build


@dataclass(frozen=True)
class Job:
    """`resolved` is the composed configuration as plain data, `config_yaml` as text; `folder` takes the logs."""

    config: NumericsConfig
    resolved: dict[str, object]
    config_yaml: str
    overrides: tuple[str, ...]
    folder: Path


def run(job: Job, say: Callable[[str], None]) -> None:
    """Measures and records everything asked for; a BenchError only where nothing can be measured at all."""
    engine = sglang.create(server_config(job.config, NO_FAULT))
    engine.check()
    with lock.hold(engine.resources):
        for fault in (NO_FAULT, *((job.config.control_fault,) if job.config.control else ())):
            _LaunchRun(job, fault, say).run()


class _LaunchRun:
    """One server, its cases, and what has been measured of them so far."""

    def __init__(self, job: Job, fault: str, say: Callable[[str], None]) -> None:
        self._job, self._fault, self._say = job, fault, say
        self._server_config = server_config(job.config, fault)
        self._engine = sglang.create(self._server_config)
        self._cases = cases(job.config, self._server_config, fault)
        self._measured: dict[str, NumericsMeasurement] = {}
        now = datetime.now(UTC)
        launch_id = f"{now:%Y%m%dT%H%M%S}-{os.urandom(4).hex()}"
        self._launch = Launch(launch_id, 0, now.isoformat("T", "milliseconds"), None)
        self._environment = environment.observe()
        self._log = job.folder / f"{launch_id}.log"

    def run(self) -> None:
        planted = "" if self._fault == NO_FAULT else f" with the fault {self._fault}"
        self._say(f"starting a server{planted} for {len(self._cases)} cases")
        left = list(self._cases)
        try:
            fault = None if self._fault == NO_FAULT else self._fault
            server = self._engine.start(True, self._job.config.seed, self._log, fault)
            self._launch = replace(self._launch, startup_s=server.startup_s, server_command=server.command)
            try:
                script = self._script(server)
                while left:
                    self._measure(server, left[0], script)
                    left.pop(0)
            finally:
                server.stop()
        except ServerFailedError as error:
            for case in left:
                self._save(case, None, error.status, Failure("server", str(error), error.detail))

    def _script(self, server: Subject) -> Script:
        config = self._job.config
        workload = build(
            "shared-prefix",
            {},
            prefix_tokens=config.prefix_len,
            suffix_tokens=config.suffix_len,
            output_tokens=config.decode_len + 1,
            concurrency=config.concurrency,
            vocab_size=config.model.vocab,
            seed=config.seed,
        )
        prompts = tuple(request.input_ids for request in workload.requests)
        return write_script(server, workload.primers[0], prompts, config.decode_len, config.model.vocab)

    def _measure(self, server: Subject, case: NumericsCase, script: Script) -> None:
        measured = measure(server, case, script, self._job.config.model.vocab)
        failure = None
        if (reason := not_proven(case, measured.counters)) is not None:
            failure = Failure("path", reason)
        elif case.role != "path":
            self._measured[case.role] = measured
        elif set(self._measured) != {"reference", "noise"}:
            failure = Failure("path", "there is no sound reference or noise in this launch to compare with")
        else:
            found = agreement(self._measured["reference"], self._measured["noise"], measured)
            failure = None if found.inside else Failure(OUTSIDE, _outside(found, case))
        self._save(case, measured, "failed" if failure else "ok", failure)

    def _save(
        self, case: NumericsCase, measured: NumericsMeasurement | None, status: Status, failure: Failure | None
    ) -> None:
        digest = case_hash(case)
        record = Record(
            schema_version=SCHEMA_VERSION,
            record_id=f"{digest}/{self._launch.launch_id}",
            status=status,
            case_hash=digest,
            case=case,
            launch=self._launch,
            config=self._job.resolved,
            overrides=self._job.overrides,
            environment=self._environment,
            labels=(*self._engine.labels, "synthetic-prompts"),
            measurement=measured,
            failure=failure,
            notes={
                "sweep": self._job.config.run_id,
                "tag": self._job.config.tag,
                "plugin_source": self._engine.plugin_source(),
            },
        )
        log = self._log.read_text(errors="replace") if self._log.exists() else ""
        files = {
            "config.yaml": self._job.config_yaml,
            "overrides.txt": "".join(f"{override}\n" for override in self._job.overrides),
            "server.log": log,
        }
        store.save(record, Path(self._job.config.runs), files)
        self._say(f"  {case.role} {case.path}, {case.concurrency} in flight: {failure.message if failure else 'ok'}")


def _outside(found: Agreement, case: NumericsCase) -> str:
    beside = f"largest difference {found.path.largest:.3g}, stock's own {found.noise.largest:.3g}"
    planted = "" if case.fault == NO_FAULT else f"; {case.fault} is planted, so this is what must happen"
    return f"further from stock than stock's own noise, {found.ratio:.3g} times ({beside}){planted}"

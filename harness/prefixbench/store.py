"""runs/: append-only records. One folder per case and launch, written once, whole or not at all.

    <root>/<case-hash>/<launch-id>/record.json (+ config.yaml, overrides.txt, server.log)
    <root>/reference/...   the same tree, committed beside the code
    <root>/.sweeps/<sweep-id>/...   what each run planned and which earlier records it counted as done

Names that start with a dot are never records.
"""

from __future__ import annotations

import errno
import gzip
import json
import logging
import os
import shutil
import socket
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json

from prefixbench.case import fields_hash
from prefixbench.errors import StoreError
from prefixbench.output import write_whole
from prefixbench.record import SCHEMA_VERSION, Record
from prefixbench.selection import Selection, parse_selector

RECORD_FILE = "record.json"
REFERENCE = "reference"
SWEEPS = ".sweeps"
PLAN_FILE = "plan.json"
_RECORD_FILES = (RECORD_FILE, f"{RECORD_FILE}.gz")  # a record that is kept in a repository may be gzipped
_WRITING = ".writing-"

_ADAPTER: TypeAdapter[Record] = TypeAdapter(Record)
_log = logging.getLogger(__name__)


def save(record: Record, root: Path, extra_files: Mapping[str, str | bytes | Path]) -> Path:
    """Writes the record and its files as `<root>/<record_id>/`; returns that folder.

    The folder appears in one rename after everything in it was synced, so a kill leaves either all of it or a
    `.writing-...` folder that no reader looks at. A `Path` in `extra_files` is copied. An existing record is never
    replaced, and NaN or infinity is refused: StoreError.
    """
    folder = root / record.record_id
    text = to_json(record)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.parent / f"{_WRITING}{socket.gethostname()}-{os.getpid()}-{folder.name}"
    temporary.mkdir()
    try:
        for name, content in {RECORD_FILE: text, **extra_files}.items():
            if isinstance(content, Path):
                content = content.read_bytes()
            _write_synced(temporary / name, content.encode(errors="replace") if isinstance(content, str) else content)
        _sync_folder(temporary)
        temporary.rename(folder)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            raise StoreError(f"{folder} holds a record already; records are never replaced") from None
        raise StoreError(f"record {record.record_id} could not be written below {root}: {error.strerror}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    _sync_folder(folder.parent)
    return folder


def load(selector: str | Sequence[str], root: Path = Path("runs")) -> list[Record]:
    """Records that `selector` names, ordered by launch time, each once; see `selection` for the grammar.

    A torn or invalid file is logged with its path and left out; a record of a newer schema is a StoreError.
    """
    selection = parse_selector(_words(selector, root))
    records: dict[str, Record] = {}
    for source in selection.sources or (str(root),):
        for record in _from_source(source, root):
            records.setdefault(record.record_id, record)
    return _ordered(record for record in records.values() if selection.accepts(record))


def latest(root: Path = Path("runs")) -> list[Record]:
    """Records of the newest run below `root`, with those it counted as done; empty when there is none."""
    newest = latest_run(root)
    return [] if newest is None else of_run(root, newest)


def new_run_id() -> str:
    """Ids sort by time wherever the clock's time zone is set to; no two runs share one (microseconds)."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S.%f}"


def latest_run(root: Path = Path("runs")) -> str | None:
    """The id of the newest run below `root`, by its plan or its records."""
    planned = {plan.relative_to(root / SWEEPS).parts[0] for plan in (root / SWEEPS).rglob(PLAN_FILE)}
    made = {str(run) for record in read_tree(root).records if (run := (record.notes or {}).get("sweep"))}
    return max(planned | made, default=None)


def of_run(root: Path, run_id: str) -> list[Record]:
    """Records that one run made, with those it counted as done."""
    reused = {record_id for plan in plans(root, run_id) for record_id in plan.reused}
    everything = read_tree(root).records
    return _ordered(r for r in everything if r.record_id in reused or (r.notes or {}).get("sweep") == run_id)


@dataclass(frozen=True)
class Plan:
    """What one job of a run was to measure, and the ids of the records that it counted as done."""

    cases: tuple[str, ...] = ()
    reused: tuple[str, ...] = ()


_PLAN: TypeAdapter[Plan] = TypeAdapter(Plan)


def write_plan(folder: Path, cases: Iterable[str], reused: Iterable[Record] = ()) -> None:
    """Leaves the plan of a job, case hashes and records, in its folder below .sweeps."""
    folder.mkdir(parents=True, exist_ok=True)
    plan = Plan(tuple(cases), tuple(record.record_id for record in reused))
    write_whole(folder / PLAN_FILE, json.dumps(asdict(plan), indent=1) + "\n")


def plans(root: Path, run_id: str) -> list[Plan]:
    """The plans of a run, one for each of its jobs; StoreError for one that cannot be read."""
    found = []
    for path in sorted((root / SWEEPS / run_id).rglob(PLAN_FILE)):
        try:
            found.append(_PLAN.validate_json(path.read_bytes()))
        except (OSError, ValidationError):
            raise StoreError(
                f"{path} is no plan of a run; delete it: its own records are kept, those it reused are no longer listed"
            ) from None
    return found


@dataclass(frozen=True)
class Reading:
    """What was under a folder: the records, and one line for each file that is not one."""

    records: tuple[Record, ...]
    problems: tuple[str, ...]


def read_tree(folder: Path) -> Reading:
    """Every record below `folder`, each once; `reference` and dotted folders below it are left out."""
    records: dict[str, Record] = {}
    files: dict[str, Path] = {}
    problems: list[str] = []
    for path in _record_files(folder):
        try:
            record = read_record(path)
        except InvalidRecordError as error:
            problems.append(str(error))
            continue
        first = files.setdefault(record.record_id, path)
        if first is not path:
            problems.append(f"{path} is the record of {first} again; it is left out")
        records.setdefault(record.record_id, record)
    for problem in problems:
        _log.warning("%s", problem)
    return Reading(tuple(records.values()), tuple(problems))


class InvalidRecordError(StoreError):
    """A file named record.json that is torn, not a record, or a copy of another one."""


def read_record(path: Path) -> Record:
    """One record of any schema version up to this one. InvalidRecordError if torn, StoreError if newer."""
    try:
        content = path.read_bytes()
        data, text = _parse(gzip.decompress(content) if path.suffix == ".gz" else content)
    except (OSError, ValueError, EOFError, RecursionError, zlib.error) as error:
        raise InvalidRecordError(f"{path} is torn or not a record ({_first_line(error)}); it is left out") from None
    version = data.get("schema_version") if isinstance(data, dict) else None
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise InvalidRecordError(
            f"{path} is torn or not a record (its schema version is {version!r}, not a number); it is left out"
        )
    if version > SCHEMA_VERSION:
        raise StoreError(
            f"{path} has schema version {version}; this prefixbench reads up to {SCHEMA_VERSION}: install a newer one"
        )
    try:
        record = _ADAPTER.validate_python(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InvalidRecordError(f"{path} is not a valid record: {where}: {first['msg']}; it is left out") from None
    digest = fields_hash(data["case"])
    if (record.case_hash, record.record_id) != (digest, f"{digest}/{record.launch.launch_id}"):
        raise InvalidRecordError(
            f"{path} is not a valid record: its case and launch do not make the id {record.record_id!r}, so it was "
            "changed after it was written; it is left out"
        )
    return record


def to_json(record: Record) -> str:
    """Canonical JSON; NaN and infinity are a StoreError, a lone surrogate is escaped."""
    try:
        data: Any = _ADAPTER.dump_python(record, mode="json")
        return json.dumps(data, allow_nan=False, separators=(",", ":")) + "\n"
    except ValueError as error:
        raise StoreError(f"record {record.record_id} cannot be written: {_first_line(error)}") from None


def clear_leftovers(root: Path) -> int:
    """Removes half-written folders of processes of this host that are gone; returns how many."""
    cleared = 0
    for path in root.glob(f"*/{_WRITING}{socket.gethostname()}-*"):
        pid = path.name.removeprefix(f"{_WRITING}{socket.gethostname()}-").split("-", 1)[0]
        if not Path("/proc", pid).exists():
            shutil.rmtree(path)
            cleared += 1
    return cleared


def _words(selector: str | Sequence[str], root: Path) -> list[str]:
    """Each argument split at its spaces, unless it is the name of a file or folder."""
    arguments = [selector] if isinstance(selector, str) else selector
    is_path = [bool(argument) and (Path(argument).exists() or (root / argument).exists()) for argument in arguments]
    return [w for a, whole in zip(arguments, is_path, strict=True) for w in ([a] if whole else a.split())]


def _from_source(source: str, root: Path) -> Sequence[Record]:
    if source == "latest":
        return latest(root)
    if source == "reference":
        return read_tree(root / REFERENCE).records
    path = Path(source)
    if path.is_file():
        return [read_record(path)]
    if path.is_dir() or path == root:
        return read_tree(path).records
    if (root / source).is_dir() and source.strip("./"):
        return read_tree(root / source).records
    if (root / SWEEPS / source).is_dir():
        return of_run(root, source)
    if any(mark in source for mark in "*?["):
        return _from_glob(source, root)
    return Selection.named(source, read_tree(root).records)


def _from_glob(pattern: str, root: Path) -> list[Record]:
    base, relative = (Path("/"), pattern[1:]) if pattern.startswith("/") else (Path(), pattern)
    matches = sorted(base.glob(relative)) or sorted(root.glob(pattern))
    found: list[Record] = []
    for path in matches:
        found += [read_record(path)] if path.name in _RECORD_FILES else read_tree(path).records if path.is_dir() else []
    return found


def _record_files(folder: Path) -> Iterator[Path]:
    for current, folders, files in os.walk(folder):
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f != REFERENCE)
        yield from (Path(current, name) for name in _RECORD_FILES if name in files)


def _ordered(records: Iterator[Record]) -> list[Record]:
    return sorted(records, key=lambda r: (r.launch.started_at, r.record_id))


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _parse(text: bytes) -> tuple[Any, Any]:
    """The data as it is, and as it can be shown and written anywhere: with lone surrogates replaced.

    A fast parser first; what it refuses (a lone surrogate, say) the standard one reads, or says what is wrong.
    """
    try:
        data = from_json(text, allow_inf_nan=False)
    except ValueError:
        data = json.loads(text, parse_constant=_refuse_constant)
        return data, _encodable(data)
    return data, data


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {_encodable(key): _encodable(item) for key, item in value.items()}
    return [_encodable(item) for item in value] if isinstance(value, list) else value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]

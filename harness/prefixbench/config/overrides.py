"""Hydra's override grammar: folding sweeps that one server can serve, and its errors in one line."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, ValueType
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from prefixbench.config import config_dir
from prefixbench.config.run import AXES
from prefixbench.errors import BenchError, UsageError
from prefixbench.hints import unknown

_FOLDED = (*AXES, "path")


def prepare(overrides: Sequence[str], multirun: bool) -> list[str]:
    """Overrides as Hydra takes them. In a multirun `prefix_len=512,2048` becomes `prefix_len=[512,2048]` for what one
    server measures; `gpus=2` becomes `gpus='2'`, because Hydra takes a bare number for a value, not for a choice."""
    return [_prepare(override, multirun) for override in _parsed(overrides)]


def compositions(config_name: str, arguments: Namespace, overrides: Sequence[str]) -> list[DictConfig]:
    """What Hydra composes for every job of this command line: one job, or in a multirun those of the sweep."""
    _parsed(overrides)
    with initialize_config_dir(str(arguments.config_path or config_dir()), version_base="1.3"):
        name = arguments.config_name or config_name
        given = list(overrides)
        if arguments.config_dir is not None:
            given.append(f"hydra.searchpath=[{quoted(f'file://{Path(arguments.config_dir).resolve()}')}]")
        if not arguments.multirun:
            return [compose(name, overrides=given)]
        parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
        jobs = BasicSweeper.split_arguments(parser.parse_overrides(given), None)[0]
        if not jobs:
            raise UsageError("this sweep has no point: one of its lists is empty")
        return [compose(name, overrides=list(job)) for job in jobs]


def quoted(text: str) -> str:
    """`text` as one value of Hydra's grammar, whatever it contains."""
    escaped = re.sub(r"(\\*)('|$)", lambda end: end[1] * 2 + ("\\'" if end[2] else ""), text).replace("${", "\\${")
    return f"'{escaped}'"


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turns Hydra's and OmegaConf's errors into one UsageError line that says what is allowed."""
    try:
        yield
    except BenchError:
        raise
    except OverrideParseException as error:
        raise UsageError(
            f"override {error.override!r} cannot be read; allowed: key=value, key=[a,b], and quotes around a value "
            "with '=', spaces, commas or letters beyond a to z in it"
        ) from None
    except MissingConfigException as error:
        group, _, name = (error.missing_cfg_file or "").rpartition("/")
        raise unknown(group or "--config-name", name, error.options or _options(group)) from None
    except (HydraException, OmegaConfBaseException) as error:
        cause = error.__cause__ if isinstance(error, HydraException) else error
        if isinstance(cause, (ConfigKeyError, ConfigAttributeError)) and isinstance(cause.parent_node, DictConfig):
            raise _unknown_key(cause) from None
        said = dict.fromkeys(_said(one) for one in (error, cause) if one is not None)
        raise UsageError(": ".join(said)) from None


def _parsed(overrides: Sequence[str]) -> list[Override]:
    """Hydra's reading of them; refused is what Hydra would take and then fail on without a word about it."""
    for line in overrides:
        if not _is_text(line):
            raise UsageError(f"override {line!r} holds bytes that are no text in this locale")
    parsed: list[Override] = OverridesParser.create().parse_overrides(list(overrides))
    for override in parsed:
        line, key = override.input_line or "", override.key_or_group
        options = _options(key)
        if options and not override.is_delete() and not override.is_sweep_override() and override.value() is None:
            raise unknown(key, "null", options)
        if override.value_type is ValueType.GLOB_CHOICE_SWEEP and not options:
            raise UsageError(f"{line}: glob() picks options of a group, and {key} is none; write the values")
    return parsed


def _options(group: str) -> list[str]:
    return sorted(path.stem for path in (config_dir() / group).glob("*.yaml"))


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _prepare(override: Override, multirun: bool) -> str:
    line, key = override.input_line or "", override.get_key_element()
    if override.key_or_group == "gpus" and isinstance(override.value(), int):
        return f"{key}='{override.value()}'"
    if not override.is_discrete_sweep() or override.value_type is ValueType.GLOB_CHOICE_SWEEP:
        return line
    values = list(override.sweep_string_iterator())
    if override.key_or_group == "gpus":
        return f"{key}={','.join(repr(value) for value in values)}"
    if override.key_or_group not in _FOLDED:
        return line
    if not multirun:
        raise UsageError(f"{line} is a sweep: add -m, or write '{key}=[{','.join(values)}]'")
    return f"{key}=[{','.join(values)}]"


def _unknown_key(error: OmegaConfBaseException) -> UsageError:
    parent = error.parent_node
    assert isinstance(parent, DictConfig)
    allowed = [str(key) for key in parent]
    full_key = str(error.full_key or error.key)
    prefix = full_key.rpartition(".")[0]
    near = get_close_matches(str(error.key), allowed, 1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    where = f"below {prefix}" if prefix else "at the top"
    return UsageError(f"key {full_key!r} is unknown; {hint}allowed {where}: {', '.join(sorted(allowed))}")


def _said(error: BaseException) -> str:
    """The message in one line, with the key that it is about, without the classes behind it."""
    text, _, rest = str(error).partition("full_key:")
    key = rest.split()[0] if rest.split() else ""
    said = " ".join(text.split())
    return said if not key or key in said else f"{key}: {said}"

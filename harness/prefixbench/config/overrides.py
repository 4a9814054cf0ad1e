"""Hydra's override grammar: folding sweeps that one server can serve, and its errors in one line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches

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
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    return [_prepare(override, multirun) for override in parsed]


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
            "with '=', spaces or commas in it"
        ) from None
    except MissingConfigException as error:
        group, _, name = (error.missing_cfg_file or "").rpartition("/")
        options = error.options or [path.stem for path in (config_dir() / group).glob("*.yaml")]
        raise unknown(group, name, options) from None
    except (HydraException, OmegaConfBaseException) as error:
        cause = error.__cause__ if isinstance(error, HydraException) else error
        if isinstance(cause, (ConfigKeyError, ConfigAttributeError)) and isinstance(cause.parent_node, DictConfig):
            raise _unknown_key(cause) from None
        raise UsageError(_flat(error) if cause is None else f"{_flat(error)}: {_flat(cause)}") from None


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


def _flat(error: BaseException) -> str:
    return " ".join(str(error).split())

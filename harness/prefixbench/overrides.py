"""Hydra's override grammar: folding sweeps that one server can serve, and its errors in one line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, ValueType
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from prefixbench.config import AXES
from prefixbench.errors import BenchError, UsageError
from prefixbench.hints import unknown

_FOLDED = (*AXES, "path")


def fold(overrides: Sequence[str]) -> list[str]:
    """`prefix_len=512,2048` becomes `prefix_len=[512,2048]` for what one server measures; the rest stays as it is."""
    return [_fold(override) for override in OverridesParser.create().parse_overrides(list(overrides))]


def quoted(text: str) -> str:
    """`text` as one value of Hydra's grammar, whatever it contains."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'").replace("${", "\\${")
    return f"'{escaped}'"


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turns Hydra's and OmegaConf's errors into one UsageError line that says what is allowed."""
    try:
        yield
    except BenchError:
        raise
    except MissingConfigException as error:
        group, _, name = (error.missing_cfg_file or "").rpartition("/")
        if error.options is None:
            raise UsageError(_flat(error)) from None
        raise unknown(group, name, error.options) from None
    except (HydraException, OmegaConfBaseException) as error:
        cause = error.__cause__ if isinstance(error, HydraException) else error
        if isinstance(cause, (ConfigKeyError, ConfigAttributeError)) and isinstance(cause.parent_node, DictConfig):
            raise _unknown_key(cause) from None
        raise UsageError(_flat(error)) from None


def _fold(override: Override) -> str:
    line = override.input_line or ""
    is_listed = override.is_discrete_sweep() and override.value_type is not ValueType.GLOB_CHOICE_SWEEP
    if override.key_or_group not in _FOLDED or not is_listed:
        return line
    return f"{override.get_key_element()}=[{','.join(override.sweep_string_iterator())}]"


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


def _flat(error: Exception) -> str:
    return " ".join(str(error).split())

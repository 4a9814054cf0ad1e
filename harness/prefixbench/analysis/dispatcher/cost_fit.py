"""Fits the dispatcher's cost model to timed cells: robust least squares on logarithms, so all cells weigh alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from prefixbench.analysis.dispatcher.timed_cells import TimedCell
from prefixbench.errors import UsageError
from prefixonce.cost import CONSERVATIVE, Profile, SharedCost, StockCost
from prefixonce.step import Path

Array = npt.NDArray[np.float64]

PATHS = (Path.STOCK, Path.CASCADE, Path.DENSE)
FEWEST_CELLS = 12
"""Cells with all paths; the model has ten parameters, and each cell gives three times."""

# Where the search starts, on a large GPU of today; a slower device shifts all of them alike.
_START = replace(
    CONSERVATIVE,
    memory_bytes_per_us=4e6,
    stock=StockCost(launch_us=8.0, row_us=0.02, reread_bytes_per_us=10e6),
    shared=SharedCost(
        launch_us=10.0,
        row_us=0.01,
        split_us=0.1,
        partial_bytes_per_us=6e6,
        cascade_flops_per_us=600e6,
        dense_flops_per_us=700e6,
    ),
)
_OUTLIER = 0.05  # log error from which a cell pulls less than its square
_HOLD = 0.02  # keeps a parameter that no cell depends on near its start


@dataclass(frozen=True)
class Residuals:
    """Relative errors of the fitted times of one path: |predicted / measured - 1|."""

    median: float
    p95: float
    largest: float


@dataclass(frozen=True)
class Fitted:
    profile: Profile
    residuals: Mapping[Path, Residuals]
    cells: int


def fit(cells: Sequence[TimedCell], known: Profile) -> Fitted:
    """`known` gives what is not fitted (device, source, processors, tile_rows); UsageError for too few cells."""
    complete = [cell for cell in cells if cell.is_complete]
    if len(complete) < FEWEST_CELLS:
        raise UsageError(
            f"{len(complete)} cells were timed with stock, cascade and dense; a fit needs at least {FEWEST_CELLS}"
        )
    measured = np.log([[cell.us[path] for path in PATHS] for cell in complete])

    def errors(vector: Array) -> Array:
        difference: Array = _log_us(_profile(vector, known), complete) - measured
        return difference

    unscaled = _vector(_START)
    start = unscaled - float(np.median(errors(unscaled))) * np.where(_IS_RATE, -1.0, 1.0)

    def held_errors(vector: Array) -> Array:
        return np.concatenate([errors(vector).ravel(), _HOLD * (vector - start)])

    solved = least_squares(held_errors, start, loss="soft_l1", f_scale=_OUTLIER)
    relative = np.abs(np.expm1(errors(solved.x)))
    residuals = {
        path: Residuals(float(np.median(column)), float(np.quantile(column, 0.95)), float(column.max()))
        for path, column in zip(PATHS, relative.T, strict=True)
    }
    return Fitted(_profile(solved.x, known), residuals, len(complete))


def _log_us(profile: Profile, cells: Sequence[TimedCell]) -> Array:
    """[cells, paths]"""
    return np.log([[profile.layer_us(cell.layer, path) for path in PATHS] for cell in cells])


_IS_RATE = np.array(
    [
        name.endswith("_per_us")
        for name in ("memory_bytes_per_us", *(f.name for f in (*fields(StockCost), *fields(SharedCost))))
    ]
)


def _vector(profile: Profile) -> Array:
    return np.log([profile.memory_bytes_per_us, *astuple(profile.stock), *astuple(profile.shared)])


def _profile(vector: Array, known: Profile) -> Profile:
    memory, *rest = np.exp(vector).tolist()
    stock = len(fields(StockCost))
    return replace(known, memory_bytes_per_us=memory, stock=StockCost(*rest[:stock]), shared=SharedCost(*rest[stock:]))

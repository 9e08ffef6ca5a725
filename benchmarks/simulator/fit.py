"""The cost model of an engine, from its trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.errors import InvalidArgumentError
from quire.plan.cost import CostModel


def fit(records: Sequence[dict[str, Any]]) -> CostModel:
    """The model (with `weights_s` 0) that comes closest to the steps of a recorded trace.

    Least squares, with no negative cost.

    Raises:
        InvalidArgumentError: fewer than ten steps with rows.
    """
    steps = [record for record in records if record.get("scheduled") and "end" in record]
    if len(steps) < 10:
        raise InvalidArgumentError("trace", f"a fit needs ten steps at least, there are {len(steps)}")
    features = np.array([_features(record) for record in steps], dtype=np.float64)
    seconds = np.array([record["end"] - record["time"] for record in steps])
    base, prefill, decode, cached, pairs = _least_squares(features, seconds)
    return CostModel(base, 0.0, prefill, decode, cached, pairs)


def _features(record: dict[str, Any]) -> tuple[float, ...]:
    """Numbers of a recorded step that the costs are multiplied with: 1, prefill tokens, decode rows, cached
    tokens, pairs."""
    rows = [row[1:3] for row in record["scheduled"]]
    units = (
        CostModel(base_s=1.0),
        CostModel(prefill_token_s=1.0),
        CostModel(decode_row_s=1.0),
        CostModel(kv_token_s=1.0),
        CostModel(pair_s=1.0),
    )
    return tuple(unit.seconds(rows) for unit in units)


def _least_squares(features: npt.NDArray[np.float64], target: npt.NDArray[np.float64]) -> list[float]:
    """Coefficients >= 0; columns that would be negative are dropped, the most negative first."""
    scale = features.max(axis=0)
    columns = [index for index in range(features.shape[1]) if scale[index] > 0]
    while columns:
        chosen = features[:, columns] / scale[columns]
        solution = np.linalg.lstsq(chosen, target, rcond=None)[0]
        worst = int(solution.argmin())
        if solution[worst] >= 0:
            break
        del columns[worst]
    coefficients = [0.0] * features.shape[1]
    for index, value in zip(columns, solution if columns else (), strict=True):
        coefficients[index] = float(value / scale[index])
    return coefficients

"""Each family of models gives transformers' answers in each way of computing that docs/families.md says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.family_matrix import COLUMNS, ROWS, Family, cell, stated


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_a_family_in_each_way(name: str, tmp_path: Path) -> None:
    family = Family(name, tmp_path)
    assert {column: cell(family, column) for column in COLUMNS} == stated()[name]


def test_the_page_has_each_family_and_way() -> None:
    page = stated()
    assert tuple(page) == ROWS
    for cells in page.values():
        assert tuple(cells) == tuple(COLUMNS)
        assert set(cells.values()) <= {"equal", "close", "refused", "attention"}


@pytest.mark.parametrize("inner", [128, 104])
@pytest.mark.parametrize("name", ["phi3", "glm"])
def test_adapters_of_gate_and_up_in_one_tensor(name: str, inner: int, tmp_path: Path) -> None:
    """Also where the kernels' blocks of 16 do not divide the inner size."""
    family = Family(name, tmp_path, intermediate_size=inner)
    family.check_adapter(["gate_up_proj"])

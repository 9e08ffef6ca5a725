"""Which device an instance's engine sees: Triton's `instance_group` decides."""

from __future__ import annotations

import pytest

from quire.config import EngineConfig
from quire.triton.config_completion import visible_device, with_instance_kind

INSTANCE = {"model_instance_kind": "GPU", "model_instance_device_id": "1"}


@pytest.mark.row("F6")
@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, "1"), ("", "1"), ("2,5", "5"), (" GPU-aa , GPU-bb ", "GPU-bb")],
)
def test_an_instance_on_a_gpu_sees_the_servers_device_of_its_number(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, expected: str
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_device(INSTANCE) == {"CUDA_VISIBLE_DEVICES": expected}
    for kind in ("CPU", "MODEL", "AUTO"):
        assert visible_device(INSTANCE | {"model_instance_kind": kind}) == {}


@pytest.mark.row("F6")
@pytest.mark.parametrize(
    ("kind", "device"), [("GPU", "cuda"), ("CPU", "cpu"), ("AUTO", "auto"), ("MODEL", "auto")]
)
def test_the_kind_decides_where_the_configuration_does_not(kind: str, device: str) -> None:
    instance = INSTANCE | {"model_instance_kind": kind}
    config = EngineConfig.from_mapping({"model": "m"})
    assert with_instance_kind(config, instance).model.device == device
    fixed = EngineConfig.from_mapping({"model": "m", "device": "cpu"})
    assert with_instance_kind(fixed, instance).model.device == "cpu"

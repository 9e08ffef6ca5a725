"""TritonPythonModel.initialize."""

from __future__ import annotations

import pytest

from quire.errors import ConfigError
from tests.fixtures import fake_pb_utils

fake_pb_utils.install()

from quire.triton import frontend  # noqa: E402


class Supervisor:
    """Of an engine that has begun."""

    closed = False

    def close(self, timeout_s: float) -> None:
        self.closed = True


@pytest.mark.parametrize("error", [ConfigError("a limit"), RuntimeError("a library's"), KeyboardInterrupt()])
def test_an_engine_that_has_begun_in_vain_is_taken_back(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever keeps its frontend from being served: it held its memory for a minute, and its directory."""
    supervisor, model = Supervisor(), frontend.TritonPythonModel()

    def fail(self: frontend.TritonPythonModel, args: dict[str, str]) -> None:
        self._supervisor = supervisor  # type: ignore[assignment]
        raise error

    monkeypatch.setattr(frontend.TritonPythonModel, "_initialize", fail)
    monkeypatch.setattr("quire_common.logs.set_up", lambda name: None)
    monkeypatch.setattr(frontend.TritonPythonModel, "_watchdog", lambda self: None)
    told = fake_pb_utils.TritonModelException if isinstance(error, ConfigError) else type(error)
    with pytest.raises(told, match="quire: m: a limit" if isinstance(error, ConfigError) else None):
        model.initialize({"model_name": "m", "model_instance_name": "m_0"})
    assert supervisor.closed

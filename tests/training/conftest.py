import pytest
import torch


@pytest.fixture(autouse=True)
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit comparisons are made where kernels are deterministic."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

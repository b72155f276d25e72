"""Products of half-precision rows are float32 with every torch, also one without `out_dtype`."""

from __future__ import annotations

import pytest
import torch
from claimed_device import ClaimedDevices, ClaimedTensor, real

from pipeline.passes.gradient import gram


@pytest.mark.parametrize("names", [["default", "out", "dtype", "dtype_out"], ["default", "out"]], ids=["2.8", "2.6"])
def test_half_precision_products_are_float32(names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.aten.bmm, "_overload_names", names)
    rows = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0)).bfloat16()
    with ClaimedDevices(cuda=True) as devices:
        product = gram(ClaimedTensor(rows, torch.device("meta", 0)))
    assert ("aten.bmm.dtype" in devices.operations) == ("dtype" in names)
    assert product.dtype == torch.float32
    torch.testing.assert_close(real(product), torch.bmm(rows.float(), rows.float().mT))

"""Masking by Triton == plain torch: cropped, padded, cast, strided, with gradients."""

import pytest
import torch

from mrconv.ops import mask_positions
from mrconv.ops.masking.op import mask_positions_reference

from ..conftest import gradients
from .helpers import DEVICE, double

pytest.importorskip("triton")


@pytest.mark.parametrize(("L", "length"), [(1, 1), (63, 63), (70, 33), (33, 70)])
@pytest.mark.parametrize("transposed", [False, True])
def test_positions_are_masked(L, length, transposed):
    x, lengths = double(3, L, 70), torch.tensor([L, 0, L // 2])
    x = x.transpose(1, 2).contiguous().transpose(1, 2) if transposed else x
    y, (dx,) = gradients(lambda x: mask_positions(x, lengths.to(DEVICE), length), x.to(DEVICE))
    z, (dz,) = gradients(lambda x: mask_positions_reference(x, lengths, length, x.dtype), x)
    assert torch.equal(y.cpu(), z)
    assert torch.equal(dx.cpu(), dz)


def test_masking_casts():
    x, lengths = torch.randn(2, 9, 5).bfloat16().float().to(DEVICE), torch.tensor([9, 4], device=DEVICE)
    assert torch.equal(mask_positions(x, lengths, 7, torch.bfloat16), mask_positions(x, lengths, 7).bfloat16())
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    arguments = (x.requires_grad_(), lengths, 7, torch.bfloat16)
    torch.library.opcheck(torch.ops.mrconv.mask_positions.default, arguments, test_utils=checks)

"""The parameter counts that the paper prints for its baselines, with the settings that give them."""

import pytest

from mrconv import SequenceClassifier
from mrconv.baselines import S4, LiquidS4

LISTOPS = {"vocab_size": 18, "n_classes": 10, "l_max": 2048}
IMAGE = {"d_input": 1, "n_classes": 10, "l_max": 1024, "d_model": 512, "depth": 6}


@pytest.mark.parametrize(
    ("cls", "model", "options", "count", "printed"),
    [
        # S4's public ListOps configuration of version 4 is 6 x 256, not 8 x 128
        (S4, LISTOPS | {"d_model": 256, "depth": 6}, {"d_state": 4, "bidirectional": True}, 815_186, "815K"),
        (S4, IMAGE, {"d_state": 64, "bidirectional": True}, 3_564_682, "3.6M"),
        # d_state is 7 in the authors' configuration, of which their code keeps 3 conjugate pairs
        (LiquidS4, LISTOPS | {"d_model": 128, "depth": 9, "prenorm": True}, {"d_state": 6}, 333_322, "333K"),
        (
            LiquidS4,
            IMAGE | {"block_norm": "layer"},
            {"d_state": 512, "bidirectional": True},
            11_034_634,
            "11M",
        ),
    ],
)
def test_stack_has_the_printed_number_of_parameters(cls, model, options, count, printed):
    stack = SequenceClassifier(**model, device="meta")
    for block in stack.backbone.blocks:
        block.layer = cls(model["d_model"], model["l_max"], **options, device="meta")
    parameters = sum(p.numel() for p in stack.parameters())
    assert parameters == count
    unit = {"K": 1e3, "M": 1e6}[printed[-1]]
    digits = len(printed.partition(".")[2]) - 1 if "." in printed else 0
    assert f"{parameters / unit:.{digits}f}{printed[-1]}" == printed

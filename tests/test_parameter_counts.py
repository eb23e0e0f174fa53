"""The paper's parameter counts, exactly."""

import pytest

from mrconv import SequenceClassifier

LISTOPS = {"vocab_size": 18, "d_model": 128, "depth": 8, "l_max": 2048, "kernel": "fourier", "kernel_size": 1}
IMAGE = {"d_input": 1, "d_model": 512, "depth": 6, "l_max": 1024, "block_norm": "layer"}
FOURIER = {"kernel": "fourier", "kernel_size": 32}
DILATED = {"kernel": "dilated", "kernel_size": 8, "d_input": 3}


@pytest.mark.parametrize(
    ("options", "count"),
    [
        (LISTOPS | {"norm": "scale"}, 307_722),
        (LISTOPS, 332_298),
        (LISTOPS | {"depth": 16}, 661_002),
        (LISTOPS | {"kernel": "dense", "kernel_size": 2048}, 2_368_010),
        (LISTOPS | {"kernel": "dense", "norm": "scale"}, 4_476_426),
        (IMAGE | FOURIER, 3_849_226),
        (IMAGE | FOURIER | {"depth": 12}, 7_692_298),
        (IMAGE | {"kernel": "dense", "kernel_size": 1024}, 6_312_970),
        (IMAGE | {"kernel": "dense", "kernel_size": 32, "norm": "scale"}, 9_378_826),
        (IMAGE | DILATED, 3_438_602),
        (IMAGE | DILATED | {"depth": 8}, 4_582_410),
        (IMAGE | DILATED | {"depth": 10}, 5_726_218),
    ],
)
def test_parameter_counts_match_the_paper(options, count):
    model = SequenceClassifier(n_classes=10, device="meta", **options)
    assert sum(p.numel() for p in model.parameters()) == count

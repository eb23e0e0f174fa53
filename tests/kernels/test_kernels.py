"""Kernel parameterisations: energy, lengths, positions, resampling, registry."""

import pytest
import torch

from mrconv import MRConv
from mrconv.branches import resolution_lengths
from mrconv.kernels import Kernel, kernel_class, kernel_names, register_kernel

KINDS = ["dense", "dilated", "fourier", "sparse", "fourier+sparse"]


def make(kind, lengths, kernel_size, channels=512, **kwargs):
    return kernel_class(kind)(channels, lengths, kernel_size, dtype=torch.float64, **kwargs)


def test_the_five_kinds_are_registered():
    assert set(KINDS) <= set(kernel_names())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kernel_size", [1, 2, 3, 8, 33])
def test_every_branch_starts_with_unit_energy_at_any_length(kind, kernel_size):
    lengths = [kernel_size << i for i in range(6)]
    for kernel, length in zip(make(kind, lengths, kernel_size, channels=2000)(), lengths, strict=True):
        if kernel.shape[1] == 1:  # constant
            kernel = kernel.expand(-1, length if kind == "fourier" else 1)
        assert kernel.square().sum(1).mean().item() == pytest.approx(1, rel=0.15)


@pytest.mark.parametrize("kind", ["dense", "fourier", "fourier+sparse"])
def test_dense_kernels_have_the_length_of_their_resolution(kind):
    assert [k.shape for k in make(kind, (3, 6, 12), 3, channels=5)()] == [(5, 3), (5, 6), (5, 12)]


def test_dilated_taps_are_spread_over_the_length():
    assert make("dilated", (4, 8, 16), 4).positions == ((0, 1, 2, 3), (0, 2, 4, 6), (0, 4, 8, 12))


def test_sparse_positions_are_distinct_seeded_and_saved():
    a, same, other = (make("sparse", (8, 16, 64), 8, seed=s) for s in (1, 1, 2))
    assert a.positions == same.positions != other.positions
    assert a.positions[0] == tuple(range(8))
    for positions, length in zip(a.positions, a.lengths, strict=True):
        assert len(set(positions)) == 8
        assert 0 <= min(positions) <= max(positions) < length
    other.load_state_dict(a.state_dict())
    assert other.positions == a.positions
    assert torch.equal(other.index, a.index)


def test_every_direction_and_layer_draws_different_positions():
    layers = [MRConv(2, 256, kernel="sparse", kernel_size=4, bidirectional=True) for _ in range(2)]
    drawn = {branches.kernel.positions for layer in layers for branches in layer.branches}
    assert len(drawn) == 4
    first, again = (MRConv(2, 256, kernel="sparse", kernel_size=4, seed=3) for _ in range(2))
    assert first.branches[0].kernel.positions == again.branches[0].kernel.positions


def test_fourier_is_the_orthonormal_inverse_fft_of_its_modes():
    kernel = make("fourier", (4, 8, 16), 4, channels=3)
    for modes, k, n in zip(kernel.modes, kernel(), kernel.lengths, strict=True):
        expected = torch.fft.irfft(torch.view_as_complex(modes.detach()), n, norm="ortho")
        assert torch.allclose(k, expected, atol=1e-14)


def test_fourier_sparse_is_the_rescaled_sum():
    kernel = make("fourier+sparse", (4, 8), 4, channels=3)
    torch.nn.init.normal_(kernel.beta)
    for i, k in enumerate(kernel()):
        dense = torch.zeros(3, kernel.lengths[i], dtype=torch.float64)
        dense[:, list(kernel.sparse.positions[i])] = kernel.sparse()[i]
        expected = kernel.beta[0, i, :, None] * kernel.fourier()[i] + kernel.beta[1, i, :, None] * dense
        assert torch.allclose(k, expected, atol=1e-14)


def test_upsampled_fourier_kernels_pass_through_their_taps():
    kernel = make("fourier", (6, 12), 6, channels=3)
    for coarse, fine in zip(kernel(), kernel(rate=2.0), strict=True):
        assert torch.allclose(fine[:, ::2] * 2, coarse, atol=1e-13)


def test_delayed_fourier_kernels_are_sampled_later():
    kernel = make("fourier", (6, 12, 24), 6, channels=3)
    assert torch.allclose(kernel(rate=0.5, delay=1.0)[2] / 2, kernel()[2][:, 1::2], atol=1e-13)
    assert torch.allclose(kernel(rate=0.5)[2] / 2, kernel()[2][:, ::2], atol=1e-13)


@pytest.mark.parametrize(
    ("l_max", "kernel_size", "combine", "lengths"),
    [
        (8, 1, "sum", [1, 2, 4, 8]),
        (9, 1, "sum", [1, 2, 4, 8, 16]),
        (8, 8, "sum", [8]),
        (49, 28, "sum", [28, 56]),
        (8, 1, "concat", [1, 1, 2, 4]),
        (9, 2, "concat", [2, 2, 4, 8]),
    ],
)
def test_resolutions_double_until_they_cover_l_max(l_max, kernel_size, combine, lengths):
    assert resolution_lengths(l_max, kernel_size, combine) == lengths
    assert MRConv(2, l_max, kernel_size=kernel_size, combine=combine).resolutions == len(lengths)


def test_an_unknown_kernel_raises_with_the_closest_name():
    with pytest.raises(ValueError, match=r"kernel must be one of .*fourier.*'fouier'.*did you mean 'fourier'"):
        MRConv(2, 8, kernel="fouier")


def test_registering_a_taken_name_raises():
    with pytest.raises(ValueError, match="'fourier' is taken"):

        @register_kernel("fourier")
        class Other(Kernel):
            pass

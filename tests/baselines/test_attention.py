"""Self-attention equals the softmax formula, by steps and at once; rotary positions are relative."""

import math

import pytest
import torch
from torch.nn import functional as F

from mrconv.baselines.transformer import Attention, key_mask, rotate

from ..conftest import relative
from .helpers import assert_gradients_are_right, assert_padding_is_absent, change_before, stepped

D, L_MAX = 8, 33
KINDS = [(positions, bidirectional) for positions in ("rotary", "learned", "none") for bidirectional in (False, True)]


def attention(positions="rotary", bidirectional=False, n_heads=2, l_max=L_MAX):
    return Attention(
        D, l_max, n_heads=n_heads, positions=positions, bidirectional=bidirectional, dtype=torch.float64
    ).eval()


def by_formula(mixer, u):
    """Compute attention head by head and query by query."""
    if mixer.embedding is not None:
        u = u + mixer.embedding[: u.shape[1]]
    E, outputs = D // mixer.n_heads, []
    for q, k, v in zip(*(x.split(E, -1) for x in mixer.qkv(u).chunk(3, -1)), strict=True):
        if mixer.positions == "rotary":
            q, k = rotate(q), rotate(k)
        head = []
        for t in range(u.shape[1]):
            visible = u.shape[1] if mixer.bidirectional else t + 1
            weights = torch.exp((k[:, :visible] @ q[:, t, :, None])[..., 0] / math.sqrt(E))
            weights = weights / weights.sum(1, keepdim=True)
            head.append((weights[..., None] * v[:, :visible]).sum(1))
        outputs.append(torch.stack(head, 1))
    return mixer.out(torch.cat(outputs, -1))


@pytest.mark.parametrize(("positions", "bidirectional"), KINDS)
@pytest.mark.parametrize("L", [1, 2, 17, 33])
@torch.no_grad()
def test_attention_equals_the_softmax_formula(positions, bidirectional, L):
    mixer, u = attention(positions, bidirectional), torch.randn(2, L, D, dtype=torch.float64)
    assert relative(mixer(u), by_formula(mixer, u)) < 1e-13
    assert torch.equal(mixer(u, gelu=True), F.gelu(mixer(u)))


@pytest.mark.parametrize("positions", ["rotary", "learned", "none"])
@torch.no_grad()
def test_steps_equal_forward(positions):
    mixer, u = attention(positions), torch.randn(2, 19, D, dtype=torch.float64)
    y, state = stepped(mixer, u)
    assert relative(y, mixer(u)) < 1e-13
    assert state.cache.time == 19
    assert state.cache.keys.shape[-2] < 2 * 19


@torch.no_grad()
def test_rotary_scores_depend_on_the_distance_only():
    for E in (2, 6, 7):
        q, k = torch.randn(2, 3, 11, E, dtype=torch.float64)
        scores = rotate(q) @ rotate(k).mT
        for start in (1, 5, 1000):
            assert relative(rotate(q, start) @ rotate(k, start).mT, scores) < 1e-12
        assert relative(rotate(q, 3) @ rotate(k).mT, scores) > 1e-2
        assert relative(rotate(q).norm(dim=-1), q.norm(dim=-1)) < 1e-14


@torch.no_grad()
def test_rotary_positions_are_invariant_to_a_shift_of_the_sequence():
    mixer, u = attention(), torch.randn(2, 9, D, dtype=torch.float64)
    q, k, v = mixer.project(u, 40, 1.0)
    y = mixer.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
    assert relative(y, mixer(u)) < 1e-13


@pytest.mark.parametrize("bidirectional", [False, True])
@torch.no_grad()
def test_scores_at_half_the_rate_are_those_of_every_second_sample(bidirectional):
    mixer, u = attention(bidirectional=bidirectional), torch.randn(2, 9, D, dtype=torch.float64)
    q, k, _ = mixer.project(u, 0, 0.5)
    slow = q @ k.mT
    q, k, _ = mixer.project(torch.randn(2, 18, D, dtype=u.dtype).index_copy(1, torch.arange(0, 18, 2), u), 0, 1.0)
    assert relative(slow, (q @ k.mT)[..., ::2, ::2]) < 1e-12
    assert relative(mixer(u, rate=0.5), mixer(u)) > 1e-3
    if not bidirectional:
        assert relative(stepped(mixer, u, 0.5)[0], mixer(u, rate=0.5)) < 1e-12


@pytest.mark.parametrize("bidirectional", [False, True])
def test_outputs_depend_on_later_inputs_only_if_bidirectional(bidirectional):
    change = change_before(attention(bidirectional=bidirectional), torch.randn(1, 12, D, dtype=torch.float64), 7)
    assert change > 1e-3 if bidirectional else change < 1e-14


@pytest.mark.parametrize(("positions", "bidirectional"), KINDS)
def test_padding_is_treated_as_absent(positions, bidirectional):
    mixer = attention(positions, bidirectional)
    u = torch.randn(4, 15, D, dtype=torch.float64)
    lengths = torch.tensor([15, 8, 1, 0])
    assert_padding_is_absent(mixer, u, lengths, 1e-13)


def test_the_first_key_of_a_chunk_is_always_visible():
    assert key_mask(torch.tensor([0, 3]), 4, 2).tolist() == [[True, False, True, False], [True, True, True, False]]


@pytest.mark.parametrize("bidirectional", [False, True])
def test_gradients(bidirectional):
    mixer, u = attention(bidirectional=bidirectional), torch.randn(2, 5, D, dtype=torch.float64)
    assert_gradients_are_right(mixer, u, torch.tensor([5, 3]), fast_mode=True)


@torch.no_grad()
def test_state_dict_round_trip():
    mixer, other = attention("learned"), attention("learned")
    other.load_state_dict(mixer.state_dict())
    u = torch.randn(2, 9, D, dtype=torch.float64)
    assert torch.equal(mixer(u), other(u))


@torch.no_grad()
def test_half_precision_by_autocast_keeps_the_dtype():
    mixer, u = Attention(D, L_MAX, bidirectional=True), torch.randn(2, 9, D)
    with torch.autocast("cpu", torch.bfloat16):
        y = mixer(u, torch.tensor([9, 4]))
    assert y.dtype == torch.float32
    assert relative(y, mixer(u, torch.tensor([9, 4]))) < 0.02


def test_errors_name_the_argument():
    with pytest.raises(ValueError, match=r"n_heads must divide d_model = 8; got 3"):
        Attention(8, 4, n_heads=3)
    with pytest.raises(ValueError, match="n_heads must be an integer"):
        Attention(8, 4, n_heads=0)
    with pytest.raises(ValueError, match="positions must be one of rotary, learned, none; got 'sine'"):
        Attention(8, 4, positions="sine")
    with pytest.raises(ValueError, match=r"learned positions end at l_max = 4"):
        Attention(8, 4, positions="learned")(torch.randn(1, 5, 8))
    with pytest.raises(ValueError, match=r"rate=2"):
        Attention(8, 4, positions="learned")(torch.randn(1, 4, 8), rate=2.0)
    with pytest.raises(ValueError, match="lengths must lie in"):
        Attention(8, 4)(torch.randn(1, 4, 8), torch.tensor([5]))
    with pytest.raises(ValueError, match="bidirectional=True cannot stream"):
        Attention(8, 4, bidirectional=True).initial_state(1)

"""Self-attention == the softmax formula, step by step and all at once; rotary positions are relative."""

import math

import pytest
import torch
from torch.nn import functional as F

from mrconv.baselines.transformer import Attention, key_mask, rotate

from ..conftest import relative
from .helpers import assert_padding_is_absent

D, L_MAX = 8, 33
KINDS = [(positions, both) for positions in ("rotary", "learned", "none") for both in (False, True)]


def attention(positions="rotary", bidirectional=False, n_heads=2, l_max=L_MAX):
    return Attention(
        D, l_max, n_heads=n_heads, positions=positions, bidirectional=bidirectional, dtype=torch.float64
    ).eval()


def by_formula(mixer, u):
    """One head and one query after the other."""
    if mixer.embedding is not None:
        u = u + mixer.embedding[: u.shape[1]]
    E, outputs = D // mixer.n_heads, []
    for q, k, v in zip(*(x.split(E, -1) for x in mixer.qkv(u).chunk(3, -1)), strict=True):
        if mixer.positions == "rotary":
            q, k = rotate(q), rotate(k)
        rows = []
        for t in range(u.shape[1]):
            seen = u.shape[1] if mixer.bidirectional else t + 1
            weights = torch.exp((k[:, :seen] @ q[:, t, :, None])[..., 0] / math.sqrt(E))
            weights = weights / weights.sum(1, keepdim=True)
            rows.append((weights[..., None] * v[:, :seen]).sum(1))
        outputs.append(torch.stack(rows, 1))
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
def test_steps_equal_the_whole(positions):
    mixer, u = attention(positions), torch.randn(2, 19, D, dtype=torch.float64)
    state, outputs = mixer.initial_state(2), []
    for x in u.unbind(1):
        y, state = mixer.step(x, state)
        outputs.append(y)
    assert relative(torch.stack(outputs, 1), mixer(u)) < 1e-13
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
def test_a_shift_of_a_whole_sequence_changes_nothing_with_rotary_positions():
    mixer, u = attention(), torch.randn(2, 9, D, dtype=torch.float64)
    q, k, v = mixer.project(u, 40)
    y = mixer.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
    assert relative(y, mixer(u)) < 1e-13


@pytest.mark.parametrize("bidirectional", [False, True])
@torch.no_grad()
def test_the_future_is_seen_only_if_bidirectional(bidirectional):
    mixer, u = attention(bidirectional=bidirectional), torch.randn(1, 12, D, dtype=torch.float64)
    changed = u.clone()
    changed[:, 7:] += 1
    before = relative(mixer(changed)[:, :7], mixer(u)[:, :7])
    assert before > 1e-3 if bidirectional else before < 1e-14


@pytest.mark.parametrize(("positions", "bidirectional"), KINDS)
def test_padding_is_as_if_absent(positions, bidirectional):
    mixer = attention(positions, bidirectional)
    u = torch.randn(4, 15, D, dtype=torch.float64)
    lengths = torch.tensor([15, 8, 1, 0])
    assert_padding_is_absent(mixer, u, lengths, 1e-13)


def test_a_first_key_is_always_seen():
    assert key_mask(torch.tensor([0, 3]), 4, 2).tolist() == [[True, False, True, False], [True, True, True, False]]


@pytest.mark.parametrize("bidirectional", [False, True])
def test_gradients(bidirectional):
    mixer = attention(bidirectional=bidirectional)
    u = torch.randn(2, 5, D, dtype=torch.float64, requires_grad=True)
    names = list(dict(mixer.named_parameters()))

    def f(u, *values):
        return torch.func.functional_call(mixer, dict(zip(names, values, strict=True)), (u, torch.tensor([5, 3])))

    assert torch.autograd.gradcheck(f, (u, *mixer.parameters()), fast_mode=True)


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


def test_mistakes_are_named():
    with pytest.raises(ValueError, match=r"n_heads must divide d_model = 8; got 3"):
        Attention(8, 4, n_heads=3)
    with pytest.raises(ValueError, match="n_heads must be an integer"):
        Attention(8, 4, n_heads=0)
    with pytest.raises(ValueError, match="positions must be one of rotary, learned, none; got 'sine'"):
        Attention(8, 4, positions="sine")
    with pytest.raises(ValueError, match=r"learned positions end at l_max = 4"):
        Attention(8, 4, positions="learned")(torch.randn(1, 5, 8))
    with pytest.raises(ValueError, match=r"rate=2"):
        Attention(8, 4)(torch.randn(1, 4, 8), rate=2.0)
    with pytest.raises(ValueError, match="lengths must lie in"):
        Attention(8, 4)(torch.randn(1, 4, 8), torch.tensor([5]))
    both = Attention(8, 4, bidirectional=True)
    with pytest.raises(ValueError, match="bidirectional=True cannot stream"):
        both.initial_state(1)

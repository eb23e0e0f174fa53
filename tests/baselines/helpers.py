"""Checks that the tests of several mixers share."""

import math

import torch

from ..conftest import relative


def assert_padding_is_absent(mixer, u, lengths, tolerance):
    """Check that NaN past `lengths` changes no output, is zero in it, and leaves all gradients finite; changes u."""
    for i, n in enumerate(lengths.tolist()):
        u[i, n:] = math.nan
    u.requires_grad_()
    y = mixer(u, lengths)
    for i, n in enumerate(lengths.tolist()):
        assert not y[i, n:].any()
        if n:
            assert relative(y[i : i + 1, :n], mixer(u[i : i + 1, :n])) < tolerance
    y.square().sum().backward()
    assert u.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in mixer.parameters())


def assert_gradients_are_right(mixer, u, *args, **options):
    """Compare the gradients of the input and of every parameter with finite differences."""
    names = [name for name, _ in mixer.named_parameters()]
    parameters = [p.detach().clone().requires_grad_() for p in mixer.parameters()]

    def f(u, *values):
        return torch.func.functional_call(mixer, dict(zip(names, values, strict=True)), (u, *args))

    assert torch.autograd.gradcheck(f, (u.requires_grad_(), *parameters), **options)


@torch.no_grad()
def change_before(mixer, u, start):
    """Return the relative change of the outputs before `start` when the inputs from `start` on change."""
    changed = u.clone()
    changed[:, start:] += 1
    return relative(mixer(changed)[:, :start], mixer(u)[:, :start])


def stepped(mixer, u, rate=None):
    """Return the outputs for u (B, L, D) from one `step` per position, and the last state."""
    state, outputs = mixer.initial_state(u.shape[0], rate=rate), []
    for x in u.unbind(1):
        y, state = mixer.step(x, state)
        outputs.append(y)
    return torch.stack(outputs, 1), state

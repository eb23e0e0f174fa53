"""What the tests of several mixers ask alike."""

import math

from ..conftest import relative


def assert_padding_is_absent(mixer, u, lengths, tolerance):
    """Check that NaN past `lengths` changes no output, is zero in it, and leaves all gradients finite; u is changed."""
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

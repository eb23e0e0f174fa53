"""Random configurations: build, run, train a step, merge, compare."""

import copy

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mrconv import MRConv, param_groups

from .conftest import randomise, relative, training_step

KINDS = ["dense", "dilated", "fourier", "sparse", "fourier+sparse"]


@st.composite
def configurations(draw):
    l_max = draw(st.integers(1, 80))
    groups = draw(st.sampled_from([1, 2, 3]))
    combine = draw(st.sampled_from(["sum", "concat"]))
    return {
        "d_model": groups * draw(st.integers(1, 3)),
        "l_max": l_max,
        "kernel": draw(st.sampled_from(KINDS)),
        "kernel_size": draw(st.integers(1, l_max)),
        "bidirectional": draw(st.booleans()),
        "combine": combine,
        "decay": draw(st.sampled_from([None, 0.5, (1.0, 3.0)])) if combine == "concat" else None,
        "norm": draw(
            st.sampled_from([None, "scale", "none", "batch"] if combine == "sum" else [None, "scale", "none"])
        ),
        "heads": draw(st.integers(1, 2)),
        "groups": groups,
        "seed": draw(st.integers(0, 9)),
    }


@settings(max_examples=120, deadline=None, derandomize=True)
@given(configurations(), st.integers(1, 120), st.integers(2, 4), st.booleans(), st.integers(0, 99))
def test_any_layer_trains_like_the_reference_and_merges_exactly(options, L, B, masked, seed):
    torch.manual_seed(seed)
    layer = randomise(MRConv(**options, dtype=torch.float64))
    slow = copy.deepcopy(layer)
    slow.backend = "reference"
    u = torch.randn(B, L, options["d_model"], dtype=torch.float64)
    lengths = torch.randint(1, L + 1, (B,)) if masked else None
    if lengths is not None:
        lengths[0] = L
    y, du, grads = training_step(layer, u, lengths=lengths)
    y_ref, du_ref, grads_ref = training_step(slow, u, lengths=lengths)
    largest = max(1.0, *(g.norm().item() for g in grads_ref.values()))
    assert (y - y_ref).norm() <= 1e-8 * y_ref.norm().clamp(min=1)
    assert (du - du_ref).norm() < 1e-8 * largest
    assert all((grads[name] - g).norm() < 1e-8 * largest for name, g in grads_ref.items())

    for name, p in layer.named_parameters():
        p.grad = grads[name]
    torch.optim.SGD(param_groups(layer, lr=1e-3, weight_decay=0.01, kernel_lr=1e-3)).step()
    layer.eval()
    before = layer(u, lengths=lengths)
    merged = copy.deepcopy(layer).reparameterize()
    assert relative(merged(u, lengths=lengths), before) < 1e-11
    loaded = MRConv(**options | {"seed": 77}, merged=True, dtype=torch.float64)
    loaded.load_state_dict(merged.state_dict())
    assert torch.equal(loaded(u, lengths=lengths), merged(u, lengths=lengths))

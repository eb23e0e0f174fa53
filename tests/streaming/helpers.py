"""Layers for the streaming tests, and a function that streams a sequence in chunks."""

import itertools

import torch

from mrconv import MRConv

from ..conftest import randomise

CHUNKS = {"steps": (1,), "3": (3,), "7": (7,), "31": (31,), "64": (64,), "mixed": (1, 29, 70, 2, 150, 8, 33)}
L_MAX = 45
LAYERS = {
    "dense": {"kernel": "dense", "kernel_size": 4},
    "dilated": {"kernel": "dilated", "kernel_size": 4},
    "sparse": {"kernel": "sparse", "kernel_size": 4},
    "constant": {"kernel": "fourier", "kernel_size": 1},
    "fourier": {"kernel": "fourier", "kernel_size": 6},
    "odd fourier": {"kernel": "fourier", "kernel_size": 5},
    "fourier+sparse": {"kernel": "fourier+sparse", "kernel_size": 4},
    "one resolution": {"kernel": "fourier", "kernel_size": L_MAX},
    "no norm": {"kernel": "fourier", "kernel_size": 3, "norm": "none"},
    "scale": {"kernel": "fourier+sparse", "kernel_size": 3, "norm": "scale"},
    "heads and groups": {"kernel": "fourier+sparse", "kernel_size": 4, "heads": 3, "groups": 2},
    "dense, heads and groups": {"kernel": "dense", "kernel_size": 4, "heads": 3, "groups": 2},
    "dilated, heads and groups": {"kernel": "dilated", "kernel_size": 4, "heads": 2, "groups": 2},
    "dense concat": {"kernel": "dense", "kernel_size": 4, "combine": "concat"},
    "dilated concat": {"kernel": "dilated", "kernel_size": 4, "combine": "concat"},
    "fourier concat": {"kernel": "fourier", "kernel_size": 4, "combine": "concat"},
    "fourier+sparse concat": {"kernel": "fourier+sparse", "kernel_size": 4, "combine": "concat"},
    "decay": {"kernel": "fourier", "kernel_size": 4, "combine": "concat", "decay": (0.5, 2.0)},
    "lower rate": {"kernel": "fourier", "kernel_size": 4, "rate": 0.6},
    "higher rate": {"kernel": "fourier", "kernel_size": 4, "rate": 1.7, "combine": "concat"},
    "few modes": {"kernel": "fourier", "kernel_size": 1, "l_max": 150},  # kept by a merged layer
    "few modes concat": {
        "kernel": "fourier",
        "kernel_size": 2,
        "l_max": 320,
        "combine": "concat",
        "heads": 3,
        "groups": 2,
        "rate": 0.6,
    },
}


def build(name, merged=False, dtype=torch.float64, **options):
    layer = randomise(MRConv(4, dtype=dtype, **({"l_max": L_MAX} | LAYERS[name] | options))).eval()
    return layer.reparameterize() if merged else layer


def double(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def streamed(module, x, sizes, state=None):
    """Stream x in chunks of the given sizes, repeated, with `step` for size 1; return the outputs and the state."""
    state = module.initial_state(x.shape[0]) if state is None else state
    start, outputs, sizes = 0, [], itertools.cycle(sizes)
    while start < x.shape[1]:
        size = next(sizes)
        if size == 1:
            y, state = module.step(x[:, start], state)
            y = y[:, None]
        else:
            y, state = module.stream(x[:, start : start + size], state)
        outputs.append(y)
        start += size
    return torch.cat(outputs, 1), state


@torch.no_grad()
def greedy_continuation(model, prompt, count):
    """Return the `count` tokens that follow the prompt, each the most likely by the parallel form."""
    tokens = prompt
    for _ in range(count):
        tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], 1)
    return tokens[:, prompt.shape[1] :]

"""The paper's baselines as mixers, each with its equation.

`mixer_class(name)(d_model, l_max, **options)` builds one. It maps (B, L, d_model) to the same shape and takes MRConv's
arguments `lengths`, `rate` and `gelu`. Blocks and models take a mixer by name: `MRConvBlock(..., mixer=name)`.
"""

from ..mixers import Mixer, freeze, make_mixer, mixer_class, mixer_names, register_mixer
from .implicit import CKConv, HyenaFilter
from .liquid_s4 import LiquidS4
from .long_convolution import LongConvolution
from .longconv import LongConv
from .mamba import Mamba
from .mega import Mega, MegaChunk
from .mrhyena import MRConvAttention, MRHyena
from .multiresconv import MultiresConv
from .s4 import S4
from .s4d import S4D
from .s5 import S5
from .sgconv import SGConv
from .transformer import Attention

__all__ = [
    "S4",
    "S4D",
    "S5",
    "Attention",
    "CKConv",
    "HyenaFilter",
    "LiquidS4",
    "LongConv",
    "LongConvolution",
    "MRConvAttention",
    "MRHyena",
    "Mamba",
    "Mega",
    "MegaChunk",
    "Mixer",
    "MultiresConv",
    "SGConv",
    "freeze",
    "make_mixer",
    "mixer_class",
    "mixer_names",
    "register_mixer",
]

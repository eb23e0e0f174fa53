"""Errors name the argument, the given value and the allowed values."""

import pytest
import torch

from mrconv import LanguageModel, MRConv, MRConvBlock, SequenceClassifier, SequenceRegressor, TwoTowerClassifier
from mrconv.kernels import kernel_class, register_kernel
from mrconv.kernels import protocol as base

CLASSIFIER = {"n_classes": 3, "d_model": 4, "l_max": 16, "depth": 1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel": "wavelet"}, r"kernel must be one of .*dense.*; got 'wavelet'"),
        ({"kernel_size": 17}, r"kernel_size must be at most l_max = 16; got 17"),
        ({"kernel_size": 0}, r"kernel_size must be an integer of at least 1; got 0"),
        ({"kernel_size": 2.0}, r"kernel_size must be an integer of at least 1; got 2.0"),
        ({"combine": "product"}, r"combine must be one of sum, concat; got 'product'"),
        ({"norm": "group"}, r"norm must be one of batch, scale, none; got 'group'"),
        ({"combine": "concat", "norm": "batch"}, r"norm='batch' needs combine='sum'"),
        ({"combine": "concat", "decay": -1.0}, r"decay must be a positive number or a pair .*; got -1.0"),
        ({"combine": "concat", "decay": 0}, r"decay must be a positive number"),
        ({"combine": "concat", "decay": (1.0, -2.0)}, r"decay must be a positive number or a pair"),
        ({"combine": "concat", "decay": (1.0, 2.0, 3.0)}, r"decay must be a positive number or a pair"),
        ({"combine": "concat", "decay": "fast"}, r"decay must be a positive number .*got 'fast'"),
        ({"decay": 2.0}, r"decay needs combine='concat'; got decay=2.0 with combine='sum'"),
        ({"groups": 3}, r"groups must divide d_model = 4; got 3"),
        ({"kernel": ["fourier"]}, r"kernel must be one of .*; got \['fourier'\]"),
        ({"eps": 0.0}, r"eps must be a positive number; got 0.0"),
        ({"heads": 0}, r"heads must be an integer of at least 1; got 0"),
        ({"backend": "cuda"}, r"backend must be one of reference, torch, triton, auto; got 'cuda'"),
        ({"rate": 0}, r"rate must be a positive number; got 0"),
        ({"rate": 0.5, "kernel": "dilated"}, r"rate=0.5 needs a continuous kernel"),
        ({"backend": "reference", "sync_stats": True}, r"sync_stats=True needs backend='torch' or 'auto'"),
    ],
)
def test_wrong_option(options, message):
    with pytest.raises(ValueError, match=message):
        MRConv(4, 16, **options)


@pytest.mark.parametrize("kernel", ["dilated", "fourier"])
def test_triton_reports_why_it_cannot_run(kernel):
    with pytest.raises(RuntimeError, match="backend='triton' cannot run here: "):
        MRConv(4, 16, kernel=kernel, backend="triton")(torch.randn(2, 16, 4))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, 16, 5), r"u must have shape \(batch, length, d_model = 4\); got \(2, 16, 5\)"),
        ((16, 4), r"u must have shape \(batch, length, d_model = 4\); got \(16, 4\)"),
        ((2, 0, 4), r"u must have a batch and a length of at least 1; got shape \(2, 0, 4\)"),
        ((0, 16, 4), r"u must have a batch and a length of at least 1; got shape \(0, 16, 4\)"),
    ],
)
@pytest.mark.parametrize("merged", [False, True])
def test_wrong_input(shape, message, merged):
    with pytest.raises(ValueError, match=message):
        MRConv(4, 16, merged=merged)(torch.randn(shape))


def test_integer_input():
    with pytest.raises(ValueError, match=r"u must be real floating point; got torch.int64"):
        MRConv(4, 16)(torch.ones(2, 16, 4, dtype=torch.long))


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        (torch.tensor([1, 2, 3]), r"lengths must be integers of shape \(2,\), .* got torch.int64 of shape \(3,\)"),
        (torch.tensor([1.0, 2.0]), r"lengths must be integers of shape \(2,\)"),
        (torch.tensor([1, 17]), r"lengths must lie in 0 .. 16, the input's length; got \[1, 17\]"),
        (torch.tensor([-1, 7]), r"lengths must lie in 0 .. 16"),
    ],
)
def test_wrong_lengths(lengths, message):
    with pytest.raises(ValueError, match=message):
        MRConv(4, 16)(torch.randn(2, 16, 4), lengths=lengths)
    with pytest.raises(ValueError, match=message):
        SequenceClassifier(vocab_size=5, **CLASSIFIER)(torch.ones(2, 16, dtype=torch.long), lengths=lengths)


def test_a_mistyped_model_option_raises_with_the_closest_name():
    with pytest.raises(TypeError, match=r"ClassifierConfig has no option 'kernelsize'; did you mean 'kernel_size'"):
        SequenceClassifier(vocab_size=5, kernelsize=3, **CLASSIFIER)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 5, "d_input": 1}, r"vocab_size .* and d_input .* are mutually exclusive"),
        ({"vocab_size": 0}, r"vocab_size must be an integer of at least 1; got 0"),
        ({"vocab_size": 5, "depth": 0}, r"depth must be an integer of at least 1; got 0"),
        ({"vocab_size": 5, "dropout": 1.0}, r"dropout must be a number in \[0, 1\); got 1.0"),
        ({"vocab_size": 5, "dropout": 1.0, "tie_dropout": False}, r"dropout must be a number in \[0, 1\); got 1.0"),
        ({"vocab_size": 5, "block_norm": "rms"}, r"block_norm must be one of batch, layer; got 'rms'"),
        ({"vocab_size": 5, "pool": "max"}, r"pool must be one of mean, last; got 'max'"),
        ({"vocab_size": 5, "n_classes": 0}, r"n_classes must be an integer of at least 1; got 0"),
    ],
)
def test_wrong_model_option(options, message):
    with pytest.raises(ValueError, match=message):
        SequenceClassifier(**(CLASSIFIER | options))


def test_wrong_model_input():
    tokens, values = torch.ones(2, 16, dtype=torch.long), torch.randn(2, 16, 3)
    with pytest.raises(ValueError, match=r"tokens must be integers of shape \(batch, length\); got torch.float32"):
        SequenceClassifier(vocab_size=5, **CLASSIFIER)(values)
    with pytest.raises(ValueError, match=r"input must have shape \(batch, length, d_input = 2\); got \(2, 16, 3\)"):
        SequenceClassifier(d_input=2, **CLASSIFIER)(values)
    with pytest.raises(ValueError, match=r"input must have shape \(batch, length, d_model = 4\); got \(2, 16, 3\)"):
        SequenceClassifier(**CLASSIFIER)(values)
    with pytest.raises(ValueError, match=r"input must be real floating point, .* vocab_size; got torch.uint8"):
        SequenceClassifier(d_input=3, **CLASSIFIER)(values.byte())
    with pytest.raises(ValueError, match=r"u must have shape \(batch, length, d_model = 4\); got \(2, 16, 3\)"):
        MRConvBlock(4, 16, prenorm=True)(values)
    with pytest.raises(ValueError, match=r"first and second differ in batch size: 2 and 1"):
        TwoTowerClassifier(vocab_size=5, d_model=4, l_max=16, depth=1)(tokens, tokens[:1])


def test_a_language_model_must_be_causal_and_have_tokens():
    options = {"d_model": 4, "l_max": 16, "depth": 1}
    with pytest.raises(ValueError, match="LanguageModel needs vocab_size"):
        LanguageModel(**options)
    with pytest.raises(ValueError, match="bidirectional=True would let a LanguageModel see"):
        LanguageModel(vocab_size=5, bidirectional=True, **options)


def test_a_wrong_pool_raises_even_without_pooling():
    with pytest.raises(ValueError, match=r"pool must be one of mean, last; got 'max'"):
        SequenceRegressor(d_model=4, l_max=16, depth=1, per_position=True, pool="max")


def test_an_unknown_block_keyword_raises():
    with pytest.raises(TypeError, match="kernels"):
        MRConvBlock(4, 16, kernels="fourier")


def test_a_merged_layer_cannot_be_reset():
    with pytest.raises(RuntimeError, match="merged MRConv has no branches"):
        MRConv(4, 16, merged=True).reset_parameters()


def test_forward_mode_differentiation_raises():
    for kind in ("fourier", "dilated"):
        layer = MRConv(4, 16, kernel=kind).eval()
        u = torch.randn(2, 16, 4)
        with pytest.raises(NotImplementedError, match="forward-mode"):
            torch.func.jvp(layer, (u,), (u,))


def test_a_kernel_of_the_wrong_shape_raises(monkeypatch):
    monkeypatch.setattr(base.KERNELS, "entries", dict(base.KERNELS.entries))

    @register_kernel("short")
    class Short(kernel_class("dense")):
        def forward(self, rate=1.0, delay=0.0):
            return [k[:, 1:] for k in super().forward(rate, delay)]

    with pytest.raises(ValueError, match=r"Short must return kernels of 4 channels and \[2, 4\] taps; got shapes"):
        MRConv(4, 4, kernel="short", kernel_size=2, norm="none")(torch.randn(1, 4, 4))

"""Merged models as files that run without mrconv: ONNX, `torch.export`, AOTInductor; whole sequences or steps."""

from __future__ import annotations

import contextlib
import copy
import importlib
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from .._utils.checks import check_choice, check_positive_int
from ..hub import Model
from ..kernels import resampled
from ..layer import reparameterize
from ..vision.convnext import MRConvNeXt
from .formats import FORMATS, Runner
from .plain_ops import decompositions
from .targets import Pictures, Sequences, Steps, Subject

__all__ = ["FORMATS", "LIMITS", "ExportFailed", "Exported", "export"]

LIMITS = {"float32": 1e-4, "float64": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
"""The relative error that an export may have, by the dtype of its parameters."""


class ExportFailed(Exception):
    """The model cannot be written in this format, or what was written does not compute the same; no file is left."""


@dataclass(frozen=True)
class Exported:
    """What was written: where, the largest relative error found, and the sizes (batch, length) it was looked for at."""

    path: Path
    error: float
    checked: list[tuple[int, int]]


def export(
    model: nn.Module,
    path: str | Path,
    format: str = "onnx",
    *,
    step: bool = False,
    length: int | None = None,
    fixed: bool = False,
    padded: bool = False,
    dtype: str | None = None,
    device: str = "cpu",
) -> Exported:
    """Write a model, merged on a copy if it is not yet, and compare what the file computes with what the model does.

    Args:
        model: any model of `mrconv`, of sequences or pictures; it stays as it is.
        path: of the file; it appears when all is written and compared.
        format: "onnx", "torch" (`torch.export`) or "aoti" (AOTInductor).
        step: a function of one position and a state, instead of whole sequences.
        length: of the longest input; None means l_max, the kernels' reach.
        fixed: every input has exactly this length, instead of 1 up to it.
        padded: the lengths (batch,) of padded sequences are inputs too.
        dtype: of the parameters, such as "bfloat16"; None keeps them.
        device: to run on; "onnx" files run anywhere, and are compared on the CPU.
    """
    check_choice("format", format, tuple(FORMATS))
    for name in FORMATS[format].needs:
        importlib.import_module(name)
    if not isinstance(model, Model):
        raise ValueError(f"only models of mrconv are exported; got a {type(model).__name__}")
    if step and (length is not None or fixed or padded):
        raise ValueError("a step takes one position: length, fixed and padded are for whole sequences")
    if length is not None:
        check_positive_int(length=length)
    dtype = dtype or str(next(model.parameters()).dtype).removeprefix("torch.")
    check_choice("dtype", dtype, tuple(LIMITS))
    if format == "onnx" and (device != "cpu" or dtype in ("bfloat16", "float64")):
        raise ValueError("onnx files are compared by onnxruntime on the CPU, which convolves in float32 and float16")
    if Path(path).is_dir():
        raise ValueError(f"{path} is a folder: name a file")
    original = copy.deepcopy(model).eval().to(device)
    merged = copy.deepcopy(original)
    reparameterize(merged)
    merged.to(getattr(torch, dtype))
    subject = _subject(original, merged, step, length, fixed, padded)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _quietly(), tempfile.TemporaryDirectory(dir=path.parent, prefix=".exporting-") as stage:
        draft = Path(stage) / f"draft{FORMATS[format].suffix}"
        try:
            FORMATS[format].write(_program(subject, FORMATS[format].products), draft, subject.signature)
            errors = _errors(subject, FORMATS[format].load(draft))
        except Exception as error:  # exporters raise whatever they like
            raise ExportFailed(_why(error, subject, format)) from error
        worst = max(errors.values())
        if not worst < LIMITS[dtype]:
            raise ExportFailed(
                f"the {format} file does not compute what the model does: relative error {worst:.1e}, allowed is "
                f"{LIMITS[dtype]:.0e}; nothing was written"
            )
        os.replace(draft, path)
    return Exported(path, worst, list(errors))


def _subject(original: Model, merged: Model, step: bool, length: int | None, fixed: bool, padded: bool) -> Subject:
    if isinstance(merged, MRConvNeXt):
        if step or length is not None or fixed or padded:
            raise ValueError("pictures have one size: step, length, fixed and padded are for sequences")
        return Pictures(original, merged)
    if step:
        return Steps(original, merged)
    config: Any = merged.current_config()
    return Sequences(original, merged, length or resampled(config.l_max, config.rate), fixed, padded)


def _program(subject: Subject, products: bool) -> ExportedProgram:
    """Trace, and put plain torch in place of the ops of mrconv."""
    example = subject.example()
    with torch.no_grad():
        subject.module(*example)  # reads what tracing cannot: the lags of taps
        program = torch.export.export(subject.module, example, dynamic_shapes=subject.signature.dims, strict=False)
        program = program.run_decompositions(decompositions(subject.longest, products))
    ours = {str(node.target) for node in program.graph.nodes if str(node.target).startswith("mrconv.")}
    if ours:
        raise NotImplementedError(f"{', '.join(sorted(ours))} runs in mrconv only")
    return program


@torch.no_grad()
def _errors(subject: Subject, run: Runner) -> dict[tuple[int, int], float]:
    """Return the relative error by the size of the input."""
    found = {}
    for size, output, expected in subject.comparisons(run):
        difference, scale = (x.abs().max() for x in (output.to(expected.dtype) - expected, expected))
        scale = scale.clamp(min=torch.finfo(scale.dtype).tiny)  # all may be 0, rightly
        found[size] = float((difference / scale).nan_to_num(nan=torch.inf))
    return found


def _why(error: BaseException, subject: Subject, format: str) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    what = " ".join(str(error).split())[:300]
    hint = "; a fixed length may work: --fixed, fixed=True" if subject.varying else ""
    return f"mixer={subject.mixer!r} cannot be written as {format}: {type(error).__name__}: {what}{hint}"


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Keep back what exporters say about their own innards."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)

"""Export of a model: trace it, write the file, and compare the file's outputs with those of the model."""

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
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from .._utils.accuracy import allowed_error, relative_error, rounded_copies
from .._utils.checks import check_choice, check_positive_int
from ..hub import Model
from ..kernels import resampled
from ..layer import reparameterize
from ..vision.convnext import MRConvNeXt
from .formats import FORMATS, Format, Runner
from .plain_ops import decompositions
from .targets import ExportTarget, ImageTarget, SequenceTarget, StepTarget

MAX_ERRORS = {"float32": 1e-4, "float64": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
"""Largest relative error that an exported file may have, by the dtype of its parameters.

More is allowed if the model's own errors of rounding in that dtype are larger, see `allowed_error`.
"""
SEED = 0
"""Seed of the inputs of the comparison, which fails or succeeds alike every time."""


class ExportFailed(Exception):
    """The model cannot be written in this format, or the file's outputs differ from the model's; no file is left."""


@dataclass(frozen=True)
class Exported:
    """An exported file: its path, its largest error, and the input sizes (batch, length) of the comparison.

    Errors are relative to the outputs of the original model in float64.
    """

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
    """Write a model to a file and compare the file's outputs with the model's.

    The model itself is not changed: a copy of it is merged, if it is not merged yet, and exported.

    Args:
        model: any model of `mrconv`, for sequences or images.
        path: path of the file, which appears only after the comparison has succeeded.
        format: "onnx", "torch" (`torch.export`) or "aoti" (AOTInductor).
        step: export a function of one position and a state, instead of one of whole sequences.
        length: length of the longest input; None means l_max, the reach of the kernels.
        fixed: every input has exactly this length, instead of 1 up to it.
        padded: the lengths (batch,) of padded sequences are inputs too.
        dtype: dtype of the parameters, such as "bfloat16"; None keeps the model's.
        device: device that the file runs on; "onnx" files run on any, and are compared on the CPU.
    """
    if not isinstance(model, Model):
        raise ValueError(f"model must be a model of mrconv; got a {type(model).__name__}")
    dtype = dtype or str(next(model.parameters()).dtype).removeprefix("torch.")
    check_choice("format", format, tuple(FORMATS))
    check_choice("dtype", dtype, tuple(MAX_ERRORS))
    for package in FORMATS[format].needs:
        importlib.import_module(package)
    if step and (length is not None or fixed or padded):
        raise ValueError("step=True exports one position: length, fixed and padded need whole sequences")
    if length is not None:
        check_positive_int(length=length)
    if format == "onnx" and (device != "cpu" or dtype in ("bfloat16", "float64")):
        raise ValueError(
            "format='onnx' needs device='cpu' and dtype float32 or float16, which onnxruntime can compare; "
            f"got device={device!r}, dtype={dtype!r}"
        )
    if Path(path).is_dir():
        raise ValueError(f"path must name a file; {path} is a folder")
    original = copy.deepcopy(model).eval().to(device)
    merged = reparameterize(copy.deepcopy(original), dense=True).to(getattr(torch, dtype))
    target = _target(original, merged, step, length, fixed, padded)
    return _write_compared(target, Path(path), format, MAX_ERRORS[dtype])


def _target(original: Model, merged: Model, step: bool, length: int | None, fixed: bool, padded: bool) -> ExportTarget:
    if isinstance(merged, MRConvNeXt):
        if step or length is not None or fixed or padded:
            raise ValueError("step, length, fixed and padded are options for sequences; images have one size")
        return ImageTarget(original, merged)
    if step:
        return StepTarget(original, merged)
    config: Any = merged.current_config()
    return SequenceTarget(original, merged, length or resampled(config.l_max, config.rate), fixed, padded)


def _write_compared(target: ExportTarget, path: Path, format: str, max_error: float) -> Exported:
    """Write a draft, compare it, and move it to `path` if its errors are allowed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _without_messages(), tempfile.TemporaryDirectory(dir=path.parent, prefix=".exporting-") as folder:
        draft = Path(folder) / f"draft{FORMATS[format].suffix}"
        try:
            FORMATS[format].write(_trace(target, FORMATS[format]), draft, target.signature)
            errors = _errors(target, FORMATS[format].load(draft), max_error)
        except Exception as error:  # exporters raise exceptions of many classes
            raise ExportFailed(_failure(error, target, format)) from error
        for found, allowed in errors.values():
            if not found < allowed:
                raise ExportFailed(
                    f"the outputs of the {format} file differ from the model's by a relative error of {found:.1e}; "
                    f"the limit is {allowed:.0e}; no file was written"
                )
        os.replace(draft, path)
    return Exported(path, max(error for error, _ in errors.values()), list(errors))


def _trace(target: ExportTarget, format: Format) -> ExportedProgram:
    """Trace the target and replace the ops of mrconv by plain torch."""
    example = target.example()
    with torch.no_grad():
        target.module(*example)  # caches the lags of taps, whose values tracing cannot read
        program = torch.export.export(target.module, example, dynamic_shapes=target.signature.dims, strict=False)
        program = program.run_decompositions(decompositions(target.longest, format.matmul_dft))
    remaining = {str(node.target) for node in program.graph.nodes if str(node.target).startswith("mrconv.")}
    if remaining:
        raise NotImplementedError(f"{', '.join(sorted(remaining))} cannot run without mrconv")
    return program


@torch.no_grad()
def _errors(target: ExportTarget, run: Runner, max_error: float) -> dict[tuple[int, int], tuple[float, float]]:
    """Return the file's relative error and the one that is allowed, by the size of the input."""
    errors, original = {}, copy.deepcopy(target.original).double()
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        models = rounded_copies(target.merged)
        for size, output, inputs in target.comparisons(run):
            exact = target.output(original, inputs)
            allowed = allowed_error(max_error, models, partial(target.output, inputs=inputs), exact)
            errors[size] = relative_error(output, exact), allowed
    return errors


def _failure(error: BaseException, target: ExportTarget, format: str) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    message = " ".join(str(error).split())[:300]
    hint = "; a fixed length may work: --fixed, fixed=True" if target.varying else ""
    return f"mixer={target.mixer!r} cannot be exported as {format}: {type(error).__name__}: {message}{hint}"


@contextlib.contextmanager
def _without_messages() -> Iterator[None]:
    """Suppress warnings and log messages of the exporters."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(level)

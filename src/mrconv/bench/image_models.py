"""Images per second: MRConvNeXt as trained, merged and compiled, against ConvNeXt and Swin of the same size."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from mrconv import MRConv, reparameterize
from mrconv.vision.convnext import SIZES, MRConvNeXt

from . import candidates, records, shapes
from .block_stacks import matmul_precision
from .options import TIMINGS, Options
from .timing import free, measure

ACCURACIES = {
    "merged": {"T": 82.2, "S": 83.4, "B": 83.9},
    "ConvNeXt": {"T": 82.1, "S": 83.1, "B": 83.8},
    "timm Swin": {"T": 81.3, "S": 83.0, "B": 83.5},
}
"""Top-1 on ImageNet in the paper, in percent; MRConvNeXt with fourier+sparse kernels."""
FAMILY = {"torch FFT": "merged", "timm ConvNeXt": "ConvNeXt"}
"""Candidates that are another implementation of a model in ACCURACIES."""
SMALL = {"image_size": 64, "depths": (1, 1, 1, 1), "kernel_sizes": (49, 16, 8, 4)}
PRECISION = {
    "float32": "float32 throughout, no TF32",
    "bfloat16": (
        "inference: model and images in bfloat16, MRConv's parameters in float32; "
        "training: torch.autocast to bfloat16, float32 parameters"
    ),
}


def run(options: Options) -> dict[str, Any]:
    """Measure all sizes, print a table, and return the record."""
    chosen = shapes.select(shapes.VISION, options.only)
    if options.small:
        chosen = [shape.small() for shape in chosen]
    results = records.start("vision", options)
    results |= {"precision": PRECISION[options.dtype], "accuracies": ACCURACIES, "family": FAMILY}
    with matmul_precision(options.dtype):
        measured = records.measure_each(results, options.out, chosen, lambda shape: measure_shape(shape, options))
        for _, measurements in measured:
            print("\n".join(table_lines(measurements)), flush=True)
    return results


def measure_shape(shape: shapes.VisionShape, options: Options) -> records.Measurements:
    """Measure one size with the largest batch that fits all candidates, halving from the requested one."""
    torch.manual_seed(0)
    measurements: records.Measurements = {"shape": asdict(shape), "batch": {}}
    for name in options.passes:
        torch.compiler.reset()
        free()
        candidate_models = models(shape, name, options)
        batch = options.batch or shape.batch
        while not all(_fits(model, shape, name, batch, options) for model in candidate_models.values()) and batch > 1:
            batch //= 2
        x = images(shape, name, batch, options)
        compiled = None
        if options.compile:
            compiled_models = {key: compile_blocks(m) for key, m in candidate_models.items() if key != "branches"}
            compiled = _steps(name, compiled_models, x, options)
        steps = _steps(name, candidate_models, x, options)
        with torch._dynamo.config.patch(recompile_limit=64):  # enough for the four stages of each model
            measurements[name] = measure(steps, options, compiled, f"{shape.name}, {name}")
        measurements["batch"][name] = batch
    return measurements


def models(shape: shapes.VisionShape, pass_name: str, options: Options) -> dict[str, nn.Module]:
    """Return the models of one size by name; a model that is not installed raises the reason when it runs."""
    size = SIZES[shape.size] | (SMALL if shape.reduced else {})
    build = functools.partial(MRConvNeXt, **size, kernel="fourier+sparse", device=options.device, seed=0)
    by_name: dict[str, nn.Module] = {"ours" if pass_name != "inference" else "merged": build()}
    by_name["branches"] = build(backend="reference")
    if pass_name == "inference":
        reparameterize(by_name["merged"])
        by_name["torch FFT"] = reparameterize(build(backend="torch"))
    by_name["ConvNeXt"] = build(mixer="conv")
    for key, name in (("ConvNeXt", "convnext_{}"), ("Swin", "swin_{}_patch4_window7_224")):
        if not shape.reduced:
            by_name[f"timm {key}"] = timm_model(name.format(shape.size)).to(options.device)
    return {key: _cast(model, pass_name, options) for key, model in by_name.items()}


def _cast(model: nn.Module, pass_name: str, options: Options) -> nn.Module:
    """Return a model in its mode and dtype, in channels-last layout; MRConv's parameters stay float32."""
    model.train(pass_name != "inference").to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if pass_name == "inference":
        model.to(getattr(torch, options.dtype))
        for module in model.modules():
            if isinstance(module, MRConv):
                module.float()
    return model


def timm_model(name: str) -> nn.Module:
    """Return timm's model, or a candidate that reports why timm cannot be imported."""
    try:
        import timm
    except (ImportError, RuntimeError) as error:  # RuntimeError: torchvision without its compiled operators
        return candidates.Unavailable(f"timm cannot be imported: {str(error).splitlines()[0]}")
    return timm.create_model(name)


def images(shape: shapes.VisionShape, pass_name: str, batch: int, options: Options) -> Tensor:
    """Return a batch of noise in channels-last layout."""
    side = SMALL["image_size"] if shape.reduced else 224
    dtype = getattr(torch, options.dtype) if pass_name == "inference" else torch.float32
    x = torch.randn(batch, 3, side, side, device=options.device, dtype=dtype)  # type: ignore[call-overload]
    return x.contiguous(memory_format=torch.channels_last)


def _steps(pass_name: str, modules: Mapping[str, nn.Module], x: Tensor, options: Options) -> dict[str, candidates.Step]:
    return {key: _step(pass_name, model, x, options.dtype == "bfloat16") for key, model in modules.items()}


def _step(pass_name: str, model: nn.Module, x: Tensor, autocast: bool) -> candidates.Step:
    """Return a pass over a batch; training is forward, and the gradients of all parameters."""

    def training() -> Any:
        with torch.autocast(x.device.type, torch.bfloat16) if autocast else nullcontext():
            loss = model(x).float().square().mean()
        return torch.autograd.grad(loss, list(model.parameters()))

    return training if pass_name == "training" else torch.no_grad()(lambda: model(x))


def _fits(model: nn.Module, shape: shapes.VisionShape, pass_name: str, batch: int, options: Options) -> bool:
    if options.device != "cuda" or isinstance(model, candidates.Unavailable):
        return True
    try:
        _step(pass_name, model, images(shape, pass_name, batch, options), options.dtype == "bfloat16")()
    except torch.cuda.OutOfMemoryError:
        free()
        return False
    return True


def compile_blocks(model: nn.Module) -> nn.Module:
    """Return a copy with each block compiled separately: blocks of one shape share one compilation."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if type(module).__name__.endswith("Block"):
            module.compile()
    return model


def table_lines(measurements: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a table of images per second and of ratios: ours over the other candidate."""
    for name, batch in measurements["batch"].items():
        results = measurements[name]
        ours = next(iter(results))
        others = [key for key in results if key not in (ours, "branches")]
        heads = [*results, *(f"/ {key}" for key in others)]
        widths = [max(9, len(head) + 2) for head in heads]
        yield _line(f"{measurements['shape']['name']}, {name}, batch {batch}, images/s", heads, widths)
        for timing, label in TIMINGS.items():
            speeds = {key: records.speed(result, batch, (timing,)) for key, result in results.items()}
            if any(speeds.values()):
                cells = [f"{value:.0f}" if value else "-" for value in speeds.values()]
                cells += [f"{speeds[ours] / speeds[key]:.2f}" if speeds[key] else "-" for key in others]
                yield _line(label, cells, widths)
        yield from (f"  {failure}" for failure in records.failures(results))


def _line(name: str, cells: Sequence[str], widths: Sequence[int]) -> str:
    return name.ljust(40) + "".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))

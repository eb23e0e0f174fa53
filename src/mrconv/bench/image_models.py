"""Pictures a second: MRConvNeXt as trained, merged and compiled, against ConvNeXt and Swin of the same size."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from mrconv import MRConv, reparameterize
from mrconv.vision.convnext import SIZES, MRConvNeXt

from . import candidates as make
from . import shapes
from .block_stacks import matrix_products
from .options import Options
from .records import SPEEDS, record, speed, write
from .timing import copy_bandwidth, free, measure

ACCURACIES = {
    "merged": {"T": 82.2, "S": 83.4, "B": 83.9},
    "ConvNeXt": {"T": 82.1, "S": 83.1, "B": 83.8},
    "timm Swin": {"T": 81.3, "S": 83.0, "B": 83.5},
}
"""Top-1 on ImageNet in the paper, in percent; MRConvNeXt with fourier+sparse kernels."""
FAMILY = {"torch FFT": "merged", "timm ConvNeXt": "ConvNeXt"}
"""Contestants that are another's model, run otherwise."""
SMALL = {"image_size": 64, "depths": (1, 1, 1, 1), "kernel_sizes": (49, 16, 8, 4)}
PRECISION = {
    "float32": "float32 throughout, no TF32",
    "bfloat16": (
        "inference: model and pictures in bfloat16, MRConv's own parameters in float32; "
        "training: torch.autocast to bfloat16, float32 parameters"
    ),
}


def run(options: Options) -> dict[str, Any]:
    """Measure all sizes, print a table, write and return what was found."""
    chosen = shapes.select(shapes.VISION, options.only)
    bandwidth = copy_bandwidth(options.device)
    found = record("vision", options.command, options.device, options.dtype, options.rounds, bandwidth)
    found |= {"precision": PRECISION[options.dtype], "accuracies": ACCURACIES, "family": FAMILY}
    with matrix_products("high" if options.dtype == "bfloat16" else "highest"):
        for shape in chosen:
            row = one_shape(shape.small() if options.small else shape, options)
            found["rows"].append(row)
            write(options.out, found)
            print("\n".join(lines(row)), flush=True)
            free()
    return found


def one_shape(shape: shapes.VisionShape, options: Options) -> dict[str, Any]:
    """Measure one size; the batch is halved until all contestants have room for it."""
    torch.manual_seed(0)
    row: dict[str, Any] = {"shape": asdict(shape), "batch": {}}
    for each in options.passes:
        torch.compiler.reset()
        free()
        models = contestants(shape, each, options)
        batch = options.batch or shape.batch
        while not all(_fits(model, shape, each, batch, options) for model in models.values()) and batch > 1:
            batch //= 2
        x = pictures(shape, each, batch, options)
        compiled = None
        if options.compile:
            compiled = _runs(each, {key: by_block(m) for key, m in models.items() if key != "branches"}, x, options)
        with torch._dynamo.config.patch(recompile_limit=64):  # four stages, of each model
            row[each] = measure(
                _runs(each, models, x, options), options.rounds, options.device, compiled, f"{shape.name}, {each}"
            )
        row["batch"][each] = batch
    return row


def contestants(shape: shapes.VisionShape, each: str, options: Options) -> dict[str, nn.Module]:
    """Return the models of one size by name; one that cannot be had fails with the reason when it runs."""
    size = SIZES[shape.size] | (SMALL if shape.reduced else {})
    own = functools.partial(MRConvNeXt, **size, kernel="fourier+sparse", device=options.device, seed=0)
    models: dict[str, nn.Module] = {"ours" if each != "inference" else "merged": own()}
    models["branches"] = own(backend="reference")
    if each == "inference":
        reparameterize(models["merged"])
        models["torch FFT"] = reparameterize(own(backend="torch"))
    models["ConvNeXt"] = own(mixer="conv")
    for key, name in (("ConvNeXt", "convnext_{}"), ("Swin", "swin_{}_patch4_window7_224")):
        if not shape.reduced:
            models[f"timm {key}"] = _timm(name.format(shape.size)).to(options.device)
    return {key: _cast(model, each, options) for key, model in models.items()}


def _cast(model: nn.Module, each: str, options: Options) -> nn.Module:
    """Return a model in its mode and dtype, its channels last in memory; MRConv's own parameters stay float32."""
    model.train(each != "inference").to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if each == "inference":
        model.to(getattr(torch, options.dtype))
        for module in model.modules():
            if isinstance(module, MRConv):
                module.float()
    return model


def _timm(name: str) -> nn.Module:
    try:
        import timm
    except (ImportError, RuntimeError) as error:  # RuntimeError: torchvision without its compiled operators
        return make.Refused(f"timm cannot be imported: {str(error).splitlines()[0]}")
    return timm.create_model(name)


def pictures(shape: shapes.VisionShape, each: str, batch: int, options: Options) -> Tensor:
    """Return a batch of noise, its channels last in memory."""
    side = SMALL["image_size"] if shape.reduced else 224
    dtype = getattr(torch, options.dtype) if each == "inference" else torch.float32
    x = torch.randn(batch, 3, side, side, device=options.device, dtype=dtype)  # type: ignore[call-overload]
    return x.contiguous(memory_format=torch.channels_last)


def _runs(each: str, models: Mapping[str, nn.Module], x: Tensor, options: Options) -> dict[str, make.Run]:
    return {key: _run(each, model, x, options.dtype == "bfloat16") for key, model in models.items()}


def _run(each: str, model: nn.Module, x: Tensor, half: bool) -> Callable[[], Any]:
    """Return a pass of this name over a batch; training is forward, and the gradients of all parameters."""

    def training() -> Any:
        with torch.autocast(x.device.type, torch.bfloat16) if half else nullcontext():
            loss = model(x).float().square().mean()
        return torch.autograd.grad(loss, list(model.parameters()))

    return training if each == "training" else torch.no_grad()(lambda: model(x))


def _fits(model: nn.Module, shape: shapes.VisionShape, each: str, batch: int, options: Options) -> bool:
    if options.device != "cuda" or isinstance(model, make.Refused):
        return True
    try:
        _run(each, model, pictures(shape, each, batch, options), options.dtype == "bfloat16")()
    except torch.cuda.OutOfMemoryError:
        free()
        return False
    return True


def by_block(model: nn.Module) -> nn.Module:
    """Return a copy with every block compiled by itself: those of one shape are compiled once."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if type(module).__name__.endswith("Block"):
            module.compile()
    return model


def lines(row: Mapping[str, Any]) -> Iterator[str]:
    """Yield a table of pictures a second, then ours over others' (above 1, ours are more)."""
    for each, batch in row["batch"].items():
        results = row[each]
        ours = next(iter(results))
        others = [key for key in results if key not in (ours, "branches")]
        heads = [*results, *(f"/ {key}" for key in others)]
        widths = [max(9, len(head) + 2) for head in heads]
        yield _line(f"{row['shape']['name']}, {each}, batch {batch}, images/s", heads, widths)
        for way, name in SPEEDS.items():
            speeds = {key: speed(result, batch, (way,)) for key, result in results.items()}
            if any(speeds.values()):
                cells = [f"{value:.0f}" if value else "-" for value in speeds.values()]
                cells += [f"{speeds[ours] / speeds[key]:.2f}" if speeds[key] else "-" for key in others]
                yield _line(name, cells, widths)
        for key, result in results.items():
            notes = [note for note in result if note.endswith("error")]
            yield from (f"  {key}, {note.replace('_', ' ')}: {result[note]}" for note in notes)


def _line(name: str, cells: Sequence[str], widths: Sequence[int]) -> str:
    return name.ljust(40) + "".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))

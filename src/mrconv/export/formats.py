"""Writing an exported program in each format, and running what was written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.export import ExportedProgram

OPSET = 20  # the first with a Gelu

Runner = Callable[..., Sequence[Tensor]]
"""Takes the program's inputs, returns its outputs."""


class Signature(NamedTuple):
    """The names of a program's inputs and outputs, and which sizes of the inputs may vary, as `torch.export` has it."""

    inputs: list[str]
    outputs: list[str]
    dims: tuple[Any, ...]


@dataclass(frozen=True)
class Format:
    """How to write a program and to load the file again, what packages that takes, and whether FFTs are products."""

    suffix: str
    write: Callable[[ExportedProgram, Path, Signature], None]
    load: Callable[[Path], Runner]
    needs: tuple[str, ...] = ()
    products: bool = False


def _several(run: Callable[..., Tensor | Sequence[Tensor]]) -> Runner:
    def runner(*inputs: Tensor) -> Sequence[Tensor]:
        found = run(*inputs)
        return (found,) if isinstance(found, Tensor) else found

    return runner


def _write_onnx(program: ExportedProgram, path: Path, signature: Signature) -> None:
    import onnx

    found = torch.onnx.export(
        program,
        input_names=signature.inputs,
        output_names=signature.outputs,
        dynamic_shapes=signature.dims,
        opset_version=OPSET,
        external_data=False,
        verbose=False,
    )
    assert found is not None
    found.save(path)
    onnx.checker.check_model(path, full_check=True)


def _load_onnx(path: Path) -> Runner:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 4  # what it says of a failure is in the exception too
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [given.name for given in session.get_inputs()]

    def run(*inputs: Tensor) -> list[Tensor]:
        arrays = {name: x.numpy() for name, x in zip(names, inputs, strict=True)}
        return [torch.from_numpy(y) for y in session.run(None, arrays)]

    return run


def _write_torch(program: ExportedProgram, path: Path, signature: Signature) -> None:
    torch.export.save(program, path)


def _load_torch(path: Path) -> Runner:
    return _several(torch.export.load(path).module())


def _write_aoti(program: ExportedProgram, path: Path, signature: Signature) -> None:
    from torch import _inductor

    _inductor.aoti_compile_and_package(program, package_path=str(path))


def _load_aoti(path: Path) -> Runner:
    from torch import _inductor

    return _several(_inductor.aoti_load_package(str(path)))


FORMATS = {
    "onnx": Format(".onnx", _write_onnx, _load_onnx, ("onnx", "onnxscript", "onnxruntime"), products=True),
    "torch": Format(".pt2", _write_torch, _load_torch),
    "aoti": Format(".aoti.pt2", _write_aoti, _load_aoti),
}

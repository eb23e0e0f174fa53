"""The file formats: how to write an exported program and how to load and run the file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.export import ExportedProgram

OPSET = 20  # the first that has Gelu

Runner = Callable[..., Sequence[Tensor]]
"""A function of the program's inputs that returns its outputs."""


class Signature(NamedTuple):
    """The names of a program's inputs and outputs, and the `dynamic_shapes` of `torch.export`."""

    inputs: list[str]
    outputs: list[str]
    dims: tuple[Any, ...]


@dataclass(frozen=True)
class Format:
    """A file format.

    Attributes:
        suffix: suffix of the file name.
        write: writes a program to a path.
        load: returns a function that runs the file.
        needs: packages that must be installed.
        matmul_dft: whether FFTs are written as matrix products.
    """

    suffix: str
    write: Callable[[ExportedProgram, Path, Signature], None]
    load: Callable[[Path], Runner]
    needs: tuple[str, ...] = ()
    matmul_dft: bool = False


def _with_tuple_outputs(run: Callable[..., Tensor | Sequence[Tensor]]) -> Runner:
    def runner(*inputs: Tensor) -> Sequence[Tensor]:
        outputs = run(*inputs)
        return (outputs,) if isinstance(outputs, Tensor) else outputs

    return runner


def _write_onnx(program: ExportedProgram, path: Path, signature: Signature) -> None:
    import onnx

    onnx_program = torch.onnx.export(
        program,
        input_names=signature.inputs,
        output_names=signature.outputs,
        dynamic_shapes=signature.dims,
        opset_version=OPSET,
        external_data=False,
        verbose=False,
    )
    assert onnx_program is not None
    onnx_program.save(path)
    onnx.checker.check_model(path, full_check=True)


def _load_onnx(path: Path) -> Runner:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 4  # errors are raised as exceptions as well
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [node.name for node in session.get_inputs()]

    def run(*inputs: Tensor) -> list[Tensor]:
        arrays = {name: x.numpy() for name, x in zip(names, inputs, strict=True)}
        return [torch.from_numpy(y) for y in session.run(None, arrays)]

    return run


def _write_torch(program: ExportedProgram, path: Path, signature: Signature) -> None:
    torch.export.save(program, path)


def _load_torch(path: Path) -> Runner:
    return _with_tuple_outputs(torch.export.load(path).module())


def _write_aoti(program: ExportedProgram, path: Path, signature: Signature) -> None:
    from torch import _inductor

    _inductor.aoti_compile_and_package(program, package_path=str(path))


def _load_aoti(path: Path) -> Runner:
    from torch import _inductor

    return _with_tuple_outputs(_inductor.aoti_load_package(str(path)))


FORMATS = {
    "onnx": Format(".onnx", _write_onnx, _load_onnx, ("onnx", "onnxscript", "onnxruntime"), matmul_dft=True),
    "torch": Format(".pt2", _write_torch, _load_torch),
    "aoti": Format(".aoti.pt2", _write_aoti, _load_aoti),
}

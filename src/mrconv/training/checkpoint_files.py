"""The checkpoints of a run folder: which of them can be used."""

from __future__ import annotations

import pickle
import warnings
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mrconv._utils.checks import first_not_finite

LAST, PREVIOUS, BEST = "last.ckpt", "previous.ckpt", "best.ckpt"
CONTENT: dict[str, Any] = {"mrconv": dict, "epoch": int, "state_dict": dict}
"""What a checkpoint holds, with its types."""
RESUMED: dict[str, Any] = {"global_step": int, "optimizer_states": list}
"""What a checkpoint that resumes a run holds too."""
STATE: dict[str, Any] = {"best_epoch": int, "history": list, "seconds": (int, float), "random": list}
"""The values below "mrconv" of such a checkpoint."""
RANDOM = {"python", "numpy", "torch", "cuda"}


def latest_valid_checkpoint(folder: Path, names: Sequence[str] = (LAST, PREVIOUS)) -> Path | None:
    """Return the first checkpoint that can be used, by default of those that resume a run; warn about the others."""
    for name in names:
        path = folder / name
        if not path.exists():
            continue
        problem = find_problem(path)
        if problem is None:
            return path
        warnings.warn(f"{path} cannot be read and is not used: {problem}", stacklevel=2)
    return None


def find_problem(path: Path) -> str | None:
    """Return why a checkpoint cannot be used, None if it can: all of it is readable, and its weights are finite."""
    try:
        with zipfile.ZipFile(path) as file:
            damaged = file.testzip()  # includes tensors, whose checksums torch does not verify
        if damaged is not None:
            return f"{damaged} in it is damaged"
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        return "it is missing"
    except pickle.UnpicklingError:  # torch's message suggests to execute the code
        return "it holds code, or other objects than tensors and plain values"
    except Exception as error:
        return (str(error).strip().splitlines() or [type(error).__name__])[0]
    return _wrong_content(content, path.name != BEST)


def _wrong_content(content: Any, resumes: bool) -> str | None:
    if not isinstance(content, dict) or not isinstance(content.get("mrconv"), dict):
        return "it is not a checkpoint of mrconv"
    state = content["mrconv"]
    for values, kinds in ((content, CONTENT | RESUMED), (state, STATE)) if resumes else ((content, CONTENT),):
        for name, kind in kinds.items():
            if not isinstance(values.get(name), kind):
                return f"its {name} is a {type(values[name]).__name__}" if name in values else f"it has no {name}"
    if resumes and not all(isinstance(each, dict) and {"epoch", "step"} <= set(each) for each in state["history"]):
        return "its history is no list of epochs"
    if resumes and not all(isinstance(each, dict) and set(each) >= RANDOM for each in state["random"]):
        return "its random states are incomplete"
    wrong = first_not_finite(model_weights(content))
    return None if wrong is None else f"its weights {wrong} are not finite"


def model_weights(checkpoint: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the model's state dict in a checkpoint."""
    state = checkpoint["state_dict"]
    return {name.removeprefix("model."): x for name, x in state.items() if name.startswith("model.")}


def check_same_model(path: Path, weights: Mapping[str, Tensor], model: nn.Module) -> None:
    """Raise ValueError if weights of a checkpoint are not those of a model, by name and shape."""
    there, here = (_shapes(each.items()) for each in (weights, model.state_dict()))
    for name in (*here, *there):
        if there.get(name) != here.get(name):
            values = " and ".join(
                f"{'no shape' if (shape := each.get(name)) is None else shape} {where}"
                for each, where in ((there, "there"), (here, "here"))
            )
            raise ValueError(f"{path} holds the weights of another model: {name} has {values}")


def _shapes(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(x.shape) for name, x in tensors}

"""Loading and saving of models with the preprocessing of their inputs."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError

from .. import model as models
from .._utils.checks import first_not_finite
from .._utils.files import atomic_write
from .._utils.plugins import NotRegistered
from ..hub import CONFIG, MERGED, MODEL, Model, model_folder, read_json
from ..layer import reparameterize
from ..ops import triton_unavailable
from ..tasks.preprocessing import INPUTS_FILE, Preprocessor
from ..vision.convnext import MRConvNeXt
from .predictor import Predictor

ARCHITECTURES: dict[str, type[Model]] = {
    name: cls
    for name, cls in {**vars(models), "MRConvNeXt": MRConvNeXt}.items()
    if isinstance(cls, type) and issubclass(cls, Model) and cls is not Model and not name.startswith("_")
}
"""The models that `load_model` can load, by the name in their config.json."""
DAMAGED = (SafetensorError, TypeError, ValueError, RuntimeError, OverflowError, MemoryError)
"""Errors of a folder that is damaged, or written by another model."""


def load_model(folder: Path) -> Model:
    """Load a saved model as the class that its config.json names; reject weights that are not finite."""
    config = folder / CONFIG
    if not folder.exists():
        raise FileNotFoundError(f"{folder} does not exist")
    if not config.exists():
        raise FileNotFoundError(f"{folder} contains no model (no {CONFIG})")
    name = read_json(config).get("architecture")
    cls = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if cls is None:
        raise ValueError(f"{config}: architecture {name!r} is not a model of mrconv")
    try:
        model = cls.from_pretrained(folder)
    except NotRegistered:  # names the folder
        raise
    except DAMAGED as error:
        raise ValueError(f"{folder} cannot be loaded: {' '.join(str(error).split()):.500}") from error
    if (damaged := first_not_finite(model.state_dict())) is not None:
        raise ValueError(f"{folder}: {damaged} holds NaN or infinity")
    if getattr(model.config, "backend", None) == "triton" and (why_not := _triton_unavailable()):
        raise ValueError(f'{config}: backend=\'triton\' cannot run here: {why_not}; set "backend": "auto"')
    return model


def _triton_unavailable() -> str | None:
    return triton_unavailable(torch.empty(0, device="cuda" if torch.cuda.is_available() else "cpu"))


def load(path: Path | str, device: torch.device | str = "cpu", *, merged: bool = True) -> Predictor:
    """Return a predictor for the model in a folder.

    Args:
        path: a run folder, or a folder that `save_pretrained` or `save` wrote.
        device: where the model runs.
        merged: use the merged model, merging it if necessary; otherwise the model with its branches.
    """
    folder = model_folder(Path(path), *((MERGED, MODEL) if merged else (MODEL,)))
    model = load_model(folder)
    if merged:
        reparameterize(model)
    elif getattr(model.config, "merged", False):
        raise ValueError(f"the model in {folder} is merged: it has no branches")
    return Predictor(model, folder, device)


def save(model: Model, folder: Path, preprocessor: Preprocessor | None) -> None:
    """Save a model and, unless it is None, its preprocessor (inputs.json)."""
    model.save_pretrained(folder)
    if preprocessor is not None:
        save_preprocessor(preprocessor, folder)


def save_preprocessor(preprocessor: Preprocessor, folder: Path) -> None:
    """Write inputs.json into a folder, which is created if needed."""
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_write(folder / INPUTS_FILE) as draft:
        draft.write_text(preprocessor.to_json(), encoding="ascii")

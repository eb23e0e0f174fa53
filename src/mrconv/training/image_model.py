"""The image model of an experiment."""

from __future__ import annotations

from mrconv import MRConvNeXt
from mrconv.config import BranchOptions, StageOptions, values_of
from mrconv.hub import Model
from mrconv.tasks import Prepared

from .experiment import Experiment


def build_image_model(experiment: Experiment, data: Prepared) -> Model:
    """Return the experiment's MRConvNeXt for a task's images."""
    e = experiment
    if not e.depths:
        raise ValueError(f"{data.name} is a task of images: set depths, dims and kernel_sizes, with a value per stage")
    return MRConvNeXt(
        n_classes=len(data.classes),
        in_channels=data.channels,
        image_size=data.image_size,
        depths=e.depths,
        dims=e.dims,
        kernel_sizes=e.kernel_sizes,
        mixer=e.mixer,
        mixer_options=dict(e.mixer_options) or None,
        dropout=e.dropout,
        **values_of(e, BranchOptions),
        **values_of(e, StageOptions),
    )

"""timm imports torchvision, whose compiled operators a CPU-only environment may lack: declare those it looks up."""

import torch

_library = torch.library.Library("torchvision", "DEF")
for _schema in (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
):
    _library.define(_schema)

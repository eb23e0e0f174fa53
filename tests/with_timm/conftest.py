"""Declare the compiled operators of torchvision that timm looks up and a CPU-only environment lacks."""

import subprocess
import sys

import torch

if subprocess.run([sys.executable, "-c", "import torchvision"], capture_output=True).returncode != 0:
    _library = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _library.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

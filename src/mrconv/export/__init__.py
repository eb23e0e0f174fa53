"""Export of merged models to files that run without mrconv: ONNX, `torch.export` and AOTInductor."""

from .exporting import MAX_ERRORS, Exported, ExportFailed, export
from .formats import FORMATS

__all__ = ["FORMATS", "MAX_ERRORS", "ExportFailed", "Exported", "export"]

"""Custom data: arrays, tables, texts, recordings and images from local files."""

from .task import CustomData

__all__ = ["CustomData"]

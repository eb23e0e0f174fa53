"""An HTTP server for a trained model: predictions, streams, metrics and a demo page."""

from .app import Options, create_app
from .model_description import describe_model

__all__ = ["Options", "create_app", "describe_model"]

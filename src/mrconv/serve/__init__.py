"""An HTTP server for a trained model: predictions, streams, metrics and a demo page."""

from .app import Options, create_app
from .served_model import ServedModel

__all__ = ["Options", "ServedModel", "create_app"]

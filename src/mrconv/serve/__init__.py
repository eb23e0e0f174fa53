"""A trained model as an HTTP service: answers, streams, measures, and a page to try it on."""

from .app import Options, create_app
from .predictor import Served

__all__ = ["Options", "Served", "create_app"]

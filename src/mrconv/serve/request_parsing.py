"""HTTP request bodies as inputs of a model, by their media type."""

from __future__ import annotations

from mrconv.inference import Predictor
from mrconv.tasks import DataError
from mrconv.tasks.raw_inputs import Examples, decode, parse_json

UNSPECIFIED = ("application/octet-stream", "application/x-www-form-urlencoded", "")
"""Media types that clients send by default: the body is read as the kind that the model takes."""


class UnsupportedMediaType(DataError):
    """A body of a kind that the model does not take."""


def parse_body(predictor: Predictor, content: bytes, media_type: str) -> Examples:
    """Return the preprocessed body of a request; raise DataError if it does not fit the model."""
    if media_type == "application/json":
        return predictor.raw_inputs.preprocess(parse_json(decode(content)))
    family, kind = media_type.partition("/")[0], predictor.preprocessor.kind
    if family in ("text", "audio", "image"):
        if family != kind and (family, kind) != ("text", "tokens"):
            raise UnsupportedMediaType(f"the model takes {kind}, not {family}")
    elif media_type not in UNSPECIFIED:
        raise UnsupportedMediaType(f"unsupported media type {media_type:.60}; send JSON, text, audio or an image")
    if kind == "values":
        raise UnsupportedMediaType('the model takes numbers: send JSON, {"values": [[...], ...]}')
    if predictor.takes_pairs:
        raise UnsupportedMediaType('the model takes pairs: send JSON, {"text": "...", "text2": "..."}')
    return predictor.raw_inputs.preprocess(content)

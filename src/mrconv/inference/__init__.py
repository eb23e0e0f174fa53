"""Inference with a saved model: raw inputs in, labels and probabilities out.

Example:
    >>> from pathlib import Path
    >>> from mrconv import SequenceClassifier, inference
    >>> from mrconv.tasks.preprocessing import Preprocessor
    >>> model = SequenceClassifier(n_classes=2, vocab_size=4, d_model=8, depth=1, l_max=16)
    >>> inference.save(model, Path("tiny"), Preprocessor("text", 16, ("no", "yes"), tuple("abcd")))
    >>> predictor = inference.load("tiny")  # the same as mrconv.load
    >>> for prediction in predictor.predict(["abba", "cd"]):
    ...     print(prediction.length, sorted(prediction.probabilities))
    4 ['no', 'yes']
    2 ['no', 'yes']
"""

from .prediction import Prediction
from .predictor import Predictor
from .saved_models import load, load_model, save
from .stream import Stream

__all__ = ["Prediction", "Predictor", "Stream", "load", "load_model", "save"]

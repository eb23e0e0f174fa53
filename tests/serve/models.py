"""Models of every kind, untrained but with random statistics, saved as training saves them."""

import numpy as np
import torch

from mrconv import LanguageModel, MRConvNeXt, SequenceClassifier, TwoTowerClassifier, inference, reparameterize
from mrconv.tasks.listops import VOCABULARY
from mrconv.tasks.preprocessing import Preprocessor
from mrconv.tasks.vocabulary import character_vocabulary

from ..conftest import randomise

CHARACTERS = character_vocabulary(["abcdefghijklmnopqrstuvwxyz ,.!?"])
WORDS = ("bed", "cat", "happy")
RATE = 8000
INPUTS = {
    "text": Preprocessor("text", 200, ("negative", "positive"), CHARACTERS),
    "listops": Preprocessor("tokens", 100, tuple("0123456789"), VOCABULARY),
    "audio": Preprocessor("audio", 800, WORDS, sample_rate=RATE, scale=1 / 2**12, shift=0.1),
    "positions": Preprocessor(
        "audio", 800, WORDS, sample_rate=RATE, scale=np.linspace(1e-4, 2e-4, 800)[:, None], shift=np.zeros((800, 1))
    ),
    "image": Preprocessor("image", 64, ("dark", "light"), channels=3, height=8, width=8, scale=1 / 255, shift=-0.5),
    "mrconvnext": Preprocessor(
        "image", 64, ("dark", "light"), channels=3, height=8, width=8, scale=1 / 255, shift=-0.5
    ),
    "values": Preprocessor("values", 50, ("a", "b", "c"), channels=2),
    "pair": Preprocessor("text", 60, ("no", "yes"), CHARACTERS),
    "language": Preprocessor("text", 100, (), tuple("abcdefgh \n")),
}


def build(name, **options):
    """Return the merged model of a kind, and the description of its inputs."""
    torch.manual_seed(0)
    inputs = INPUTS[name]
    shape = {"vocab_size": len(inputs.vocabulary)} if inputs.vocabulary else {"d_input": inputs.channels}
    cls = {"pair": TwoTowerClassifier, "language": LanguageModel}.get(name, SequenceClassifier)
    if inputs.classes:
        shape["n_classes"] = len(inputs.classes)
    small = {"d_model": 16, "depth": 2, "l_max": inputs.length, "kernel_size": 4, "block_norm": "layer"}
    if name == "mrconvnext":
        stages = {"depths": (1, 1), "dims": (8, 16), "kernel_sizes": (4, 2), "patch_size": 2, "layer_scale": 1.0}
        model = randomise(MRConvNeXt(n_classes=2, image_size=8, **stages)).eval()
    else:
        model = randomise(cls(**(small | shape | options))).eval()
    with torch.no_grad():
        if inputs.classes:
            model.head.weight.mul_(4)  # so that predictions differ
    return reparameterize(model), inputs


def save(name, folder, **options):
    """Save the model of a kind in a folder; return the folder."""
    model, inputs = build(name, **options)
    inference.save(model, folder, inputs)
    return folder


def load(name, folder, **options):
    """Save the model of a kind and return its predictor."""
    return inference.load(save(name, folder, **options))

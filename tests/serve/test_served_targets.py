"""Models of labels, values and positions behind the server, and descriptions that do not fit a model."""

import numpy as np
import pytest
import torch

from mrconv import SequenceClassifier, SequenceLabeller, SequenceRegressor, inference
from mrconv.tasks.preprocessing import Preprocessor

testclient = pytest.importorskip("starlette.testclient")
VALUES = np.random.default_rng(0).normal(size=(6, 2)).tolist()
MODELS = {
    "labels": (SequenceClassifier, {"n_classes": 2}),
    "values": (SequenceRegressor, {"n_outputs": 2}),
    "positions": (SequenceLabeller, {"n_classes": 2}),
}


def save(target, folder, described=None):
    """Save an untrained model for sequences of 6 positions; return the folder."""
    torch.manual_seed(0)
    cls, options = MODELS[target]
    model = cls(d_input=2, d_model=8, depth=1, l_max=6, **options)
    inference.save(model, folder, Preprocessor("values", 6, ("a", "b"), channels=2, target=described or target))
    return folder


@pytest.mark.parametrize("target", list(MODELS))
def test_an_answer_has_what_the_target_has(tmp_path, target):
    from mrconv.serve.app import Options, create_app

    predictor = inference.load(save(target, tmp_path))
    predicted = predictor.predict(np.array(VALUES))
    with testclient.TestClient(create_app(predictor, Options())) as client:
        assert client.get("/model").json()["target"] == target
        answer = client.post("/predict", json={"values": VALUES}).json()
        with client.websocket_connect("/stream") as socket:
            socket.send_json({"values": VALUES})
            streamed = socket.receive_json()
    assert answer["label"] == predicted.label
    if target == "labels":
        assert set(answer) == {"label", "probabilities", "length", "notes"}
        assert answer["probabilities"] == pytest.approx(predicted.probabilities)
        assert streamed["probabilities"] == pytest.approx(predicted.probabilities, rel=1e-4)
    elif target == "values":
        assert answer["values"] == pytest.approx(predicted.values)
        assert streamed["values"] == pytest.approx(predicted.values, rel=1e-4)
    else:
        assert answer["positions"] == predicted.positions
        assert len(answer["positions"]) == 6
        assert streamed["label"] == predicted.positions[-1]


def test_probabilities_exist_for_classes_only(tmp_path):
    with pytest.raises(ValueError, match="the model predicts values, not probabilities: use predict"):
        inference.load(save("values", tmp_path / "values")).predict_proba(np.array(VALUES))
    labeller = inference.load(save("positions", tmp_path / "positions"))
    assert labeller.predict_proba(np.array(VALUES[:4])).shape == (4, 2)
    with pytest.raises(ValueError, match="different numbers of positions: give one at a time"):
        labeller.predict_proba([np.array(VALUES), np.array(VALUES[:4])])


def test_a_description_of_another_target_is_rejected(tmp_path):
    save("values", tmp_path, described="positions")
    with pytest.raises(
        ValueError, match=r"inputs\.json describes a model with target positions; this is a SequenceReg"
    ):
        inference.load(tmp_path)

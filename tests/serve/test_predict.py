"""/predict: every kind of input, concurrent requests, and rejected bodies."""

import asyncio
import io
import json
import random

import httpx
import numpy as np
import pytest
import soundfile
import torch
from PIL import Image

from mrconv import inference
from mrconv.serve.request_parsing import parse_body
from mrconv.tasks import DataError

from .models import CHARACTERS, INPUTS, RATE, build, load, save


def wav(samples, rate=RATE, subtype="PCM_16", form="WAV"):
    file = io.BytesIO()
    soundfile.write(file, samples, rate, subtype=subtype, format=form)
    return file.getvalue()


def png(pixels):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def post(server, content, kind="application/json", route="/predict"):
    content = json.dumps(content) if isinstance(content, dict | list) else content
    return httpx.post(server.url + route, content=content, headers={"content-type": kind}, timeout=30)


def check_rejected(server, content, kind, status, message):
    response = post(server, content, kind)
    assert response.status_code == status
    assert message in response.json()["error"]


@torch.no_grad()
def expected(name, *sequences):
    """Return the probabilities of the model for preprocessed sequences."""
    model, _ = build(name)
    if name == "mrconvnext":
        sequences = [x.reshape(8, 8, 3).transpose(2, 0, 1) for x in sequences]
    logits = model(*(torch.from_numpy(x)[None] for x in sequences))
    logits = logits[:, -1] if name == "language" else logits
    return logits.softmax(-1)[0].numpy()


def encoded(text, end=True):
    return np.array([CHARACTERS.index(c) for c in text] + [2] * end)


def probabilities(response):
    assert response.status_code == 200, response.text
    return np.array(list(response.json()["probabilities"].values()))


def test_text_as_json_and_as_plain_text(text_server):
    text = "a fine film!"
    response = post(text_server, {"text": text})
    assert np.allclose(probabilities(response), expected("text", encoded(text)), atol=1e-6)
    answer = response.json()
    assert answer["label"] == max(answer["probabilities"], key=answer["probabilities"].get)
    assert list(answer["probabilities"]) == ["negative", "positive"]
    assert answer["length"] == len(text) + 1
    assert answer["notes"] == []
    assert post(text_server, text, "text/plain; charset=utf-8").json() == answer
    assert post(text_server, {"tokens": list(text)}).json() == answer


def test_a_long_text_is_cut_as_in_training_and_noted(text_server):
    text = "ab" * 150
    response = post(text_server, {"text": text})
    assert np.allclose(probabilities(response), expected("text", encoded(text[:199])), atol=1e-6)
    assert response.json()["notes"] == ["only the first 199 of 300 symbols were used"]


def test_characters_outside_the_vocabulary_are_unknown(text_server):
    tokens = encoded("abc")
    tokens[1] = 1
    response = post(text_server, {"text": "aÜc"})
    assert np.allclose(probabilities(response), expected("text", tokens), atol=1e-6)
    assert response.json()["notes"] == ["1 symbol is unknown to the model"]
    response = post(text_server, "aÜ日" + "b" * 200 + "本", "text/plain")
    assert response.json()["notes"] == [
        "only the first 199 of 204 symbols were used",
        "2 symbols are unknown to the model",
    ]


def test_recordings_at_the_rate_of_training_and_at_others(audio_server):
    samples = np.random.default_rng(0).integers(-8000, 8000, 800).astype(np.int16)
    values = (samples[:, None] / 2**12 + 0.1).astype(np.float32)
    truth = expected("audio", values)
    for kind, content in (("audio/wav", wav(samples)), ("audio/flac", wav(samples, form="FLAC"))):
        response = post(audio_server, content, kind)
        assert np.allclose(probabilities(response), truth, atol=1e-6)
        assert response.json()["notes"] == []
    assert np.allclose(probabilities(post(audio_server, wav(samples), "application/octet-stream")), truth, atol=1e-6)
    assert np.allclose(probabilities(post(audio_server, {"values": samples.tolist()})), truth, atol=1e-6)
    floats = wav(samples / 2**15, subtype="FLOAT")
    assert np.allclose(probabilities(post(audio_server, floats, "audio/wav")), truth, atol=1e-6)
    stereo = post(audio_server, wav(np.stack([samples, samples], 1)), "audio/wav")
    assert np.allclose(probabilities(stereo), truth, atol=1e-6)
    assert stereo.json()["notes"] == ["2 channels were averaged"]

    t = np.arange(2 * 44100) / 44100
    tone = (8000 * np.sin(2 * np.pi * 300 * t)).astype(np.int16)
    response = post(audio_server, wav(tone, 44100), "audio/wav")
    assert response.json()["notes"] == [
        "resampled from 44,100 to 8,000 samples a second",
        "only the first 0.10 of 2.00 seconds were used",
    ]
    resampled = (8000 * np.sin(2 * np.pi * 300 * np.arange(800) / RATE))[:, None] / 2**12 + 0.1
    assert np.allclose(probabilities(response), expected("audio", resampled.astype(np.float32)), atol=0.01)


def test_a_short_recording_is_padded_with_zeros_as_in_training(audio_server):
    samples = np.arange(500, dtype=np.int16)
    padded = np.pad(samples, (0, 300))[:, None] / np.float32(2**12) + np.float32(0.1)
    response = post(audio_server, wav(samples), "audio/wav")
    assert np.allclose(probabilities(response), expected("audio", padded), atol=1e-6)
    assert response.json()["notes"] == ["500 values were padded with 300 zeros"]


LISTOPS = np.array([INPUTS["listops"].vocabulary.index(symbol) for symbol in ("[MAX", "2", "9", "]", "<eos>")])
PIXELS = np.arange(192, dtype=np.uint8).reshape(8, 8, 3)
GREY = np.full((64, 3), 51 / 255 - 0.5, np.float32)


@pytest.mark.parametrize(
    ("name", "content", "kind", "sequences", "notes"),
    [
        ("listops", b"[MAX 2  9 ]", "text/plain", [LISTOPS], []),
        ("listops", {"tokens": ["[MAX", 2, 9, "]"]}, "application/json", [LISTOPS], []),
        ("values", {"values": [[1, 2.5]] * 50}, "application/json", [np.full((50, 2), [1, 2.5], np.float32)], []),
        ("image", png(np.full((8, 8, 3), 51, np.uint8)), "image/png", [GREY], []),
        ("image", png(np.full((8, 8), 51, np.uint8)), "image/png", [GREY], []),
        ("image", png(np.full((9, 5), 51, np.uint8)), "image/png", [GREY], ["resized from 5 x 9 to 8 x 8 pixels"]),
        ("mrconvnext", png(PIXELS), "image/png", [PIXELS.reshape(64, 3) / np.float32(255) - np.float32(0.5)], []),
        ("pair", {"text": "one", "text2": "longer"}, "application/json", [encoded("one"), encoded("longer")], []),
        ("language", {"text": "abca"}, "application/json", [np.array([0, 1, 2, 0])], []),
    ],
)
def test_other_kinds(name, content, kind, sequences, notes, tmp_path):
    content = json.dumps(content).encode() if isinstance(content, dict) else content
    predictor = load(name, tmp_path)
    examples = parse_body(predictor, content, kind)
    assert examples[0].notes == notes
    assert all(np.allclose(each.x, x, atol=1e-6) for each, x in zip(examples, sequences, strict=True))
    assert np.allclose(predictor.probabilities([examples])[0], expected(name, *sequences), atol=1e-6)


def test_a_model_without_inputs_json_takes_token_ids(tmp_path):
    folder = save("text", tmp_path)
    (folder / "inputs.json").unlink()
    predictor = inference.load(folder)
    (example,) = predictor.raw_inputs.preprocess({"tokens": [8, 9, "10", 2]})
    assert example.x.tolist() == [8, 9, 10, 2]
    assert predictor.classes == ("0", "1")


@pytest.mark.parametrize("options", [{}, {"bidirectional": True}, {"bidirectional": True, "mask_padding": True}])
def test_a_prediction_does_not_depend_on_the_batch(options, tmp_path):
    predictor = load("text", tmp_path, **options)
    texts = ["abc", "a much longer text", "x", "cba", "z" * 150]
    for text, prediction in zip(texts, predictor.predict(texts), strict=True):
        (single,) = predictor.predict([text])
        assert single.probabilities == pytest.approx(prediction.probabilities, abs=1e-6)


def test_a_non_finite_output_does_not_affect_the_batch(tmp_path):
    predictor = load("values", tmp_path)
    good, bad = (predictor.raw_inputs.preprocess({"values": [values] * 50}) for values in ([1, 2], [1e20, -1e20]))
    batch = predictor.probabilities([bad, good, bad])
    assert np.allclose(batch[1], predictor.probabilities([good])[0])
    with pytest.raises(DataError, match="the model's output for this input is not finite"):
        predictor.interpret(batch[0], 1, [])


@pytest.mark.parametrize(
    ("content", "kind", "status", "message"),
    [
        ("{", "application/json", 400, "the input is not JSON"),
        ("[" * 100_000, "application/json", 400, "the input is not JSON"),
        ("[1, 2]", "application/json", 400, "expected a JSON object; got [1, 2]"),
        (b"\xff", "application/json", 400, "the input is not UTF-8 (invalid start byte at byte 0)"),
        (b"\xff", "text/plain", 400, "the input is not UTF-8"),
        ({}, "application/json", 400, "expected an object with one of text or tokens; got none"),
        ({"text": "a", "tokens": []}, "application/json", 400, "expected an object with one of text or tokens"),
        ({"text": "a", "more": 1}, "application/json", 400, "got 'text', 'more'"),
        ('{"\\ud800": 1}', "application/json", 400, "got '\\ud800'"),
        ({"values": [1]}, "application/json", 400, "expected an object with one of text or tokens; got 'values'"),
        ({"text": 1}, "application/json", 400, "text must be a string; got 1"),
        ({"tokens": "abc"}, "application/json", 400, "tokens must be a list of symbols; got 'abc'"),
        ({"tokens": [True]}, "application/json", 400, "tokens must be a list of symbols; got [True]"),
        ({"tokens": ["a", "Ü"]}, "application/json", 400, "unknown symbol 'Ü' at position 1"),
        ({"tokens": ["ab"]}, "application/json", 400, "unknown symbol 'ab' at position 0"),
        ("x", "audio/wav", 415, "the model takes text, not audio"),
        ("x", "video/mp4", 415, "unsupported media type video/mp4"),
    ],
)
def test_invalid_texts_are_rejected(text_server, content, kind, status, message):
    check_rejected(text_server, content, kind, status, message)


@pytest.mark.parametrize(
    ("content", "kind", "status", "message"),
    [
        ({"values": [[1, 2]]}, "application/json", 400, "numbers of shape (length, 1); got the shape (1, 2)"),
        ({"values": [[1], [1, 2]]}, "application/json", 400, "got lists that differ in length"),
        ({"values": ["1"]}, "application/json", 400, "which is not a number"),
        ({"values": [None]}, "application/json", 400, "got None, which is not a number"),
        ({"values": [1, True]}, "application/json", 400, "got True, which is not a number"),
        ({"values": [[1], ["x"]]}, "application/json", 400, "got 'x', which is not a number"),
        ({"values": "12"}, "application/json", 400, "got '12', which is not a number"),
        ({"values": [[[1]], [[1, 2]]]}, "application/json", 400, "got lists nested more than two deep"),
        ({"values": [1, 3e38, -3e38] * 9}, "application/json", 400, "the model's output for this input is not finite"),
        ({"values": []}, "application/json", 400, "got the shape (0, 1)"),
        ({"values": 3}, "application/json", 400, "got the shape ()"),
        ('{"values": [1, NaN]}', "application/json", 400, "values must be finite"),
        ('{"values": [1e39]}', "application/json", 400, "values must be finite"),
        ({"text": "a"}, "application/json", 400, "expected an object with one of values; got 'text'"),
        (b"RIFF", "audio/wav", 400, "cannot read the recording"),
        (b"", "audio/wav", 400, "cannot read the recording"),
        (wav(np.zeros(0, np.int16)), "audio/wav", 400, "the recording has no samples"),
        (b"", "image/png", 415, "the model takes audio, not image"),
    ],
)  # fmt: skip
def test_invalid_recordings_are_rejected(audio_server, content, kind, status, message):
    check_rejected(audio_server, content, kind, status, message)


@pytest.mark.parametrize(
    ("name", "content", "kind", "message"),
    [
        ("listops", b"[MAX 2 x ]", "text/plain", "unknown symbol 'x' at position 2; the model knows 0 1 2"),
        ("image", b"GIF", "image/gif", "the image is not a PNG or JPEG file"),
        ("image", png(np.zeros((1, 2**25 + 1), np.uint8)), "image/png", "expected at most 33,554,432"),
        ("image", b'{"values": [[1, 2, 3]]}', "application/json", "an image has 64 pixels, 8 x 8; got 1"),
        ("values", b"1 2 3", "text/plain", "the model takes values, not text"),
        ("values", b"1 2 3", "", "the model takes numbers: send JSON"),
        ("pair", b"one", "text/plain", "the model takes pairs: send JSON"),
        (
            "pair",
            b'{"text": "one"}',
            "application/json",
            "one of text or tokens and one of text2 or tokens2; got 'text'",
        ),
        ("language", b"", "text/plain", "expected at least one symbol"),
        ("language", b"aXb", "text/plain", "unknown symbol 'X' at position 1"),
    ],
)
def test_invalid_inputs_of_other_kinds_are_rejected(name, content, kind, message, tmp_path):
    predictor = load(name, tmp_path)
    with pytest.raises(DataError) as error:
        parse_body(predictor, content, kind)
    assert message in str(error.value)


def test_other_routes_and_methods(text_server):
    assert httpx.get(f"{text_server.url}/nothing").json() == {"error": "Not Found"}
    assert httpx.get(f"{text_server.url}/predict").status_code == 405
    assert httpx.get(f"{text_server.url}/health").json() == {"status": "ok"}
    about = httpx.get(f"{text_server.url}/model").json()
    assert about["kind"] == "text"
    assert about["classes"] == ["negative", "positive"]
    assert about["streams"]


def correct_answers(server, requests, clients):
    """Send requests from many clients at once; return the number of correct answers."""
    generator = random.Random(0)
    texts = ["".join(generator.choices("abcdefgh ", k=generator.randint(1, 180))) for _ in range(50)]
    expected_answers = [probabilities(post(server, text, "text/plain")) for text in texts]

    async def client(number, session):
        correct = 0
        for i in range(number, requests, clients):
            response = await session.post(f"{server.url}/predict", json={"text": texts[i % 50]})
            correct += np.allclose(probabilities(response), expected_answers[i % 50], atol=1e-5)
        return correct

    async def run_clients():
        sessions = [httpx.AsyncClient(timeout=60) for _ in range(clients)]
        counts = await asyncio.gather(*(client(i, session) for i, session in enumerate(sessions)))
        for session in sessions:
            await session.aclose()
        return sum(counts)

    return asyncio.run(run_clients())


@pytest.mark.parametrize("requests", [320, pytest.param(10_000, marks=pytest.mark.slow)])
def test_32_clients_at_once_get_every_answer(text_server, requests):
    before = text_server.metric("mrconv_requests_total", route="/predict", status="200")
    batches = text_server.metric("mrconv_batch_size_count")
    assert correct_answers(text_server, requests, 32) == requests
    assert text_server.metric("mrconv_requests_total", route="/predict", status="200") - before == requests + 50
    assert text_server.metric("mrconv_batch_size_count") - batches < requests / 2  # requests shared batches
    assert text_server.metric("mrconv_requests_waiting") == 0
    assert text_server.metric("mrconv_requests_in_flight") == 1  # the request to /metrics

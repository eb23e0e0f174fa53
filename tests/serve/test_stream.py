"""/stream: predictions equal those of the parallel form, each connection has a state, and all are cleaned up."""

import asyncio
import json
import re
import socket
import threading

import httpx
import numpy as np
import pytest
import torch
from starlette.websockets import WebSocketState
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from mrconv.serve.session import StreamSession, generate_text
from mrconv.serve.websockets import ReadAhead
from mrconv.tasks import DataError
from mrconv.tasks.preprocessing import Preprocessor

from .conftest import serving
from .models import INPUTS, build, load, save

SAMPLES = np.random.default_rng(1).integers(-9000, 9000, 800).astype(np.int16)
CUTS = (1, 8, 9, 137, 400, 731)


def exchange(stream, message):
    stream.send(message if isinstance(message, bytes) else json.dumps(message))
    return json.loads(stream.recv(timeout=30))


def values(answer):
    return np.array(list(answer["probabilities"].values()))


def process(session, message):
    pieces, end = session.pieces(message)
    for piece in pieces:
        assert len(piece) <= session.predictor.preprocessor.length
        session.feed(piece)
    return session.answer(end)


@torch.no_grad()
def parallel(name, x):
    model, _ = build(name)
    return model(torch.from_numpy(x)[None]).softmax(-1)[0].numpy()


def normalised(samples):
    return (samples[:, None] / 2**12 + 0.1).astype(np.float32)


def test_the_running_prediction_is_that_of_the_sequence_so_far(audio_server):
    with connect(audio_server.socket) as stream:
        for start, stop in zip((0, *CUTS), CUTS, strict=False):
            answer = exchange(stream, SAMPLES[start:stop].tobytes())
            assert answer["position"] == stop
            assert np.allclose(values(answer), parallel("audio", normalised(SAMPLES[:stop])), atol=1e-5)
        answer = exchange(stream, {"values": SAMPLES[CUTS[-1] :].tolist()})
        complete = httpx.post(f"{audio_server.url}/predict", json={"values": SAMPLES.tolist()}).json()
        assert np.allclose(values(answer), values(complete), atol=1e-5)
        assert answer["label"] == complete["label"]


def test_the_end_gives_the_answer_of_predict_and_starts_a_new_sequence(audio_server, text_server):
    with connect(audio_server.socket) as stream:
        for _ in range(2):
            assert exchange(stream, SAMPLES[:300].tobytes())["position"] == 300
            answer = exchange(stream, {"end": True})
            assert (answer["position"], answer["end"]) == (800, True)
            complete = httpx.post(f"{audio_server.url}/predict", json={"values": SAMPLES[:300].tolist()}).json()
            assert np.allclose(values(answer), values(complete), atol=1e-5)
    with connect(text_server.socket) as stream:
        for piece in ("a fi", "n", "e film, Ü"):
            exchange(stream, {"text": piece})
        answer = exchange(stream, {"end": True})
        complete = httpx.post(f"{text_server.url}/predict", json={"text": "a fine film, Ü"}).json()
        assert answer["position"] == complete["length"]
        assert np.allclose(values(answer), values(complete), atol=1e-5)


def test_a_sequence_may_be_longer_than_the_model(audio_server):
    long = np.tile(SAMPLES, 4)
    with connect(audio_server.socket) as stream:
        for pieces in (7, 1):
            for piece in np.array_split(long, pieces):
                answer = exchange(stream, piece.tobytes())
            assert answer["position"] == 3200
            assert np.allclose(values(answer), parallel("audio", normalised(long)), atol=1e-4)
            assert exchange(stream, {"end": True})["position"] == 3200


def test_streams_are_independent(audio_server):
    with connect(audio_server.socket) as one, connect(audio_server.socket) as other:
        for start in range(0, 800, 100):
            exchange(one, SAMPLES[start : start + 100].tobytes())
            exchange(other, SAMPLES[::-1][start : start + 100].tobytes())
        assert audio_server.metric("mrconv_streams") == 2
        answers = [exchange(stream, {"end": True}) for stream in (one, other)]
    expected = [parallel("audio", normalised(each)) for each in (SAMPLES, SAMPLES[::-1])]
    for answer, probabilities in zip(answers, expected, strict=True):
        assert np.allclose(values(answer), probabilities, atol=1e-5)
    assert audio_server.reaches("mrconv_streams", 0)


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ("{", "the input is not JSON"),
        ("[]", "expected a JSON object; got []"),
        ({"end": True}, "the sequence is empty"),
        ({"text": "a"}, "expected an object with one of values or end; got 'text'"),
        ('{"\\ud800": 1}', "expected an object with one of values or end; got '\\ud800'"),
        ({"values": [1], "end": True}, "expected an object with one of values or end; got 'values', 'end'"),
        ({"values": [[1, 2]]}, "got the shape (1, 2)"),
        (b"abc", "expected samples of two bytes each; got 3 bytes"),
        (b"", "expected samples of two bytes each; got 0 bytes"),
    ],
)
def test_an_invalid_message_is_reported_and_leaves_the_state(audio_server, message, error):
    with connect(audio_server.socket) as stream:
        stream.send(message if isinstance(message, str | bytes) else json.dumps(message))
        assert error in json.loads(stream.recv(timeout=30))["error"]
        answer = exchange(stream, SAMPLES[:50].tobytes())
        assert answer["position"] == 50
        assert np.allclose(values(answer), parallel("audio", normalised(SAMPLES[:50])), atol=1e-5)


def test_values_are_normalised_by_position(tmp_path):
    predictor = load("positions", tmp_path)
    session = StreamSession(predictor)
    for piece in np.array_split(SAMPLES, 5):
        answer = process(session, piece.astype("<i2").tobytes())
    scaled = SAMPLES[:, None] * INPUTS["positions"].scale
    assert np.allclose(values(answer), parallel("positions", scaled.astype(np.float32)), atol=1e-5)
    with pytest.raises(DataError, match="normalises each of its 800 positions"):
        process(session, b"\0\0")


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({"mixer": "attention"}, 800),
        ({"mixer": "attention", "mixer_options": {"positions": "learned"}}, 200),
        ({"mixer": "mega"}, 800),
        ({"mixer": "mrconv-attention", "mixer_options": {"chunk": None}}, 800),
        ({"mixer": "mega-chunk"}, None),
        ({}, None),
    ],
)
def test_streams_with_a_growing_state_have_a_limit(options, limit, tmp_path):
    predictor = load("text", tmp_path, **options)
    assert predictor.max_positions == limit
    session = StreamSession(predictor)
    process(session, json.dumps({"text": "a" * 190}))
    for _ in range(limit is None or (limit - 200) // 200):
        process(session, json.dumps({"text": "b" * 200}))
    if limit is not None:
        with pytest.raises(
            DataError, match=f"may have {limit - 1} positions; with this message the stream would have {limit}"
        ):
            session.pieces(json.dumps({"text": "c" * 10}))
        assert process(session, json.dumps({"text": "c" * 9}))["position"] == limit - 1
        assert process(session, '{"end": true}')["position"] == limit


def test_generation_with_a_growing_state_has_a_limit(tmp_path):
    predictor = load("language", tmp_path, mixer="attention")
    assert len(generate_text(predictor, {"text": "abc", "new_tokens": 397}, lambda piece: None)["text"]) == 397
    with pytest.raises(DataError, match="text and new_tokens may together have 400 symbols; got 3 and 398"):
        generate_text(predictor, {"text": "abc", "new_tokens": 398}, print)


def test_other_requests_run_within_a_long_chunk_and_it_stops_with_its_client(audio_server):
    before = audio_server.metric("mrconv_stream_positions_total")
    with connect(audio_server.socket) as stream:
        stream.send(bytes(4_000_000))
        while audio_server.metric("mrconv_stream_positions_total") == before:
            pass
        assert httpx.post(f"{audio_server.url}/predict", json={"values": [1, 2]}).status_code == 200
        with pytest.raises(TimeoutError):
            stream.recv(timeout=0)
        stream.socket.shutdown(socket.SHUT_RDWR)
    assert audio_server.reaches("mrconv_streams", 0)
    assert audio_server.metric("mrconv_stream_positions_total") - before < 2_000_000


def test_a_disconnect_is_noticed_with_queued_messages(audio_server):
    before = audio_server.metric("mrconv_stream_positions_total")
    with connect(audio_server.socket) as stream:
        stream.send(bytes(8_000_000))
        for size in (8_000_000, 200, 200):
            stream.send(bytes(size))
    assert audio_server.reaches("mrconv_streams", 0, 5)
    assert audio_server.metric("mrconv_stream_positions_total") - before < 4_000_000


def test_messages_are_read_ahead_up_to_a_limit():
    sent = []

    class Socket:
        client_state = WebSocketState.CONNECTED

        async def receive(self):
            sent.append(len(sent))
            return {"type": "websocket.receive", "bytes": bytes(1000)}

    async def read():
        ahead = ReadAhead(Socket(), 5 * 2000)
        counts = []
        for _ in range(3):
            for _ in range(20):
                await asyncio.sleep(0)
            counts.append(len(sent))
            await ahead.next()
        ahead.task.cancel()
        return counts

    assert asyncio.run(read()) == [6, 7, 8]


def test_a_non_finite_output_is_reported_and_starts_a_new_sequence(audio_server):
    with connect(audio_server.socket) as stream:
        answer = exchange(stream, {"values": [3e38, -3e38] * 50})
        assert list(answer) == ["error"]
        assert "the model's output for this input is not finite" in answer["error"]
        assert "A new sequence starts" in answer["error"]
        answer = exchange(stream, SAMPLES[:50].tobytes())
        assert answer["position"] == 50
        assert np.allclose(values(answer), parallel("audio", normalised(SAMPLES[:50])), atol=1e-5)


def test_unknown_symbols_are_noted(text_server, tmp_path, monkeypatch):
    with connect(text_server.socket) as stream:
        assert exchange(stream, {"text": "aÜ"})["notes"] == ["1 symbol is unknown to the model"]
        assert exchange(stream, {"text": "日"})["notes"] == ["2 symbols are unknown to the model"]
        assert exchange(stream, {"end": True})["notes"] == ["2 symbols are unknown to the model"]
        assert exchange(stream, {"text": "a"})["notes"] == []
    monkeypatch.setitem(INPUTS, "language", Preprocessor("text", 100, (), ("<unk>", *"abcdefgh\n")))
    answer = generate_text(load("language", tmp_path), {"text": "abÜ", "new_tokens": 1}, lambda piece: None)
    assert answer["notes"] == ["1 symbol is unknown to the model"]


def test_models_that_cannot_stream_report_the_reason(tmp_path):
    for options, reason in (
        ({"bidirectional": True}, "bidirectional: it needs the future of its input and cannot stream.*variant=causal"),
        ({"mixer": "sgconv"}, "the mixer of the model, sgconv, does not support streaming"),
    ):
        assert re.search(reason, load("audio", tmp_path / "x", **options).no_stream)
    assert "pairs" in load("pair", tmp_path / "pair").no_stream
    with serving(save("audio", tmp_path / "both", bidirectional=True)) as server:
        with connect(server.socket) as stream:
            assert "experiment=speech-base variant=causal" in json.loads(stream.recv(timeout=30))["error"]
            with pytest.raises(ConnectionClosed) as closed:
                stream.recv(timeout=30)
        assert closed.value.rcvd.code == 1008
        assert server.metric("mrconv_streams") == 0
        assert httpx.post(f"{server.url}/predict", json={"values": [1, 2]}).status_code == 200


def test_a_language_model_generates_text(tmp_path):
    with serving(save("language", tmp_path)) as server, connect(server.socket) as stream:
        stream.send(json.dumps({"text": "abc", "new_tokens": 12, "temperature": 0}))
        pieces = []
        while "piece" in (answer := json.loads(stream.recv(timeout=30))):
            pieces.append(answer["piece"])
        model, inputs = build("language")
        tokens = model.generate(torch.tensor([[0, 1, 2]]), 12, temperature=0)[0]
        assert "".join(pieces) == answer["text"] == "".join(inputs.vocabulary[i] for i in tokens)
        texts = []
        for _ in range(2):
            stream.send(json.dumps({"text": "abc", "new_tokens": 30, "seed": 5, "top_k": 4, "top_p": 0.9}))
            while "piece" in (answer := json.loads(stream.recv(timeout=30))):
                pass
            texts.append(answer["text"])
        assert texts[0] == texts[1]
        for option in ('"temperature": 1e-40', f'"temperature": 1{"0" * 400}', '"top_p": 1e-300'):
            stream.send(f'{{"text": "abc", "new_tokens": 2, {option}}}')
            assert ["end" in json.loads(stream.recv(timeout=30)) for _ in range(3)] == [False, False, True]
        for message, error in (
            ({"text": ""}, "text must have from 1 to 100,000 symbols"),
            ({"prompt": "a"}, "text must be a string"),
            ({"text": "a", "heat": 1}, "unknown option 'heat'"),
            ({"text": "a", "temperature": "hot"}, "temperature must be a number"),
            ({"text": "a", "temperature": -1}, "temperature must not be negative"),
            ({"text": "a", "new_tokens": 0}, "new_tokens must be from 1 to 100,000"),
            ({"text": "a", "seed": -1}, "seed must be an integer"),
            ({"text": "X"}, "unknown symbol 'X' at position 0; the model knows a b c d e f g h   \\n"),
        ):
            assert error in exchange(stream, message)["error"]
        # a disconnect stops the generation
        stream.send(json.dumps({"text": "abc", "new_tokens": 100_000}))
        stream.recv(timeout=30)
        stream.socket.shutdown(socket.SHUT_RDWR)
        assert server.reaches("mrconv_streams", 0)
        assert server.reaches("mrconv_stream_positions_total", server.metric("mrconv_stream_positions_total"))
        server.process.terminate()
        assert server.process.communicate(timeout=30)[1] == ""


def test_clients_that_disconnect_leave_no_state(audio_server):
    def disconnect():
        with connect(audio_server.socket) as stream:
            exchange(stream, SAMPLES[:100].tobytes())
            stream.send(SAMPLES.tobytes())
            stream.socket.shutdown(socket.SHUT_RDWR)  # without a closing handshake, while an answer is sent

    before = audio_server.metric("process_open_fds")
    for _ in range(3):
        clients = [threading.Thread(target=disconnect) for _ in range(8)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        assert audio_server.reaches("mrconv_streams", 0)
    assert audio_server.reaches("process_open_fds", before)
    with connect(audio_server.socket) as stream:
        assert exchange(stream, b"\0\0")["position"] == 1


def test_pages_of_other_origins_are_rejected(limited_server):
    with pytest.raises(InvalidStatus, match="403"):
        connect(limited_server.socket, origin="http://elsewhere.example")
    with connect(limited_server.socket, origin=limited_server.url) as stream:
        stream.send("{}")
        assert "error" in json.loads(stream.recv())


def test_too_many_streams_and_idle_streams_are_closed(limited_server):
    with connect(limited_server.socket) as one, connect(limited_server.socket) as two:
        exchange(one, b"\0\0")
        exchange(two, b"\0\0")
        with connect(limited_server.socket) as three:
            assert "2 streams are open already" in json.loads(three.recv(timeout=30))["error"]
        for stream in (one, two):
            assert "no message for 1 seconds" in json.loads(stream.recv(timeout=30))["error"]
            with pytest.raises(ConnectionClosed):
                stream.recv(timeout=30)
    assert limited_server.reaches("mrconv_streams", 0)


def test_a_message_that_is_not_utf8_closes_the_stream_without_a_traceback(tmp_path):
    with serving(save("text", tmp_path)) as server:
        for pieces in ([b"\xff"], [b'{"text": "', b"\xc3\x28"]):
            with connect(server.socket) as stream:
                stream.send(pieces[0] if len(pieces) == 1 else pieces, text=True)
                with pytest.raises(ConnectionClosed) as closed:
                    stream.recv(timeout=30)
            assert closed.value.rcvd.code == 1007
        assert server.reaches("mrconv_streams", 0)
        server.process.terminate()
        assert server.process.communicate(timeout=30)[1] == ""


def test_a_json_message_has_the_limit_of_the_models_inputs(audio_server):
    about = httpx.get(f"{audio_server.url}/model").json()
    assert (about["max_json"], about["max_body"]) == (2**20, 10_000_000)
    with connect(audio_server.socket) as stream:
        answer = exchange(stream, {"values": [0] * 500_000})
        assert answer == {"error": "a JSON message may have 1,048,576 characters; got 1,500,012"}
        assert exchange(stream, {"values": [0] * 100})["position"] == 100


def test_a_message_that_is_too_large_closes_the_stream(limited_server):
    with connect(limited_server.socket) as stream:
        stream.send(bytes(200_000))
        with pytest.raises(ConnectionClosed) as closed:
            stream.recv(timeout=30)
    assert closed.value.rcvd.code == 1009
    assert limited_server.reaches("mrconv_streams", 0)

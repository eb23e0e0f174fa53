"""/stream: chunk by chunk what the parallel form gives, a state per connection, nothing left behind."""

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

from mrconv.serve import Served
from mrconv.serve.session import Stream, generate
from mrconv.serve.websockets import Ahead
from mrconv.tasks import DataError
from mrconv.tasks.preprocessing import Preprocessor

from .conftest import serving
from .models import INPUTS, build, save

SAMPLES = np.random.default_rng(1).integers(-9000, 9000, 800).astype(np.int16)
CUTS = (1, 8, 9, 137, 400, 731)


def say(stream, message):
    stream.send(message if isinstance(message, bytes) else json.dumps(message))
    return json.loads(stream.recv(timeout=30))


def values(answer):
    return np.array(list(answer["probabilities"].values()))


def fed(stream, message):
    pieces, end = stream.pieces(message)
    for piece in pieces:
        assert len(piece) <= stream.inputs.length
        stream.feed(piece)
    return stream.answer(end)


@torch.no_grad()
def parallel(name, x):
    model, _ = build(name)
    return model(torch.from_numpy(x)[None]).softmax(-1)[0].numpy()


def seen(samples):
    return (samples[:, None] / 2**12 + 0.1).astype(np.float32)


def test_the_running_prediction_is_that_of_the_sequence_so_far(audio_server):
    with connect(audio_server.socket) as stream:
        for start, stop in zip((0, *CUTS), CUTS, strict=False):
            answer = say(stream, SAMPLES[start:stop].tobytes())
            assert answer["position"] == stop
            assert np.allclose(values(answer), parallel("audio", seen(SAMPLES[:stop])), atol=1e-5)
        answer = say(stream, {"values": SAMPLES[CUTS[-1] :].tolist()})
        whole = httpx.post(f"{audio_server.url}/predict", json={"values": SAMPLES.tolist()}).json()
        assert np.allclose(values(answer), values(whole), atol=1e-5)
        assert answer["label"] == whole["label"]


def test_the_end_gives_what_predict_gives_and_a_new_sequence_begins(audio_server, text_server):
    with connect(audio_server.socket) as stream:
        for _ in range(2):
            assert say(stream, SAMPLES[:300].tobytes())["position"] == 300
            answer = say(stream, {"end": True})
            assert (answer["position"], answer["end"]) == (800, True)
            whole = httpx.post(f"{audio_server.url}/predict", json={"values": SAMPLES[:300].tolist()}).json()
            assert np.allclose(values(answer), values(whole), atol=1e-5)
    with connect(text_server.socket) as stream:
        for piece in ("a fi", "n", "e film, Ü"):
            say(stream, {"text": piece})
        answer = say(stream, {"end": True})
        whole = httpx.post(f"{text_server.url}/predict", json={"text": "a fine film, Ü"}).json()
        assert answer["position"] == whole["length"]
        assert np.allclose(values(answer), values(whole), atol=1e-5)


def test_a_sequence_may_be_longer_than_the_model(audio_server):
    long = np.tile(SAMPLES, 4)
    with connect(audio_server.socket) as stream:
        for pieces in (7, 1):
            for piece in np.array_split(long, pieces):
                answer = say(stream, piece.tobytes())
            assert answer["position"] == 3200
            assert np.allclose(values(answer), parallel("audio", seen(long)), atol=1e-4)
            assert say(stream, {"end": True})["position"] == 3200


def test_streams_do_not_know_of_each_other(audio_server):
    with connect(audio_server.socket) as one, connect(audio_server.socket) as other:
        for start in range(0, 800, 100):
            say(one, SAMPLES[start : start + 100].tobytes())
            say(other, SAMPLES[::-1][start : start + 100].tobytes())
        assert audio_server.metric("mrconv_streams") == 2
        answers = [say(stream, {"end": True}) for stream in (one, other)]
    truths = [parallel("audio", seen(each)) for each in (SAMPLES, SAMPLES[::-1])]
    for answer, truth in zip(answers, truths, strict=True):
        assert np.allclose(values(answer), truth, atol=1e-5)
    assert audio_server.settles("mrconv_streams", 0)


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ("{", "the body is not JSON"),
        ("[]", "expected a JSON object; got []"),
        ({"end": True}, "nothing came before the end"),
        ({"text": "a"}, "expected an object with one of values or end; got 'text'"),
        ('{"\\ud800": 1}', "expected an object with one of values or end; got '\\ud800'"),
        ({"values": [1], "end": True}, "expected an object with one of values or end; got 'values', 'end'"),
        ({"values": [[1, 2]]}, "got the shape (1, 2)"),
        (b"abc", "expected samples of two bytes each; got 3 bytes"),
        (b"", "expected samples of two bytes each; got 0 bytes"),
    ],
)
def test_a_bad_message_is_answered_and_changes_nothing(audio_server, message, why):
    with connect(audio_server.socket) as stream:
        stream.send(message if isinstance(message, str | bytes) else json.dumps(message))
        assert why in json.loads(stream.recv(timeout=30))["error"]
        answer = say(stream, SAMPLES[:50].tobytes())
        assert answer["position"] == 50
        assert np.allclose(values(answer), parallel("audio", seen(SAMPLES[:50])), atol=1e-5)


def test_values_normalised_by_their_instant_are(tmp_path):
    served = Served(save("instants", tmp_path))
    stream = Stream(served)
    for piece in np.array_split(SAMPLES, 5):
        answer = fed(stream, piece.astype("<i2").tobytes())
    row = SAMPLES[:, None] * INPUTS["instants"].scale
    assert np.allclose(values(answer), parallel("instants", row.astype(np.float32)), atol=1e-5)
    with pytest.raises(DataError, match="normalises each of its 800 positions"):
        fed(stream, b"\0\0")


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({"mixer": "attention"}, 800),
        ({"mixer": "attention", "mixer_options": {"positions": "learned"}}, 200),
        ({"mixer": "mega"}, 800),
        ({"mixer": "mrconv-attention", "mixer_options": {"chunk": None}}, 800),
        ({"mixer": "mega-chunk"}, None),
        ({}, None),
    ],
)
def test_a_state_that_grows_has_an_end(options, most, tmp_path):
    served = Served(save("text", tmp_path, **options))
    assert served.most == most
    stream = Stream(served)
    fed(stream, json.dumps({"text": "a" * 190}))
    for _ in range(most is None or (most - 200) // 200):
        fed(stream, json.dumps({"text": "b" * 200}))
    if most is not None:
        with pytest.raises(DataError, match=f"may have {most - 1} positions; with these it would have {most}"):
            stream.pieces(json.dumps({"text": "c" * 10}))
        assert fed(stream, json.dumps({"text": "c" * 9}))["position"] == most - 1
        assert fed(stream, '{"end": true}')["position"] == most


def test_a_writer_whose_state_grows_has_an_end(tmp_path):
    served = Served(save("writer", tmp_path, mixer="attention"))
    assert len(generate(served, {"text": "abc", "new_tokens": 397}, lambda piece: None)["text"]) == 397
    with pytest.raises(DataError, match="text and new_tokens may be 400 symbols; got 3 and 398"):
        generate(served, {"text": "abc", "new_tokens": 398}, print)


def test_a_long_chunk_lets_others_in_and_ends_with_its_client(audio_server):
    before = audio_server.metric("mrconv_stream_positions_total")
    with connect(audio_server.socket) as stream:
        stream.send(bytes(4_000_000))
        while audio_server.metric("mrconv_stream_positions_total") == before:
            pass
        assert httpx.post(f"{audio_server.url}/predict", json={"values": [1, 2]}).status_code == 200
        with pytest.raises(TimeoutError):
            stream.recv(timeout=0)
        stream.socket.shutdown(socket.SHUT_RDWR)
    assert audio_server.settles("mrconv_streams", 0)
    assert audio_server.metric("mrconv_stream_positions_total") - before < 2_000_000


def test_a_client_that_leaves_is_missed_whatever_it_has_sent(audio_server):
    before = audio_server.metric("mrconv_stream_positions_total")
    with connect(audio_server.socket) as stream:
        stream.send(bytes(8_000_000))
        for size in (8_000_000, 200, 200):
            stream.send(bytes(size))
    assert audio_server.settles("mrconv_streams", 0, 5)
    assert audio_server.metric("mrconv_stream_positions_total") - before < 4_000_000


def test_messages_are_read_ahead_up_to_a_limit():
    sent = []

    class Socket:
        client_state = WebSocketState.CONNECTED

        async def receive(self):
            sent.append(len(sent))
            return {"type": "websocket.receive", "bytes": bytes(1000)}

    async def read():
        ahead = Ahead(Socket(), 5 * 2000)
        counts = []
        for _ in range(3):
            for _ in range(20):
                await asyncio.sleep(0)
            counts.append(len(sent))
            await ahead.next()
        ahead.task.cancel()
        return counts

    assert asyncio.run(read()) == [6, 7, 8]


def test_values_that_are_too_much_for_the_model_are_told(audio_server):
    with connect(audio_server.socket) as stream:
        answer = say(stream, {"values": [3e38, -3e38] * 50})
        assert list(answer) == ["error"]
        assert "the model gives no numbers for this input" in answer["error"]
        assert "A new sequence begins" in answer["error"]
        answer = say(stream, SAMPLES[:50].tobytes())
        assert answer["position"] == 50
        assert np.allclose(values(answer), parallel("audio", seen(SAMPLES[:50])), atol=1e-5)


def test_unknown_symbols_are_noted(text_server, tmp_path, monkeypatch):
    with connect(text_server.socket) as stream:
        assert say(stream, {"text": "aÜ"})["notes"] == ["1 symbol is unknown to the model"]
        assert say(stream, {"text": "日"})["notes"] == ["2 symbols are unknown to the model"]
        assert say(stream, {"end": True})["notes"] == ["2 symbols are unknown to the model"]
        assert say(stream, {"text": "a"})["notes"] == []
    monkeypatch.setitem(INPUTS, "writer", Preprocessor("text", 100, (), ("<unk>", *"abcdefgh\n")))
    written = generate(Served(save("writer", tmp_path)), {"text": "abÜ", "new_tokens": 1}, lambda piece: None)
    assert written["notes"] == ["1 symbol is unknown to the model"]


def test_models_that_cannot_stream_say_why(tmp_path):
    for options, why in (
        ({"bidirectional": True}, "bidirectional: it needs the future of its input and cannot stream.*speech-causal"),
        ({"mixer": "sgconv"}, "the model's mixer, sgconv, has no state to stream with"),
    ):
        assert re.search(why, Served(save("audio", tmp_path / "x", **options)).no_stream)
    assert "pairs" in Served(save("pair", tmp_path / "pair")).no_stream
    with serving(save("audio", tmp_path / "both", bidirectional=True)) as server:
        with connect(server.socket) as stream:
            assert "experiment=speech-causal" in json.loads(stream.recv(timeout=30))["error"]
            with pytest.raises(ConnectionClosed) as closed:
                stream.recv(timeout=30)
        assert closed.value.rcvd.code == 1008
        assert server.metric("mrconv_streams") == 0
        assert httpx.post(f"{server.url}/predict", json={"values": [1, 2]}).status_code == 200


def test_a_language_model_writes(tmp_path):
    with serving(save("writer", tmp_path)) as server, connect(server.socket) as stream:
        stream.send(json.dumps({"text": "abc", "new_tokens": 12, "temperature": 0}))
        pieces = []
        while "piece" in (answer := json.loads(stream.recv(timeout=30))):
            pieces.append(answer["piece"])
        model, inputs = build("writer")
        truth = model.generate(torch.tensor([[0, 1, 2]]), 12, temperature=0)[0]
        assert "".join(pieces) == answer["text"] == "".join(inputs.vocabulary[i] for i in truth)
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
        for message, why in (
            ({"text": ""}, "text must have from 1 to 100,000 symbols"),
            ({"prompt": "a"}, "text must be a string"),
            ({"text": "a", "heat": 1}, "'heat' is not known"),
            ({"text": "a", "temperature": "hot"}, "temperature must be a number"),
            ({"text": "a", "temperature": -1}, "temperature must not be negative"),
            ({"text": "a", "new_tokens": 0}, "new_tokens must be from 1 to 100,000"),
            ({"text": "a", "seed": -1}, "seed must be a whole number"),
            ({"text": "X"}, "unknown symbol 'X' at position 0"),
        ):
            assert why in say(stream, message)["error"]
        # whoever leaves in the middle stops the writing
        stream.send(json.dumps({"text": "abc", "new_tokens": 100_000}))
        stream.recv(timeout=30)
        stream.socket.shutdown(socket.SHUT_RDWR)
        assert server.settles("mrconv_streams", 0)
        assert server.settles("mrconv_stream_positions_total", server.metric("mrconv_stream_positions_total"))
        server.process.terminate()
        assert server.process.communicate(timeout=30)[1] == ""


def test_clients_that_vanish_leave_no_state(audio_server):
    def vanish():
        with connect(audio_server.socket) as stream:
            say(stream, SAMPLES[:100].tobytes())
            stream.send(SAMPLES.tobytes())
            stream.socket.shutdown(socket.SHUT_RDWR)  # no goodbye, an answer on its way

    before = audio_server.metric("process_open_fds")
    for _ in range(3):
        clients = [threading.Thread(target=vanish) for _ in range(8)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        assert audio_server.settles("mrconv_streams", 0)
    assert audio_server.settles("process_open_fds", before)
    with connect(audio_server.socket) as stream:
        assert say(stream, b"\0\0")["position"] == 1


def test_a_page_of_another_site_is_not_let_in(hasty_server):
    with pytest.raises(InvalidStatus, match="403"):
        connect(hasty_server.socket, origin="http://elsewhere.example")
    with connect(hasty_server.socket, origin=hasty_server.url) as stream:
        stream.send("{}")
        assert "error" in json.loads(stream.recv())


def test_one_stream_too_many_and_one_too_quiet(hasty_server):
    with connect(hasty_server.socket) as one, connect(hasty_server.socket) as two:
        say(one, b"\0\0")
        say(two, b"\0\0")
        with connect(hasty_server.socket) as three:
            assert "2 streams are open already" in json.loads(three.recv(timeout=30))["error"]
        for stream in (one, two):
            assert "nothing came or went for 1 seconds" in json.loads(stream.recv(timeout=30))["error"]
            with pytest.raises(ConnectionClosed):
                stream.recv(timeout=30)
    assert hasty_server.settles("mrconv_streams", 0)


def test_a_message_that_is_too_large_closes_the_stream(hasty_server):
    with connect(hasty_server.socket) as stream:
        stream.send(bytes(200_000))
        with pytest.raises(ConnectionClosed) as closed:
            stream.recv(timeout=30)
    assert closed.value.rcvd.code == 1009
    assert hasty_server.settles("mrconv_streams", 0)

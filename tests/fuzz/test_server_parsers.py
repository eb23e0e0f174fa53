"""Mutated requests and messages: the server answers them or reports one line, and serves the next client.

MRCONV_FUZZ_CASES sets the number of mutations of each kind. A failure names its case, by which it can be repeated.
"""

import io
import json
import os
import random
import socket
from contextlib import suppress

import httpx
import numpy as np
import pytest
import soundfile
from PIL import Image

from mrconv.serve.request_parsing import parse_body
from mrconv.serve.session import StreamSession, generate_text
from mrconv.tasks import DataError
from mrconv.tasks.raw_inputs import parse_json

from ..serve.conftest import serving
from ..serve.models import RATE, load, save

GIVEN = os.environ.get("MRCONV_FUZZ_CASES")
CASES = [int(GIVEN)] if GIVEN else [5, pytest.param(50, marks=pytest.mark.slow)]
MAX_LINE = 1000  # characters of an error, which may quote a part of the input
EXTREMES = (
    b"-1", b"0", b"NaN", b"1e999", b"-1e-999", b"9" * 400, b"9223372036854775808", b"null", b"true", b'"\\ud800"',
    b"[" * 3000, b'{"": ' * 3000, b'"' + b"x" * 3000 + b'"', b"[[1], [1, 2]]", b"\xff\xfe", b"\x00" * 8, b"\xff" * 8,
)  # fmt: skip


def encoded(array, form):
    file = io.BytesIO()
    if form in ("WAV", "FLAC", "OGG"):
        soundfile.write(file, array, RATE, format=form)
    else:
        Image.fromarray(array).save(file, form)
    return file.getvalue()


SAMPLES = np.random.default_rng(0).integers(-9000, 9000, 900).astype(np.int16)
PIXELS = np.random.default_rng(0).integers(0, 256, (9, 11, 3)).astype(np.uint8)
BODIES = {
    "text": ["application/json", b'{"text": "a fine film"}', b'{"tokens": ["a", "b", "c"]}'],
    "listops": ["application/json", b'{"tokens": ["[MAX", 2, 9, "]"]}', b'{"text": "[MIN 4 [MAX 2 9 ] ]"}'],
    "values": ["application/json", b'{"values": [[0.5, -1], [2e3, 4], [0, 7]]}'],
    "pair": ["application/json", b'{"text": "one", "text2": "another"}', b'{"tokens": ["a"], "tokens2": ["b"]}'],
    "audio": ["audio/wav", *(encoded(SAMPLES, form) for form in ("WAV", "FLAC", "OGG"))],
    "image": ["image/png", encoded(PIXELS, "PNG"), encoded(PIXELS[..., 0], "PNG"), encoded(PIXELS, "JPEG")],
}
MESSAGES = {
    "text": ['{"text": "a fine film"}', '{"tokens": ["a", "b"]}', '{"end": true}'],
    "values": ['{"values": [[0.5, -1], [2, 4]]}', '{"end": true}'],
    "audio": [SAMPLES.tobytes(), '{"values": [1, -2, 3]}', '{"end": true}'],
    "language": ['{"text": "abc", "new_tokens": 3, "temperature": 0.8, "top_k": 4, "top_p": 0.9, "seed": 5}'],
}
REQUESTS = [
    b"POST /predict HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 15\r\n\r\n"
    b'{"text": "abc"}',
    b"POST /predict HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nx: y\r\n\r\n",
    b"GET /model HTTP/1.1\r\nhost: localhost\r\norigin: http://localhost\r\n\r\nGET /health HTTP/1.0\r\n\r\n",
    b"GET /stream HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
    b'\x81\x8f\x00\x00\x00\x00{"text": "abc"}\x89\x80\x00\x00\x00\x00\x88\x80\x00\x00\x00\x00',
]


def mutated(content, others, generator):
    """Return content after one to four random changes of its bytes."""
    for _ in range(generator.randint(1, 4)):
        start = generator.randint(0, len(content))
        stop = min(len(content), start + generator.choice((0, 1, 1, 4, 30)))
        other = generator.choice(others)
        new = generator.choice(
            (
                b"",
                bytes([generator.randrange(256)]),
                generator.choice(EXTREMES),
                content[start:stop] * generator.choice((2, 50)),
                other[generator.randint(0, len(other)) :],
            )
        )
        content = content[:start] + new + content[stop:]
        if generator.random() < 0.1:
            content = content[:start]
    return content


def cases(seeds, name, count):
    """Yield mutations of the seeds, each with the seed of its random numbers."""
    seeds = [seed.encode() if isinstance(seed, str) else seed for seed in seeds]
    for i in range(count):
        generator = random.Random(f"{name} {i}")
        yield f"{name} {i}", generator.choice(seeds), mutated(generator.choice(seeds), seeds, generator)


def succeeds_or_reports(case, function, *arguments):
    """Call a function; check that a DataError is one line that can be sent to the client."""
    try:
        return function(*arguments)
    except DataError as error:
        line = str(error)
        assert line.splitlines() == [line], case
        assert len(line) <= MAX_LINE, case
        json.dumps({"error": line}, ensure_ascii=False).encode()
        return None
    except Exception as error:
        raise AssertionError(f"case {case!r}") from error


@pytest.mark.parametrize("count", CASES)
@pytest.mark.parametrize("kind", BODIES)
def test_a_mutated_body_is_parsed_or_reported(kind, count, tmp_path):
    predictor, (media_type, *seeds) = load(kind, tmp_path), BODIES[kind]
    for case, valid, content in cases(seeds, kind, count):
        assert parse_body(predictor, valid, media_type)
        for given in (media_type, "application/json", "text/plain", ""):
            examples = succeeds_or_reports(case, parse_body, predictor, content, given)
            if examples is not None:
                (output,) = predictor.probabilities([examples])
                succeeds_or_reports(case, predictor.prediction, examples, output)


@pytest.mark.parametrize("count", CASES)
@pytest.mark.parametrize("kind", MESSAGES)
def test_a_mutated_message_is_answered_or_reported(kind, count, tmp_path):
    predictor = load(kind, tmp_path)
    session = None if kind == "language" else StreamSession(predictor)

    def process(message):
        if session is None:
            return generate_text(predictor, parse_json(message), lambda piece: None)
        pieces, end = session.pieces(message)
        for piece in pieces:
            session.feed(piece)
        return session.answer(end)

    for case, _, content in cases(MESSAGES[kind], f"stream {kind}", count):
        succeeds_or_reports(case, process, content.decode("utf-8", "replace"))
        if kind == "audio":
            succeeds_or_reports(case, process, content)


@pytest.mark.parametrize("count", CASES)
def test_mutated_connections_leave_the_server_serving(count, tmp_path):
    with serving(save("text", tmp_path), "--timeout", "5", "--max-body", "100000") as server:
        for case, _, content in cases(REQUESTS, "connection", 4 * count):
            with (
                socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection,
                suppress(ConnectionError),  # closed by the server before the end
            ):
                connection.sendall(content)
                connection.shutdown(socket.SHUT_WR)
                received = connection.recv(65536)
                assert received == b"" or received.startswith(b"HTTP/1.1 "), case
                while connection.recv(65536):
                    pass
        assert httpx.post(f"{server.url}/predict", json={"text": "abc"}, timeout=30).status_code == 200
        assert server.reaches("mrconv_streams", 0)
        assert server.reaches("mrconv_requests_in_flight", 1)
        assert server.reaches("mrconv_body_bytes", 0)
        server.process.terminate()
        assert "Traceback" not in server.process.communicate(timeout=30)[1]

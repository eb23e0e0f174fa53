"""Limits of the server: large bodies, slow clients, SIGTERM under load, memory."""

import asyncio
import dataclasses
import http.client
import json
import select
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest
import uvicorn
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from mrconv.inference.stream import Stream
from mrconv.serve import Options, app, create_app
from mrconv.serve.limits import body_limits
from mrconv.serve.server import listen
from mrconv.serve.turns import Turns
from mrconv.tasks import DataError
from mrconv.tasks.vocabulary import SPECIAL

from ..conftest import slow_except
from .conftest import serving
from .models import INPUTS, load, save

MB = 1_000_000
SLOW_BODY = b"POST /predict HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n{"


def raw(server, *pieces):
    """Send raw bytes, each piece after the server read the one before; return all it sends until it closes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        for piece in pieces:
            connection.sendall(piece)
            wait_until(lambda: unread_bytes(connection) == 0)
        return receive_all(connection)


def receive_all(connection):
    """Return all that the server sends until it closes."""
    received = b""
    while more := connection.recv(65536):
        received += more
    return received


def unread_bytes(connection):
    """Return how many bytes of what was sent to a local server the server has not read yet, by Linux's socket table."""
    ports = [f":{port:04X}" for _, port in (connection.getpeername(), connection.getsockname())]
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, _, queues, *_ = line.split()
        if [local[-5:], remote[-5:]] == ports:
            return int(queues.split(":")[1], 16)
    return 0  # the server closed the connection


def wait_until(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not fulfilled within {seconds} s"
        time.sleep(0.01)


def send_forever(connection):
    while True:
        connection.sendall(bytes(1000))
        time.sleep(0.01)


def accepts(server):
    """Return whether the server accepts a connection."""
    try:
        socket.create_connection(("127.0.0.1", server.port), timeout=1).close()
    except OSError:
        return False
    return True


def test_a_body_of_100_mb_is_rejected_before_it_is_read(audio_server):
    memory = audio_server.metric("process_resident_memory_bytes")
    head = b"POST /predict HTTP/1.1\r\nhost: localhost\r\ncontent-type: audio/wav\r\ncontent-length: 100000000\r\n\r\n"
    answer = raw(audio_server, head)  # without a byte of the body
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert json.loads(answer.split(b"\r\n\r\n")[1]) == {"error": "a body may have 10,000,000 bytes"}

    def pieces():
        for _ in range(100):
            yield bytes(MB)

    for content in (bytes(100 * MB), pieces()):  # with and without a declared length
        try:
            response = httpx.post(f"{audio_server.url}/predict", content=content, timeout=30)
        except (httpx.WriteError, httpx.ReadError):
            continue  # the server closed while the client was sending
        assert response.status_code == 413
    assert audio_server.metric("process_resident_memory_bytes") - memory < 50 * MB
    assert audio_server.metric("mrconv_requests_total", route="/predict", status="413") == 3
    assert audio_server.reaches("mrconv_requests_in_flight", 1)


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"POST /predict HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100000000\r\n\r\n", 413),
        (b"no HTTP\r\n", 400),
    ],
)
def test_a_client_that_still_sends_can_read_the_answer(audio_server, head, status):
    with socket.create_connection(("127.0.0.1", audio_server.port), timeout=30) as connection:
        connection.sendall(head)
        select.select([connection], [], [], 30)  # the server has answered
        connection.sendall(bytes(MB))
        wait_until(lambda: unread_bytes(connection) == 0)
        answer = receive_all(connection)
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert answer.endswith(b"}")


def test_a_client_that_never_stops_sending_is_disconnected(audio_server):
    head = b"POST /predict HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000000000\r\n\r\n"
    with socket.create_connection(("127.0.0.1", audio_server.port), timeout=30) as connection:
        connection.sendall(head)
        with pytest.raises(ConnectionError):
            send_forever(connection)


def test_connections_of_slow_clients_are_closed(limited_server):
    head = (
        b"POST /predict HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n"
    )
    answer = raw(limited_server, head, b'{"values": [')
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"the body did not arrive within 1 seconds" in answer
    assert raw(limited_server, b"") == b""  # connects and sends nothing
    assert raw(limited_server, b"POST /predict HTTP/1.1\r\nhost:") == b""  # stops within the head
    assert limited_server.reaches("mrconv_requests_in_flight", 1)


@pytest.mark.parametrize(
    "head", [b"GET /health HTTP/1.1\r\n", b"POST /predict HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n"]
)
def test_a_head_that_is_too_long_is_rejected(limited_server, head):
    lines = b"x: y\r\n" * 5000
    answer = raw(limited_server, head, lines, lines, lines)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert json.loads(answer.split(b"\r\n\r\n")[1]) == {"error": "the head of a request may have 65,536 bytes"}
    one_read = raw(limited_server, head + lines[: len(lines) // 2] * 5 + b"\r\n")
    assert one_read.startswith(b"HTTP/1.1 431 ")
    assert one_read.count(b"HTTP/1.1") == 1
    large = b"GET /health HTTP/1.1\r\nconnection: close\r\n" + b"x: y\r\n" * 5000
    assert raw(limited_server, large, b"x: y\r\n\r\n").startswith(b"HTTP/1.1 200 ")


def test_the_connection_of_a_slow_unread_body_is_closed(limited_server):
    head = b"GET /health HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100000\r\n\r\n"
    with socket.create_connection(("127.0.0.1", limited_server.port), timeout=0.1) as connection:
        connection.sendall(head)
        start, received = time.monotonic(), b""
        while time.monotonic() - start < 10:
            try:
                connection.sendall(b"x")
                if not (piece := connection.recv(65536)):
                    break
                received += piece
            except TimeoutError:
                continue
            except OSError:
                break
        assert 0.5 < time.monotonic() - start < 5
    assert received.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("method", [b"GET", b"POST"])
@pytest.mark.parametrize(
    "more", [b"content-length: 100000\r\n", b"transfer-encoding: chunked\r\n", b"x: y\r\n" * 200, b""]
)
def test_an_invalid_websocket_handshake_is_rejected(limited_server, method, more):
    head = method + b" /stream HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
    start = time.monotonic()
    assert raw(limited_server, head + more + b"\r\n")[:13] in (b"HTTP/1.1 400 ", b"HTTP/1.1 405 ")
    assert time.monotonic() - start < 5


def test_an_unread_body_may_arrive_after_the_answer(limited_server):
    with socket.create_connection(("127.0.0.1", limited_server.port), timeout=30) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n")
        answers = connection.makefile("rb")
        assert answers.readline().startswith(b"HTTP/1.1 200 ")
        connection.sendall(b"x" * 9)
        assert raw(limited_server, SLOW_BODY).startswith(b"HTTP/1.1 408 ")  # now the timeout of the body is over
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        assert answers.read().count(b"HTTP/1.1 200 ") == 1


def test_an_error_of_the_server_is_counted_with_status_500(tmp_path, monkeypatch):
    predictor = load("text", tmp_path)

    def fail(*arguments):
        raise RuntimeError

    monkeypatch.setattr(app, "parse_body", fail)

    async def ask():
        transport = httpx.ASGITransport(create_app(predictor, Options()), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return [await client.post("/predict"), await client.get("/metrics")]

    answer, metrics = asyncio.run(ask())
    assert answer.status_code == 500
    assert 'mrconv_requests_total{route="/predict",status="500"} 1.0' in metrics.text


def test_a_client_that_disconnects_within_its_body_is_cleaned_up(limited_server):
    before = limited_server.metric("mrconv_requests_total", status="499")
    for _ in range(10):
        with socket.create_connection(("127.0.0.1", limited_server.port)) as connection:
            connection.sendall(SLOW_BODY)
    assert limited_server.reaches("mrconv_requests_in_flight", 1)
    assert limited_server.metric("mrconv_requests_total", status="499") - before == 10


def test_a_client_that_disconnects_with_a_second_request_waiting_leaves_no_traceback(tmp_path):
    request = b"POST /predict HTTP/1.1\r\nhost: localhost\r\ncontent-type: text/plain\r\ncontent-length: 3\r\n\r\nabc"
    with serving(save("text", tmp_path), "--wait-ms", "300") as server:
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(2 * request)
            assert server.reaches("mrconv_requests_in_flight", 2)
        assert server.reaches("mrconv_requests_in_flight", 1)
        server.process.terminate()
        assert server.process.communicate(timeout=30)[1] == ""


def test_a_request_that_is_not_http_is_rejected(limited_server):
    assert raw(limited_server, b"\x16\x03\x01\x02\x00\r\n\r\n").startswith(b"HTTP/1.1 400 ")


def test_requests_beyond_the_limit_get_503_and_retry_after(tmp_path):
    async def ask(server):
        async with httpx.AsyncClient(timeout=30) as client:
            answers = (client.post(f"{server.url}/predict", json={"text": "abc"}) for _ in range(20))
            return await asyncio.gather(*answers)

    with serving(save("text", tmp_path), "--waiting", "4", "--batch", "64", "--wait-ms", "3000") as server:
        answers = asyncio.run(ask(server))
    rejected = [answer for answer in answers if answer.status_code == 503]
    assert [answer.status_code for answer in answers].count(200) == 4
    assert len(rejected) == 16
    assert rejected[0].json() == {"error": "4 requests are waiting already"}
    assert rejected[0].headers["retry-after"] == "1"


def test_a_timeout_of_the_model_gets_504(tmp_path):
    with serving(save("text", tmp_path), "--timeout", "0.2", "--wait-ms", "5000") as server:
        response = httpx.post(f"{server.url}/predict", json={"text": "abc"}, timeout=30)
        assert response.status_code == 504
        assert response.json() == {"error": "no answer within 0.2 seconds"}


def test_sigterm_answers_pending_requests_and_accepts_no_connection(tmp_path):
    """Requests that wait for their batch at the signal are answered; later connections are rejected."""
    requests, answers = 16, []
    with serving(save("text", tmp_path), "--wait-ms", "3000", "--batch", "64") as server:
        sent = threading.Barrier(requests + 1)

        def ask():
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
            connection.request("POST", "/predict", json.dumps({"text": "abc"}), {"content-type": "application/json"})
            sent.wait()
            response = connection.getresponse()
            answers.append((response.status, json.loads(response.read())["label"]))

        clients = [threading.Thread(target=ask) for _ in range(requests)]
        for client in clients:
            client.start()
        sent.wait()
        assert server.reaches("mrconv_requests_in_flight", requests + 1)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: not accepts(server))
        for client in clients:
            client.join()
        assert len(answers) == requests
        assert {status for status, _ in answers} == {200}
        server.process.wait(30)
        assert server.process.stderr.read() == ""


@pytest.mark.slow
def test_sigterm_under_load_loses_no_answer(tmp_path):
    """Clients that send requests in a loop get complete answers until the connection is rejected."""

    async def client(server, answers, done):
        async with httpx.AsyncClient(timeout=30) as session:
            while not done.is_set():
                try:
                    response = await session.post(f"{server.url}/predict", json={"text": "abc"})
                except httpx.TransportError as error:
                    return type(error)
                answers.append(response.json()["label"])
                assert response.status_code == 200
        return None

    async def run_clients(server):
        answers, done = [], asyncio.Event()
        clients = [asyncio.create_task(client(server, answers, done)) for _ in range(16)]
        while len(answers) < 200:
            await asyncio.sleep(0.01)
        server.process.send_signal(signal.SIGTERM)
        ends = await asyncio.wait_for(asyncio.gather(*clients), 30)
        return answers, ends

    with serving(save("text", tmp_path)) as server:
        answers, ends = asyncio.run(run_clients(server))
        assert len(set(answers)) == 1
        assert all(end is not None and issubclass(end, httpx.TransportError) for end in ends)
        server.process.wait(30)
        assert server.process.stderr.read() == ""


@pytest.mark.slow
def test_sigterm_closes_streams_with_code_1012(tmp_path):
    with serving(save("text", tmp_path)) as server, connect(server.socket) as stream:
        stream.send(json.dumps({"text": "abc"}))
        assert json.loads(stream.recv(timeout=30))["position"] == 3
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(ConnectionClosed) as closed:
            stream.recv(timeout=30)
        assert closed.value.rcvd.code == 1012
        server.process.wait(30)
        assert server.process.stderr.read() == ""


@pytest.mark.slow
def test_sigterm_closes_a_stream_within_a_long_chunk(tmp_path):
    with serving(save("audio", tmp_path), "--timeout", "1") as server, connect(server.socket) as stream:
        stream.send(bytes(10 * MB))
        while not server.metric("mrconv_stream_positions_total"):
            pass
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(ConnectionClosed) as closed:
            stream.recv(timeout=30)
        assert closed.value.rcvd.code == 1012
        server.process.wait(30)
        assert server.process.stderr.read() == ""  # no task was cancelled


@pytest.mark.parametrize("messages", slow_except([2, 6], 6))
def test_sigterm_closes_a_stream_with_queued_messages(messages, tmp_path):
    """The second of two messages is read ahead; six exceed the limit."""
    with serving(save("audio", tmp_path), "--timeout", "20") as server, connect(server.socket) as stream:
        sent = []

        def send():
            with suppress(ConnectionClosed):
                for i in range(messages):
                    stream.send(bytes(10 * MB))
                    sent.append(i)

        client = threading.Thread(target=send)
        client.start()
        while not server.metric("mrconv_stream_positions_total"):
            pass
        wait_until(lambda: len(sent) >= 2)
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(10)
        assert server.process.stderr.read() == ""  # no task was cancelled
        client.join()


def test_requests_being_decoded_count_as_waiting(tmp_path, monkeypatch):
    predictor, started, release = load("text", tmp_path), threading.Event(), threading.Event()

    def block(*arguments):
        started.set()
        release.wait(30)
        raise DataError("released")

    monkeypatch.setattr(app, "parse_body", block)

    async def ask():
        transport = httpx.ASGITransport(create_app(predictor, Options(waiting=1)))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            first = asyncio.create_task(client.post("/predict"))
            await asyncio.to_thread(started.wait, 30)
            second = asyncio.create_task(client.post("/predict"))
            await asyncio.wait([second], timeout=2)
            release.set()
            return [(await each).status_code for each in (first, second)]

    assert asyncio.run(ask()) == [400, 503]


def test_requests_being_received_count_as_waiting(tmp_path):
    head = b"POST /predict HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n"
    with serving(save("text", tmp_path), "--waiting", "1") as server:
        with socket.create_connection(("127.0.0.1", server.port)) as slow:
            slow.sendall(head)
            assert server.reaches("mrconv_requests_waiting", 1)
            assert httpx.post(f"{server.url}/predict", json={"text": "abc"}).status_code == 503
        assert server.reaches("mrconv_requests_waiting", 0)
        assert httpx.post(f"{server.url}/predict", json={"text": "abc"}).status_code == 200


def test_bodies_of_all_requests_have_a_budget(tmp_path):
    """Three unfinished bodies use the budget; a fourth is rejected, and accepted as soon as one has gone."""
    head = b"POST /predict HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100000\r\n\r\n"
    with serving(save("text", tmp_path), "--max-bodies", "300000") as server:
        slow = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(3)]
        for connection in slow:
            connection.sendall(head + bytes(99_000))
        wait_until(lambda: server.metric("mrconv_body_bytes") == 3 * 99_000)
        answer = raw(server, head, bytes(99_000))
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"the bodies of all requests together may have 300,000 bytes" in answer
        assert b"retry-after: 1" in answer
        slow.pop().close()
        wait_until(lambda: server.metric("mrconv_body_bytes") == 2 * 99_000)
        response = httpx.post(f"{server.url}/predict", content=b"abc" * 30_000, headers={"content-type": "text/plain"})
        assert response.status_code == 200
        for connection in slow:
            connection.close()
        assert server.reaches("mrconv_body_bytes", 0)


@pytest.mark.parametrize(
    ("name", "options", "limits"),
    [
        ("text", {}, (2**20, 2**20)),
        ("audio", {}, (2**20, 10_000_000)),
        ("text", {"length": 10**6}, (16 * 10**6, 16 * 10**6)),
        ("values", {"length": 10**6}, (68 * 10**6, 68 * 10**6)),
    ],
)
def test_limits_of_bodies_follow_from_the_models_inputs(name, options, limits):
    inputs = dataclasses.replace(INPUTS[name], **options)
    vocabulary = tuple(symbol for symbol in inputs.vocabulary if symbol not in SPECIAL)
    inputs = dataclasses.replace(inputs, vocabulary=vocabulary)
    assert body_limits(inputs, False, None) == limits
    assert body_limits(inputs, False, 5) == (5, 5)


def test_requests_and_streams_alternate_and_are_served_in_order():
    turns, served, waiting = Turns(), [], []

    def wait(lane, name):
        with turns.take(lane):
            served.append(name)

    with turns.take("stream"):
        for lane, name in (*(("stream", i) for i in range(4)), ("request", "a"), ("request", "b"), ("request", "c")):
            thread = threading.Thread(target=wait, args=(lane, name))
            thread.start()
            waiting.append(thread)
            wait_until(lambda: sum(map(len, turns._waiting.values())) == len(waiting))
    for thread in waiting:
        thread.join()
    assert served == ["a", 0, "b", 1, "c", 2, 3]
    with turns.take("request"):
        pass


def test_a_request_waits_for_one_piece_of_ten_flooding_streams(tmp_path, monkeypatch):
    predictor, runs, turns, gate = load("audio", tmp_path), [], [], threading.Event()
    probabilities, advance = predictor.probabilities, Stream.advance

    class RecordedTurns(Turns):
        def __init__(self):
            super().__init__()
            turns.append(self)

    def advance_after_gate(*arguments):
        gate.wait(30)
        runs.append("stream")
        return advance(*arguments)

    monkeypatch.setattr(app, "Turns", RecordedTurns)
    monkeypatch.setattr(predictor, "probabilities", lambda *given: runs.append("request") or probabilities(*given))
    monkeypatch.setattr(Stream, "advance", advance_after_gate)
    listener, ready = listen("127.0.0.1", 0), threading.Event()
    server = uvicorn.Server(uvicorn.Config(create_app(predictor, Options(), ready.set), log_level="error"))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        assert ready.wait(30)
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with ExitStack() as stack, ThreadPoolExecutor(1) as client:
            stack.callback(gate.set)
            for _ in range(10):
                stack.enter_context(connect(f"ws://{address}/stream")).send(bytes(MB))
            waiting = turns[0]._waiting
            wait_until(lambda: len(waiting["stream"]) == 9)
            answer = client.submit(httpx.post, f"http://{address}/predict", json={"values": [1, 2]}, timeout=30)
            wait_until(lambda: len(waiting["request"]) == 1)
            gate.set()
            assert answer.result().status_code == 200
        assert runs[:3] == ["stream", "request", "stream"]
    finally:
        server.should_exit = True
        thread.join()


@pytest.mark.slow
def test_memory_does_not_grow_with_requests(text_server):
    def send_requests():
        with httpx.Client(timeout=30) as client:
            for i in range(150):
                client.post(f"{text_server.url}/predict", json={"text": "abc " * (i % 40 + 1)}).raise_for_status()

    send_requests()
    before = text_server.metric("process_resident_memory_bytes")
    for _ in range(3):
        send_requests()
    assert text_server.metric("process_resident_memory_bytes") - before < 20 * MB


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere does not exist"),
        (["."], ". contains no model (no config.json)"),
        ([".", "--port", "70000"], "must be a port from 0 to 65535; got '70000'"),
        ([".", "--timeout", "0"], "must be more than 0"),
        ([".", "--batch", "0"], "must be a positive integer; got '0'"),
    ],
)
def test_errors_of_the_command_are_reported(arguments, message, capsys, tmp_path, monkeypatch):
    from mrconv.cli import main

    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_:
        main(["serve", *arguments])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_models_that_cannot_be_served_are_reported(tmp_path, capsys, audio_server):
    from mrconv import Backbone
    from mrconv.cli import main

    Backbone(d_model=4, depth=1, l_max=8).save_pretrained(tmp_path / "backbone")
    wrong = save("text", tmp_path / "wrong")
    (wrong / "inputs.json").write_text((save("audio", tmp_path / "audio") / "inputs.json").read_text())
    broken = save("text", tmp_path / "broken")
    (broken / "inputs.json").write_text('{"kind": "smell", "length": 3}')
    huge = save("audio", tmp_path / "huge")
    described = json.loads((huge / "inputs.json").read_text())
    (huge / "inputs.json").write_text(json.dumps(described | {"length": 10**13}))
    for folder, options, message in (
        ("backbone", [], "holds a Backbone; expected a classifier, a regressor of whole sequences or a language model"),
        ("wrong", [], "with 1 channels and 3 classes; this model has 34 symbols and 2 classes"),
        ("broken", [], "kind must be one of text, tokens, values, audio, image; got 'smell'"),
        ("huge", [], "not enough memory for an input of length 10,000,000,000,000"),
        ("audio", ["--port", str(audio_server.port)], "Address already in use"),
        ("audio", ["--device", "cuda:7"], "argument --device: cannot use 'cuda:7'"),
    ):
        with pytest.raises(SystemExit):
            main(["serve", str(tmp_path / folder), *options])
        assert message in capsys.readouterr().err

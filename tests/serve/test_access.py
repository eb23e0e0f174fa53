"""Who may use the server: hosts, origins, tokens, and the headers that protect its page."""

import asyncio
import json
import os
import re

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from mrconv.cli import main
from mrconv.serve import Options, create_app

from .conftest import serving
from .models import load, save

TOKEN = "0123456789abcdef"
ROUTES = ("/", "/page.js", "/page.css", "/health", "/model", "/metrics", "/predict", "/nothing")


@pytest.fixture(scope="module")
def predictor(tmp_path_factory):
    return load("text", tmp_path_factory.mktemp("access"))


def statuses(predictor, headers, options=Options(), host="localhost"):  # noqa: B008
    """Return the status of each route for a request with these headers."""

    async def ask():
        transport = httpx.ASGITransport(create_app(predictor, options))
        async with httpx.AsyncClient(transport=transport, base_url=f"http://{host}") as client:
            return {route: await client.get(route, headers=headers) for route in ROUTES}

    answers = asyncio.run(ask())
    assert all("frame-ancestors 'none'" in a.headers["content-security-policy"] for a in answers.values())
    return {route: answer.status_code for route, answer in answers.items()}


ALLOWED = dict.fromkeys(ROUTES, 200) | {"/predict": 405, "/nothing": 404}


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1:8000", "[::1]:8000", "localhost.", "words"])
def test_names_of_the_local_machine_and_allowed_names_are_answered(predictor, host):
    assert statuses(predictor, {"host": host}, Options(hosts=("words",))) == ALLOWED


@pytest.mark.parametrize("host", ["rebound.example", "rebound.example:8000", "localhost.example", "169.254.1.1", ""])
def test_other_hosts_are_rejected_on_every_route(predictor, host):
    assert set(statuses(predictor, {"host": host}).values()) == {421}


def test_an_invalid_host_is_rejected(predictor):
    assert set(statuses(predictor, {"host": "[::1"}).values()) == {400}


@pytest.mark.parametrize(
    "origin", ["http://elsewhere.example", "http://localhost:9", "null", "http://localhost.example"]
)
def test_pages_of_other_origins_are_rejected_on_every_route(predictor, origin):
    assert set(statuses(predictor, {"origin": origin}).values()) == {403}
    assert statuses(predictor, {"origin": "http://localhost"}) == ALLOWED


def test_a_token_is_required_for_everything_but_the_page_and_health(predictor):
    required = dict.fromkeys(("/model", "/metrics", "/predict", "/nothing"), 401)
    for headers in ({}, {"authorization": f"Bearer {TOKEN}x"}, {"authorization": f"Basic {TOKEN}"}):
        assert statuses(predictor, headers, Options(token=TOKEN)) == ALLOWED | required
    assert statuses(predictor, {"authorization": f"bearer {TOKEN}"}, Options(token=TOKEN)) == ALLOWED


@pytest.fixture(scope="module")
def token_server(tmp_path_factory):
    """A server for all interfaces, with its token in the environment."""
    environment = os.environ | {"MRCONV_TOKEN": TOKEN}
    folder = save("text", tmp_path_factory.mktemp("token"))
    with serving(folder, "--host", "0.0.0.0", environment=environment) as server:
        yield server


def test_streams_require_the_token_as_header_or_subprotocol(token_server):
    for rejected in ({}, {"subprotocols": ["mrconv"]}, {"additional_headers": {"authorization": "Bearer x"}}):
        with pytest.raises(InvalidStatus, match="401"):
            connect(token_server.socket, **rejected)
    bearer = {"authorization": f"Bearer {TOKEN}"}
    for allowed in ({"subprotocols": ["mrconv", TOKEN]}, {"additional_headers": bearer}):
        with connect(token_server.socket, **allowed) as stream:
            stream.send('{"text": "abc"}')
            assert json.loads(stream.recv(timeout=30))["position"] == 3
    assert httpx.get(f"{token_server.url}/model").status_code == 401
    assert httpx.get(f"{token_server.url}/model", headers=bearer).status_code == 200


@pytest.mark.parametrize(
    ("arguments", "token", "message"),
    [
        (["--host", "0.0.0.0"], None, "--host 0.0.0.0 serves other machines: give --token or $MRCONV_TOKEN, or allow"),
        (["--host", "::"], "", "--host :: serves other machines"),
        (["--token", "secret"], None, "argument --token: must have at least 16 characters, of letters, digits and"),
        ([], "secret secret secret", "$MRCONV_TOKEN must have at least 16 characters"),
        (["--token", TOKEN, "--no-token"], None, "not allowed with argument --token"),
    ],
)  # fmt: skip
def test_serving_other_machines_needs_a_token_or_a_decision(arguments, token, message, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("MRCONV_TOKEN", raising=False)
    if token is not None:
        monkeypatch.setenv("MRCONV_TOKEN", token)
    with pytest.raises(SystemExit) as stop:
        main(["serve", str(tmp_path), *arguments])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_the_policy_allows_no_inline_script_or_style(text_server):
    for route in ("/", "/page.js", "/model", "/nothing"):
        headers = httpx.get(text_server.url + route).headers
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert "server" not in headers
    page = httpx.get(text_server.url)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert re.findall(r"<style|style=|<script>|\son\w+=", page.text) == []

"""A real server: `mrconv serve` in a separate process, on a free port of the loopback interface."""

import time
from contextlib import contextmanager

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ..processes import Command
from .models import save


class Server:
    """The address, process and metrics of a server."""

    def __init__(self, process, url):
        self.process, self.url, self.port = process, url, int(url.rsplit(":", 1)[1])
        self.socket = url.replace("http:", "ws:") + "/stream"

    def metric(self, name, **labels):
        """Return a sample of /metrics; 0 if there is none."""
        text = httpx.get(f"{self.url}/metrics").text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())

    def reaches(self, name, value, seconds=20):
        """Wait until a metric has this value; return whether it does."""
        deadline = time.monotonic() + seconds
        while (current := self.metric(name)) != value and time.monotonic() < deadline:
            time.sleep(0.02)
        return current == value


@contextmanager
def serving(folder, *options, environment=None):
    """Serve a folder while the block runs."""
    process = Command("mrconv", "serve", folder, "--port", "0", "--device", "cpu", *options, environment=environment)
    try:
        lines = []
        while not lines or not lines[-1].startswith("http://"):
            line = process.stdout.readline()
            assert line, process.stderr.read()
            lines.append(line.strip())
        yield Server(process, lines[-1])
    finally:
        process.terminate()
        try:
            process.wait(timeout=30)
        finally:
            process.kill()


@pytest.fixture(scope="session")
def text_server(tmp_path_factory):
    with serving(save("text", tmp_path_factory.mktemp("text"))) as server:
        yield server


@pytest.fixture(scope="session")
def audio_server(tmp_path_factory):
    with serving(save("audio", tmp_path_factory.mktemp("audio"))) as server:
        yield server


@pytest.fixture(scope="session")
def limited_server(tmp_path_factory):
    """A server with strict limits."""
    limits = ["--timeout", "1", "--max-body", "100000", "--streams", "2"]
    with serving(save("audio", tmp_path_factory.mktemp("limited")), *limits) as server:
        yield server

"""Downloads resume, verify, and leave nothing damaged: against a server on this machine."""

import hashlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from mrconv.tasks import download as module
from mrconv.tasks.download import Remote, download
from mrconv.tasks.errors import DataError

CONTENT = bytes(range(256)) * 4000


@pytest.fixture
def server():
    """A server whose next answers can be told to stop early or to fail."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked = self.headers.get("Range")
            start = int(asked[6:-1]) if asked and self.server.ranges else 0
            self.server.asked.append(asked)
            how = self.server.plan.pop(0) if self.server.plan else "whole"
            if isinstance(how, int):
                self.send_error(how)
                return
            if start >= len(self.server.content):
                self.send_error(416)
                return
            body = self.server.content[start:]
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: len(body) // 3] if how == "cut" else body)
            self.close_connection = True

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.plan, server.asked, server.ranges, server.content = [], [], True, CONTENT
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def remote(server, monkeypatch):
    monkeypatch.setattr(module.time, "sleep", lambda seconds: None)
    url = f"http://127.0.0.1:{server.server_port}/file.bin"
    return Remote(url, "file.bin", hashlib.md5(CONTENT).hexdigest())


def test_a_file_is_fetched_and_verified(remote, tmp_path):
    seen = []
    path = download(remote, tmp_path / "new", lambda done, total: seen.append((done, total)))
    assert path.read_bytes() == CONTENT
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    assert [p.name for p in path.parent.iterdir()] == ["file.bin"]


def test_one_that_is_there_is_not_asked_for(remote, server, tmp_path):
    download(remote, tmp_path)
    download(remote, tmp_path)
    assert len(server.asked) == 1


@pytest.mark.parametrize("ranges", [True, False])
def test_a_connection_that_ends_early_is_gone_on_with(remote, server, tmp_path, ranges):
    server.plan, server.ranges = ["cut", "cut"], ranges
    assert download(remote, tmp_path).read_bytes() == CONTENT
    assert server.asked[0] is None
    assert all(asked.startswith("bytes=") for asked in server.asked[1:])


def test_what_came_is_kept_for_the_next_time(remote, server, tmp_path):
    server.plan = ["cut"] * 3
    with pytest.raises(DataError, match=r"cannot download .*kept in .*file\.bin\.part"):
        download(remote, tmp_path)
    assert not (tmp_path / "file.bin").exists()
    assert download(remote, tmp_path).read_bytes() == CONTENT
    assert server.asked[3] is not None


def test_a_finished_part_is_only_verified(remote, tmp_path):
    (tmp_path / "file.bin.part").write_bytes(CONTENT)
    assert download(remote, tmp_path).read_bytes() == CONTENT


def test_a_corrupted_file_is_removed(remote, server, tmp_path):
    server.content = CONTENT[:-1] + b"!"
    with pytest.raises(DataError, match="damaged on the way or has been changed by its publisher; nothing was kept"):
        download(remote, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_stumbles_is_asked_again_and_a_missing_file_is_told(remote, server, tmp_path):
    server.plan = [503, 500]
    assert download(remote, tmp_path).read_bytes() == CONTENT
    server.plan, server.asked = [404], []
    with pytest.raises(DataError, match="404"):
        download(remote, tmp_path / "other")
    assert len(server.asked) == 1

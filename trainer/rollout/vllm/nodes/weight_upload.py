"""Weights on their way to another machine: tensor by tensor, as the chunks of one HTTP request.

A tensor is two chunks: ``[name, type, shape]`` in JSON, and its bytes. The node agent reads them
straight into the memory that its servers share.
"""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Callable, Iterator
from functools import partial
from http import HTTPStatus
from io import BufferedIOBase

import torch
from torch import Tensor

from trainer.base.connections import LOST_S, Address, keep_alive, read_status
from trainer.rollout.vllm.engine.shared_weights import DTYPES, IncomingTensor

MAX_HEADER_BYTES = 1 << 16


class WeightUpload:
    """One upload of all weights to one node agent.

    Methods raise OSError when the agent is lost, and when it refuses, with its message.
    """

    def __init__(self, address: Address, *, timeout_s: float) -> None:
        """``timeout_s``: how long an agent that lives may take to reply.

        One whose machine is gone counts as lost after ``LOST_S``.
        """
        self._token = address.token
        self._timeout_s = timeout_s
        self._connection = http.client.HTTPConnection(address.host, address.port, timeout=LOST_S)

    def begin(self, version: int) -> None:
        """Announce weights of this version; return when the agent can take them.

        That is when no server reads the older ones any more.
        """
        self._connection.connect()
        connection: socket.socket = self._connection.sock
        keep_alive(connection)
        connection.settimeout(self._timeout_s)
        self._connection.putrequest("POST", f"/weights/{version}")
        self._connection.putheader("Authorization", f"Bearer {self._token}")
        self._connection.putheader("Transfer-Encoding", "chunked")
        self._connection.putheader("Expect", "100-continue")
        self._connection.endheaders()
        status = read_status(connection)
        if status != HTTPStatus.CONTINUE:
            raise OSError(f"it takes no weights ({status})")
        # From here on it reads at once: unacknowledged bytes mean that its machine is gone.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * LOST_S))

    def send(self, header: bytes, data: memoryview) -> None:
        """Send one tensor, as :func:`encode_tensor` returns it."""
        chunks = b"%x\r\n%b\r\n%x\r\n" % (len(header), header, len(data))
        self._connection.send(chunks)
        self._connection.send(data)
        self._connection.send(b"\r\n")

    def end(self) -> None:
        """Finish the request; return when the agent has all weights."""
        self._connection.send(b"0\r\n\r\n")
        try:
            reply = self._connection.getresponse()
            text = reply.read().decode(errors="replace")
        except http.client.HTTPException as error:
            raise OSError(f"no answer: {error!r}") from error
        if reply.status != HTTPStatus.OK:
            raise OSError(text)

    def close(self) -> None:
        """Close the connection; an agent that has not got all weights discards them."""
        self._connection.close()


def encode_tensor(name: str, tensor: Tensor) -> tuple[bytes, memoryview]:
    """Return header and bytes of a tensor. The bytes of one on the CPU are not copied."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    header = [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
    return json.dumps(header).encode(), flat.numpy().data


def receive_weights(
    body: BufferedIOBase, send_continue: Callable[[], None]
) -> Iterator[IncomingTensor]:
    """Yield the tensors of a request's ``body``, each to be filled before the next is requested.

    ``send_continue`` lets the sender begin; it is called when the first tensor is requested.

    Raises ConnectionError when the body ends early, ValueError when it is malformed.
    """
    send_continue()
    size = _chunk_size(body)
    while size:
        if size > MAX_HEADER_BYTES:
            raise ValueError(f"a header of {size} bytes")
        header = bytearray(size)
        _read_chunk(body, memoryview(header))
        name, dtype, shape = json.loads(header)
        yield IncomingTensor(
            name=str(name),
            dtype=DTYPES[dtype],
            shape=[int(n) for n in shape],
            fill=partial(_fill, body),
        )
        size = _chunk_size(body)
    body.readline()


def _fill(body: BufferedIOBase, tensor: Tensor) -> None:
    memory = tensor.reshape(-1).view(torch.uint8).numpy().data
    size = _chunk_size(body)
    if size != len(memory):
        raise ValueError(f"{size} bytes for a tensor of {len(memory)}")
    _read_chunk(body, memory)


def _chunk_size(body: BufferedIOBase) -> int:
    line = body.readline(32)
    if not line.endswith(b"\n"):
        raise ConnectionError("the weights ended early")
    return int(line, 16)


def _read_chunk(body: BufferedIOBase, memory: memoryview) -> None:
    while memory:
        count = body.readinto(memory)
        if not count:
            raise ConnectionError("the weights ended early")
        memory = memory[count:]
    body.readline(4)

"""Weights on their way to another machine: tensor by tensor, as the chunks of one HTTP request.

A tensor is two chunks, ``[name, type, shape]`` in JSON and its bytes. They are read straight to
where they stay.
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

from trainer.launch.rollout_nodes import LOST_S, Address, keep_alive, read_status
from trainer.rollout.vllm.server.shared_weights import DTYPES, Arrival

MOST_HEADER = 1 << 16


class Upload:
    """One hand-over to one host. Its methods raise OSError when the host is lost, or refuses (with
    its words).
    """

    def __init__(self, to: Address, *, timeout_s: float) -> None:
        """``timeout_s``: how long a host that lives may take. One whose machine is gone is lost
        after ``LOST_S``.
        """
        self._token, self._timeout_s = to.token, timeout_s
        self._connection = http.client.HTTPConnection(to.host, to.port, timeout=LOST_S)

    def begin(self, version: int) -> None:
        """Weights of this version follow. Returns when the host has room for them: no server reads
        the older ones.
        """
        self._connection.connect()
        line: socket.socket = self._connection.sock
        keep_alive(line)
        line.settimeout(self._timeout_s)
        self._connection.putrequest("POST", f"/weights/{version}")
        self._connection.putheader("Authorization", f"Bearer {self._token}")
        self._connection.putheader("Transfer-Encoding", "chunked")
        self._connection.putheader("Expect", "100-continue")
        self._connection.endheaders()
        if (status := read_status(line)) != HTTPStatus.CONTINUE:
            raise OSError(f"it takes no weights ({status})")
        # From here on it reads at once: bytes that stay on the way mean that it is gone.
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * LOST_S))

    def send(self, head: bytes, data: memoryview) -> None:
        """One tensor, as :func:`parts` makes it."""
        self._connection.send(b"%x\r\n%b\r\n%x\r\n" % (len(head), head, len(data)))
        self._connection.send(data)
        self._connection.send(b"\r\n")

    def end(self) -> None:
        """All has been sent; returns when the host has it."""
        self._connection.send(b"0\r\n\r\n")
        try:
            answer = self._connection.getresponse()
            said = answer.read().decode(errors="replace")
        except http.client.HTTPException as error:
            raise OSError(f"no answer: {error!r}") from error
        if answer.status != HTTPStatus.OK:
            raise OSError(said)

    def close(self) -> None:
        """Give the connection back; a host that has not got all of it gives up."""
        self._connection.close()


def parts(name: str, tensor: Tensor) -> tuple[bytes, memoryview]:
    """What is sent of a tensor; the bytes are its own where it is on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    head = [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
    return json.dumps(head).encode(), flat.numpy().data


def receive(file: BufferedIOBase, go_on: Callable[[], None]) -> Iterator[Arrival]:
    """The tensors in a request's body, each to be filled before the next one is asked for.
    ``go_on`` tells the sender that the first one is.

    Raises ConnectionError when it ends early, ValueError when it is none.
    """
    go_on()
    while size := _size(file):
        if size > MOST_HEADER:
            raise ValueError(f"a header of {size} bytes")
        head = bytearray(size)
        _fill(file, memoryview(head))
        name, dtype, shape = json.loads(head)
        yield Arrival(
            name=str(name),
            dtype=DTYPES[dtype],
            shape=[int(n) for n in shape],
            fill=partial(_values, file),
        )
    file.readline()


def _values(file: BufferedIOBase, to: Tensor) -> None:
    room = to.reshape(-1).view(torch.uint8).numpy().data
    if (size := _size(file)) != len(room):
        raise ValueError(f"{size} bytes for a tensor of {len(room)}")
    _fill(file, room)


def _size(file: BufferedIOBase) -> int:
    line = file.readline(32)
    if not line.endswith(b"\n"):
        raise ConnectionError("the weights ended early")
    return int(line, 16)


def _fill(file: BufferedIOBase, room: memoryview) -> None:
    while room:
        count = file.readinto(room)
        if not count:
            raise ConnectionError("the weights ended early")
        room = room[count:]
    file.readline(4)

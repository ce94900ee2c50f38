"""HTTP requests with JSON bodies to servers and node agents."""

from __future__ import annotations

import http.client
import json
from typing import Any

from trainer.base.connections import Address


def send_json(
    address: Address,
    method: str,
    path: str,
    value: dict[str, Any] | None = None,
    *,
    timeout_s: float,
) -> Any:
    """Send ``value`` and return the decoded reply, whatever its HTTP status.

    Raises OSError, HTTPException or ValueError when there is no readable reply.
    """
    connection = http.client.HTTPConnection(address.host, address.port, timeout=timeout_s)
    try:
        body = None if value is None else json.dumps(value)
        connection.request(method, path, body, {"Authorization": f"Bearer {address.token}"})
        return json.loads(connection.getresponse().read())
    finally:
        connection.close()


def try_send_json(
    address: Address,
    method: str,
    path: str,
    value: dict[str, Any] | None = None,
    *,
    timeout_s: float,
) -> dict[str, Any] | None:
    """Send ``value`` as :func:`send_json` does; return None when there is no readable reply."""
    try:
        reply: dict[str, Any] = send_json(address, method, path, value, timeout_s=timeout_s)
    except (OSError, http.client.HTTPException, ValueError):
        return None
    return reply

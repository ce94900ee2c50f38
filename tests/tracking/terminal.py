from __future__ import annotations

import os


def drain(leader: int) -> str:
    """All that was written to a pseudo-terminal until its last writer closed it."""
    data = b""
    try:
        while part := os.read(leader, 65536):
            data += part
    except OSError:  # Linux ends a pseudo-terminal with EIO
        pass
    os.close(leader)
    return data.decode()

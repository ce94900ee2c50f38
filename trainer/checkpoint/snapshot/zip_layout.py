"""Positions and headers of a zip64 archive of stored (uncompressed) records.

Layout: APPNOTE.TXT sections 4.3.6 to 4.5.3, always with zip64 fields. The CRC fields hold 0, as
with ``torch.serialization.set_crc32_options(False)``: the manifest's xxh3 covers the file.
"""

from __future__ import annotations

import struct

ALIGNMENT = 64
"""Bytes to a multiple of which each record's data is aligned, as ``torch.save`` does."""
_FOLDER = "archive"
_VERSION = 45
"""Zip version needed for zip64."""
_UTF8_NAMES = 0x800
_DATE = 0x21
"""1980-01-01."""
_IN_ZIP64_FIELD = 0xFFFFFFFF
_PADDING_FIELD = 0x4246
"""Id of the extra field that ``torch.save`` pads with."""


class ZipLayout:
    """An archive that grows record by record; ``size`` bytes so far."""

    def __init__(self) -> None:
        self.size = 0
        self.parts: list[tuple[int, bytes]] = []
        """(offset, bytes) of all that is not a reserved record's data."""
        self._directory: list[bytes] = []

    def copy(self) -> ZipLayout:
        """An independent copy."""
        other = ZipLayout()
        other.size = self.size
        other.parts = list(self.parts)
        other._directory = list(self._directory)
        return other

    def add(self, name: str, data: bytes) -> None:
        """Add a record with its data."""
        self.parts.append((self.reserve(name, len(data)), data))

    def reserve(self, name: str, nbytes: int) -> int:
        """Add a record of ``nbytes`` whose data come later. Returns the offset of its data."""
        path = f"{_FOLDER}/{name}".encode()
        start = self.size
        fixed = 30 + len(path) + 20 + 4  # header, name, zip64 field, head of the padding field
        padding = -(start + fixed) % ALIGNMENT
        zip64 = struct.pack("<HHQQ", 1, 16, nbytes, nbytes)
        extra = zip64 + struct.pack("<HH", _PADDING_FIELD, padding) + b"Z" * padding
        header = struct.pack(
            "<IHHHHHIIIHH",
            0x04034B50,
            _VERSION,
            _UTF8_NAMES,
            0,  # stored
            0,  # time
            _DATE,
            0,  # CRC
            _IN_ZIP64_FIELD,
            _IN_ZIP64_FIELD,
            len(path),
            len(extra),
        )
        self.parts.append((start, header + path + extra))
        self._directory.append(_directory_entry(path, start, nbytes))
        data_offset = start + fixed + padding
        self.size = data_offset + nbytes
        return data_offset

    def finish(self) -> None:
        """Add the central directory: the archive is complete."""
        start = self.size
        count = len(self._directory)
        directory = b"".join(self._directory)
        end64 = struct.pack(
            "<IQHHIIQQQQ",
            0x06064B50,
            44,  # size of the rest of this record
            _VERSION,
            _VERSION,
            0,  # disk
            0,  # disk of the directory
            count,
            count,
            len(directory),
            start,
        )
        locator = struct.pack("<IIQI", 0x07064B50, 0, start + len(directory), 1)
        end = struct.pack(
            "<IHHHHIIH", 0x06054B50, 0, 0, 0xFFFF, 0xFFFF, _IN_ZIP64_FIELD, _IN_ZIP64_FIELD, 0
        )
        tail = directory + end64 + locator + end
        self.parts.append((start, tail))
        self.size = start + len(tail)


def _directory_entry(path: bytes, start: int, nbytes: int) -> bytes:
    zip64 = struct.pack("<HHQQQ", 1, 24, nbytes, nbytes, start)
    header = struct.pack(
        "<IHHHHHHIIIHHHHHII",
        0x02014B50,
        _VERSION,
        _VERSION,
        _UTF8_NAMES,
        0,  # stored
        0,  # time
        _DATE,
        0,  # CRC
        _IN_ZIP64_FIELD,
        _IN_ZIP64_FIELD,
        len(path),
        len(zip64),
        0,  # comment
        0,  # disk
        0,  # internal attributes
        0,  # external attributes
        _IN_ZIP64_FIELD,
    )
    return header + path + zip64

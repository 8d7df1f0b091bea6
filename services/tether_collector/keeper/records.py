"""The spool's format: self-checking records in append-only segments. Shared by keeper (writer) and collector (reader).

    spool/{first record:012d}.seg = segment header, record, record, …

    segment header  magic 8 | salt u32 | first record u64 | crc u32                                  24 bytes
    record          magic 4 | crc u32 | data length u32 | meta length u16 | kind u8 | 0 u8 |
                    number u64 | arrival µs u64 | meta (JSON) | data                                 32 bytes + body

Numbers start at 1 and have no holes, across segments. The CRC covers everything after itself and starts from the
salt, which is derived from the keeper's nonce. That matters where a reader looks for the next good record behind a
damaged one: a CLI may print a spool file, and then whole records lie inside the data of another. Those of another
keeper fail the salt; those of this keeper carry a number below the record that contains them, so the reader accepts
only numbers that are not below the one it misses.
"""

from __future__ import annotations

import struct
from zlib import crc32

STDOUT, STDERR, STDIN, STDIN_DONE, TIMER, ADAPTER, NOTE, EOF, EXIT, PROOF, STATE = range(1, 12)
KIND_NAMES = {
    STDOUT: "stdout",
    STDERR: "stderr",
    STDIN: "stdin",
    STDIN_DONE: "stdin_done",
    TIMER: "timer",
    ADAPTER: "adapter",
    NOTE: "note",
    EOF: "eof",
    EXIT: "exit",
    PROOF: "proof",
    STATE: "state",
}

RECORD_MAGIC = b"\xf5TR\x01"  # 0xf5 never occurs in UTF-8, so text rarely looks like a record
SEGMENT_MAGIC = b"\xf5TETHER\x01"
RECORD_HEADER_BYTES = 32
SEGMENT_HEADER_BYTES = 24
DATA_BYTES_MAX = 4 * 1024 * 1024  # above every line chunk and every request; a longer length is damage
SEGMENT_SUFFIX = ".seg"

_HEAD = struct.Struct("<4sI")
_TAIL = struct.Struct("<IHBBQQ")
_SEGMENT = struct.Struct("<8sIQ")
_U32 = struct.Struct("<I")

META_NONE = b""
META_CONTINUES = b'{"cont":true}'  # a chunk of a long line; its rest follows
META_NO_EOL = b'{"eol":false}'  # the last line of a stream, without its newline

# What `parse` says where there is no whole record.
INCOMPLETE = -1
CORRUPT = -2


def salt_of(nonce: str) -> int:
    """The start value of every CRC of one keeper's spool."""
    return crc32(nonce.encode())


def segment_name(first_record: int) -> str:
    """File name of the segment that begins with this record."""
    return f"{first_record:012d}{SEGMENT_SUFFIX}"


def segment_header(salt: int, first_record: int) -> bytes:
    """The first bytes of a segment."""
    head = _SEGMENT.pack(SEGMENT_MAGIC, salt, first_record)
    return head + _U32.pack(crc32(head))


def parse_segment_header(head: bytes) -> tuple[int, int] | None:
    """(salt, first record), or None where the header is short or damaged."""
    if len(head) < SEGMENT_HEADER_BYTES:
        return None
    body = head[: _SEGMENT.size]
    magic, salt, first_record = _SEGMENT.unpack(body)
    if magic != SEGMENT_MAGIC or _U32.unpack_from(head, _SEGMENT.size)[0] != crc32(body):
        return None
    return salt, first_record


def encode(salt: int, kind: int, number: int, at_us: int, meta: bytes, data: bytes) -> bytes:
    """One record as it is written."""
    tail = _TAIL.pack(len(data), len(meta), kind, 0, number, at_us)
    crc = crc32(tail, salt)
    if meta:
        crc = crc32(meta, crc)
    return b"".join((_HEAD.pack(RECORD_MAGIC, crc32(data, crc)), tail, meta, data))


def parse(buffer: bytes, at: int, salt: int) -> tuple[int, int, int, int, bytes, bytes]:
    """The record at an offset: (end offset, kind, number, at_us, meta, data).

    The end offset is INCOMPLETE where the buffer ends inside the record (number then holds the bytes that the whole
    record needs from `at`, or 0 while the header itself is short), CORRUPT where it cannot be a record.
    """
    have = len(buffer) - at
    if have < RECORD_HEADER_BYTES:
        short_magic = buffer[at : at + 4]
        bad = not RECORD_MAGIC.startswith(short_magic)
        return (CORRUPT if bad else INCOMPLETE), 0, 0, 0, b"", b""
    magic, crc = _HEAD.unpack_from(buffer, at)
    data_bytes, meta_bytes, kind, zero, number, at_us = _TAIL.unpack_from(buffer, at + _HEAD.size)
    if magic != RECORD_MAGIC or data_bytes > DATA_BYTES_MAX or zero or kind not in KIND_NAMES:
        return CORRUPT, 0, 0, 0, b"", b""
    meta_at = at + RECORD_HEADER_BYTES
    data_at = meta_at + meta_bytes
    end = data_at + data_bytes
    if end > len(buffer):
        return INCOMPLETE, kind, end - at, at_us, b"", b""
    if crc32(buffer[at + _HEAD.size : end], salt) != crc:
        return CORRUPT, 0, 0, 0, b"", b""
    return end, kind, number, at_us, buffer[meta_at:data_at], buffer[data_at:end]

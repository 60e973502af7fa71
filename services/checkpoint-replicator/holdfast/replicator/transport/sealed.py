"""A connection whose bytes are encrypted in records of up to 1 MiB, after TLS has said who is at the other end.

    client                                   server
    TLS handshake, both certificates  ◄───►           ALPN "holdfast-sealed/1": both sides know the records
    two keys of 32 random bytes       ────►           within TLS
    close_notify of TLS               ◄───►           the connection itself stays
    records                           ◄───►

A record is a length (4 bytes, big-endian, of the content), the encrypted content, and a tag of 16 bytes. AES-256-GCM
(NIST SP 800-38D) with one key per direction; the nonce is the number of the record in its direction, and the length is
authenticated. So a changed, dropped, repeated or reordered record fails, as in TLS. The end of the connection is not
authenticated: the messages and spans within say how many bytes belong to them.

TLS itself allows 16 KiB per record (RFC 8446, 5.1). At memory speed, records of this size cost several times the encryption
(docs/adr/0071-sealed-records.md)."""

from __future__ import annotations

import math
import secrets
import socket
import ssl
import struct
import time
from dataclasses import dataclass, field
from typing import Any, Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from holdfast.domain.errors import MalformedMessage, Unavailable
from holdfast.replicator.transport import frames

ALPN: Final = "holdfast-sealed/1"
RECORD_BYTES_MAX = 1 << 20  # of content; it stays in the processor's cache between encryption and system call
KEY_BYTES = 32
_TAG_BYTES = 16
_LENGTH = struct.Struct("!I")
_NONCE_BYTES = 12
_NOTHING = memoryview(b"")


class Altered(Unavailable):
    """A record was changed on its way, or is not the next one."""


def sealed_by_client(sock: ssl.SSLSocket) -> socket.socket:
    """Return the connection with records if the server knows them, otherwise `sock`. Raises Unavailable if the server ends the
    connection, and OSError."""
    if sock.selected_alpn_protocol() != ALPN:
        return sock
    keys = secrets.token_bytes(2 * KEY_BYTES)
    try:
        sock.sendall(keys)
        return _sealed(sock, outgoing=keys[:KEY_BYTES], incoming=keys[KEY_BYTES:])
    except (ssl.SSLEOFError, ConnectionError) as error:
        raise Unavailable("the peer closed the connection after TLS; its log says why") from error


def sealed_by_server(sock: ssl.SSLSocket) -> socket.socket:
    """As `sealed_by_client`, at the other end."""
    if sock.selected_alpn_protocol() != ALPN:
        return sock
    keys, timeout_s = bytearray(2 * KEY_BYTES), sock.gettimeout()
    frames.fill(sock, memoryview(keys), math.inf if timeout_s is None else time.monotonic() + timeout_s)
    sock.settimeout(timeout_s)
    return _sealed(sock, outgoing=bytes(keys[KEY_BYTES:]), incoming=bytes(keys[:KEY_BYTES]))


def encrypted(sock: socket.socket) -> bool:
    return isinstance(sock, ssl.SSLSocket | SealedSocket)


class SealedSocket(socket.socket):
    """A socket that sends and receives records. Python's timeout is for the length or the content of a record; a timeout of the
    kernel (`SO_RCVTIMEO`) is for progress. One thread may send while another receives."""

    def __init__(self, sock: socket.socket, *, outgoing: bytes, incoming: bytes) -> None:
        """Take the connection over from `sock`. `outgoing`, `incoming`: keys of 32 bytes."""
        timeout_s = sock.gettimeout()
        super().__init__(sock.family, sock.type, sock.proto, fileno=sock.detach())
        self.settimeout(timeout_s)
        self._sealing = _Direction(AESGCM(outgoing))
        self._unsent = _NOTHING  # of a record that has not left completely
        self._opening = _Direction(AESGCM(incoming))
        self._length = bytearray(_LENGTH.size)
        self._size = 0  # of the content of the record that is being received; 0: its length is being received
        self._got = 0  # bytes of the length, or of the encrypted content with its tag
        self._opened = _NOTHING  # content that has not been handed out

    # ------------------------------------------------------------ sending

    def sendall(self, data: Any, flags: int = 0, /) -> None:
        """Raises TimeoutError and OSError; nothing can be sent after that."""
        content = memoryview(data).cast("B")
        for start in range(0, len(content), RECORD_BYTES_MAX):
            super().sendall(self._seal(content[start : start + RECORD_BYTES_MAX]), flags)

    def send(self, data: Any, flags: int = 0, /) -> int:
        """Send one record with the begin of `data`, and return the number of bytes in it. Raises BlockingIOError if the record
        does not leave completely: call again with the same data, as with TLS."""
        content = memoryview(data).cast("B")[:RECORD_BYTES_MAX]
        self._unsent = self._unsent or self._seal(content)
        while self._unsent:
            self._unsent = self._unsent[super().send(self._unsent, flags) :]
        return len(content)

    def _seal(self, content: memoryview) -> memoryview:
        """Return the next record, which is valid until the next call."""
        length = _LENGTH.pack(len(content))
        record = self._sealing.room(_LENGTH.size + len(content) + _TAG_BYTES)
        record[: _LENGTH.size] = length
        self._sealing.cipher.encrypt_into(self._sealing.nonce(), content, length, record[_LENGTH.size :])
        return record

    # ------------------------------------------------------------ receiving

    def recv(self, size: int, flags: int = 0, /) -> bytes:
        buffer = bytearray(size)
        return bytes(buffer[: self.recv_into(buffer, size, flags)])

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0, /) -> int:
        """Fill the begin of `buffer` from one record, and return the number of bytes; 0 if the peer has closed the connection.
        A buffer with room for the whole record gets the content without a copy.

        Raises Altered, after which the content of `buffer` is undefined, MalformedMessage, TimeoutError, BlockingIOError and
        OSError. After a TimeoutError or BlockingIOError, the next call goes on with the same record."""
        target = memoryview(buffer).cast("B")[: nbytes or None]
        if not self._opened:
            if not target or (sealed := self._receive_record()) is None:
                return 0
            if len(target) >= self._size:
                return self._open(sealed, target[: self._size])
            content = memoryview(bytearray(self._size))
            self._open(sealed, content)
            self._opened = content
        size = min(len(target), len(self._opened))
        target[:size] = self._opened[:size]
        self._opened = self._opened[size:]
        return size

    def _receive_record(self) -> memoryview | None:
        """Receive what is missing of a record. Returns its encrypted content with the tag; None: the peer has closed the
        connection."""
        if not self._size:
            if not self._fill(memoryview(self._length)):
                return None
            (size,) = _LENGTH.unpack(self._length)
            if not 0 < size <= RECORD_BYTES_MAX:
                raise MalformedMessage("data plane record", f"{size} bytes; 1 to {RECORD_BYTES_MAX} are possible")
            self._size, self._got = size, 0
        sealed = self._opening.room(self._size + _TAG_BYTES)
        return sealed if self._fill(sealed) else None

    def _fill(self, view: memoryview) -> bool:
        """Receive until `view` is full. False: the peer has closed the connection."""
        timeout_s = self.gettimeout()
        deadline = time.monotonic() + timeout_s if timeout_s else math.inf
        try:
            while self._got < len(view):
                if timeout_s:
                    if (left_s := deadline - time.monotonic()) <= 0:
                        raise TimeoutError("timed out")
                    self.settimeout(left_s)
                received = super().recv_into(view[self._got :], len(view) - self._got, socket.MSG_WAITALL)
                if not received:
                    return False
                self._got += received
            return True
        finally:
            if timeout_s:
                self.settimeout(timeout_s)

    def _open(self, sealed: memoryview, target: memoryview) -> int:
        try:
            self._opening.cipher.decrypt_into(self._opening.nonce(), sealed, bytes(self._length), target)
        except InvalidTag:
            raise Altered("bytes of the connection were changed on their way") from None
        self._size = self._got = 0
        return len(target)


@dataclass(slots=True)
class _Direction:
    cipher: AESGCM
    _number: int = 0
    _room: bytearray = field(default_factory=bytearray)

    def nonce(self) -> bytes:
        """Return the next number, which no other record of this key has."""
        self._number += 1
        return self._number.to_bytes(_NONCE_BYTES)

    def room(self, size: int) -> memoryview:
        """Return memory for a record, which keeps its content. The kernel provides it when it is written."""
        if len(self._room) < size:
            self._room = bytearray(size)
        return memoryview(self._room)[:size]


def _sealed(sock: ssl.SSLSocket, *, outgoing: bytes, incoming: bytes) -> SealedSocket:
    """End TLS, which leaves the connection, and go on with records."""
    return SealedSocket(sock.unwrap(), outgoing=outgoing, incoming=incoming)

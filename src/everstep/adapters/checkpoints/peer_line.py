"""A line between two savers: TCP, TLS 1.3 with the job's one certificate on both ends, and proof of the job's secret.

Whatever the other end does, every call ends within its deadline: with what was asked for, or with an OSError or an
EvidenceError. It knows frames and bytes, not what they mean.
"""

import contextlib
import hashlib
import hmac
import os
import secrets
import socket
import ssl
import struct
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from everstep.domain.errors import ConfigError, EvidenceError, WorldError

PIECE_BYTES = 1 << 20
FRAME_BYTES_MAX = 8 << 20
GREETING_WITHIN_S = 5.0
STALL_S = 10.0
"""A line on which nothing moves for so long is given up."""
_FRAME = struct.Struct("<I")
_NONCE_BYTES, _PROOF_BYTES, _SECRET_BYTES = 32, 32, 32
_OPENSSL = (
    "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 3650 -subj /CN=everstep-job"
).split()
_SECRET, _CERTIFICATE, _KEY = "secret", "certificate.pem", "key.pem"


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """What the hosts of one job have in common and nobody else.

    Attributes:
        server, client: None where lines are not encrypted, which loopback alone may be.
    """

    secret: bytes
    server: ssl.SSLContext | None = None
    client: ssl.SSLContext | None = None
    certificate: bytes = b""


def make_credentials(folder: Path) -> None:
    """Make a secret, a key and a self-signed certificate for one job, for its owner's eyes alone.

    Raises:
        ConfigError: there is no openssl command.
        WorldError: it failed, or the folder cannot be written.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write_private(folder / _SECRET, secrets.token_bytes(_SECRET_BYTES))
        _write_private(folder / _KEY, b"")  # openssl keeps the mode of a file that is there
        subprocess.run(
            [*_OPENSSL, "-keyout", str(folder / _KEY), "-out", str(folder / _CERTIFICATE)],
            check=True,
            capture_output=True,
            timeout=60,
        )
        (folder / _CERTIFICATE).chmod(0o600)
    except FileNotFoundError as error:
        raise ConfigError("copies on other hosts need the openssl command to make the job's certificate") from error
    except (OSError, subprocess.SubprocessError) as error:
        raise WorldError(f"cannot make the job's certificate in {folder}: {error}") from error


def load_credentials(folder: Path, *, encrypted: bool) -> Credentials:
    """What `make_credentials` made.

    Raises:
        WorldError: not there or not readable.
        ConfigError: others can read it.
    """
    try:
        names = (_SECRET, _KEY, _CERTIFICATE) if encrypted else (_SECRET,)
        for name in names:
            if (folder / name).stat().st_mode & 0o077:
                raise ConfigError(f"{folder / name} can be read by others; everstep wants mode 0600")
        secret = (folder / _SECRET).read_bytes()
        if len(secret) != _SECRET_BYTES:
            raise ConfigError(f"{folder / _SECRET} has {len(secret)} bytes, expected {_SECRET_BYTES}")
        if not encrypted:
            return Credentials(secret=secret)
        server, client = (_context(folder, side) for side in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT))
        certificate = ssl.PEM_cert_to_DER_cert((folder / _CERTIFICATE).read_text())
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise WorldError(f"cannot read the job's certificate in {folder}: {error}") from error
    return Credentials(secret=secret, server=server, client=client, certificate=certificate)


def _context(folder: Path, side: "ssl._SSLMethod") -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the certificate itself is pinned; it names a job and no host
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(folder / _CERTIFICATE, folder / _KEY)
    context.load_verify_locations(folder / _CERTIFICATE)
    if side is ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0
    return context


def _write_private(path: Path, content: bytes) -> None:
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(content)


class Line:
    """One end of a line. Not for two threads at once."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def __enter__(self) -> "Line":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.close()

    def release(self) -> socket.socket:
        """The greeted connection, for another kind of line to go on with; this one is over."""
        return self._socket

    def send(self, frame: bytes) -> None:
        """One frame."""
        assert len(frame) <= FRAME_BYTES_MAX
        self._socket.settimeout(STALL_S)
        self._socket.sendall(_FRAME.pack(len(frame)) + frame)

    def receive(self, *, within_s: float = STALL_S) -> bytes:
        """One frame.

        Raises:
            EvidenceError: it is longer than any of ours.
            OSError: the line broke, or took longer.
        """
        ends_s = time.monotonic() + within_s
        head = bytearray(_FRAME.size)
        self._fill(memoryview(head), ends_s)
        (size,) = _FRAME.unpack(head)
        if size > FRAME_BYTES_MAX:
            raise EvidenceError(f"a peer announces a message of {size} bytes, over {FRAME_BYTES_MAX}")
        content = bytearray(size)
        self._fill(memoryview(content), ends_s)
        return bytes(content)

    def send_bytes(self, content: memoryview) -> None:
        """Bytes without a frame; the other end knows how many."""
        self._socket.settimeout(STALL_S)
        self._socket.sendall(content)

    def receive_bytes(self, into: memoryview) -> None:
        """Fill `into`.

        Raises:
            OSError: the line broke, or the bytes of one piece took longer than `STALL_S`.
        """
        self._fill(into, time.monotonic() + STALL_S)

    def _fill(self, into: memoryview, ends_s: float) -> None:
        filled = 0
        while filled < len(into):
            left_s = ends_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("a peer is silent")
            self._socket.settimeout(left_s)
            with into[filled:] as rest:
                count = self._socket.recv_into(rest)
            if count == 0:
                raise ConnectionResetError("a peer has closed the line")
            filled += count


def connect(address: str, credentials: Credentials) -> Line:
    """A line to the saver at `HOST:PORT`.

    Raises:
        OSError: nobody there.
        EvidenceError: somebody who is not of this job.
    """
    host, _, port = address.rpartition(":")
    plain = socket.create_connection((host.strip("[]"), int(port)), timeout=GREETING_WITHIN_S)
    return _greeted(plain, credentials, is_server=False)


def answer(connection: socket.socket, credentials: Credentials) -> Line:
    """The other end of a connection that was accepted.

    Raises:
        OSError, EvidenceError: whoever is there is not of this job, or takes longer than `GREETING_WITHIN_S`.
    """
    return _greeted(connection, credentials, is_server=True)


def _greeted(connection: socket.socket, credentials: Credentials, *, is_server: bool) -> Line:
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(connection.close)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(GREETING_WITHIN_S)
        line = Line(connection)
        context = credentials.server if is_server else credentials.client
        if context is not None:
            secured = context.wrap_socket(connection, server_side=is_server)
            on_failure.callback(secured.close)  # the plain one has handed its descriptor over
            if secured.getpeercert(binary_form=True) != credentials.certificate:
                raise EvidenceError("a peer shows another certificate than this job's")
            line = Line(secured)
        _prove(line, credentials.secret, is_server=is_server)
        on_failure.pop_all()
    return line


def _prove(line: Line, secret: bytes, *, is_server: bool) -> None:
    """Each end shows that it knows the secret, without telling it: HMAC-SHA256 of both ends' random numbers."""
    mine = secrets.token_bytes(_NONCE_BYTES)
    line.send(mine)
    theirs = line.receive(within_s=GREETING_WITHIN_S)
    if len(theirs) != _NONCE_BYTES or theirs == mine:
        raise EvidenceError("a peer does not speak as a saver does")
    asked, answered = (theirs, mine) if is_server else (mine, theirs)

    def proof(side: bytes) -> bytes:
        return hmac.new(secret, side + asked + answered, hashlib.sha256).digest()

    my_side, their_side = (b"server", b"client") if is_server else (b"client", b"server")
    if is_server:  # the one who came proves first
        _check(line, proof(their_side))
        line.send(proof(my_side))
    else:
        line.send(proof(my_side))
        _check(line, proof(their_side))


def _check(line: Line, expected: bytes) -> None:
    shown = line.receive(within_s=GREETING_WITHIN_S)
    if len(shown) != _PROOF_BYTES or not hmac.compare_digest(shown, expected):
        raise EvidenceError("a peer does not know the job's secret")


def listen(address: str) -> socket.socket:
    """A listening socket at `HOST:PORT`; port 0 takes a free one.

    Raises:
        OSError: it is in use, or not this machine's.
    """
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(listener.close)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host.strip("[]"), int(port)))
        listener.listen(64)
        on_failure.pop_all()
    return listener


def address_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    return host in ("localhost", "::1") or host.startswith("127.")


class Pace:
    """Bytes per second of all lines of one process together."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next_s = 0.0

    def wait(self, size_bytes: int, bytes_per_s: float) -> None:
        """Sleep until so many bytes may go. A rate of 0 knows no limit."""
        if bytes_per_s <= 0:
            return
        with self._lock:
            now_s = time.monotonic()
            start_s = max(now_s, self._next_s)
            self._next_s = start_s + size_bytes / bytes_per_s
        if start_s > now_s:
            time.sleep(start_s - now_s)

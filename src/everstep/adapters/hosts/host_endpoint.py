"""Whose the endpoint of a job is: this host's, which then listens there, or another's; and the job's credentials.

Knows nothing of what is said over a line.
"""

import contextlib
import errno
import ipaddress
import logging
import secrets
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path

from everstep.adapters.checkpoints.peer_line import Credentials, is_loopback, listen, load_credentials, make_credentials
from everstep.domain.errors import ConfigError, WorldError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where the coordinator listens, as it was typed on all hosts.

    Attributes:
        local: an address of this host to use instead of what the name says; empty for none.
    """

    host: str
    port: int
    local: str = ""

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __post_init__(self) -> None:
        for flag, name in (("--rdzv-endpoint", self.host), ("--local-addr", self.local)):
            try:
                name.encode("idna")
            except UnicodeError as error:
                raise ConfigError(f"{flag} {name!r} is no name that a host can have; write another one") from error
        if _is_anywhere(self.host):
            raise ConfigError(
                f"--rdzv-endpoint {self}: write an address or name by which all hosts reach the coordinator's"
            )
        if _is_anywhere(self.local):
            raise ConfigError(f"--local-addr {self.local}: write the address by which other hosts reach this one")


def _is_anywhere(host: str) -> bool:
    """Whether it means all addresses of a host, in any spelling that the C library takes, such as 0."""
    with contextlib.suppress(OSError):
        return socket.inet_aton(host) == bytes(4)
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.partition("%")[0]).is_unspecified
    return False


def check_local(endpoint: Endpoint) -> None:
    """Whether this host can listen at the address that was given for it.

    Raises:
        ConfigError: it can't.
    """
    if not endpoint.local:
        return
    try:
        listen(f"[{endpoint.local}]:0" if ":" in endpoint.local else f"{endpoint.local}:0").close()
    except OSError as error:
        raise ConfigError(
            f"--local-addr {endpoint.local} is no address of this host ({error.strerror or error}); "
            "write one that `ip address` shows here"
        ) from error


def claim(endpoint: Endpoint, *, node_rank: int | None) -> socket.socket | None:
    """The listening socket where this host has the coordinator; None where another has it.

    Node rank 0 has it. Without node ranks it is the host whose address the endpoint names, and of several nodes there
    the first.

    Raises:
        ConfigError: this should be the coordinator's host, and cannot listen there.
    """
    if node_rank:
        return None
    try:
        addresses = _addresses(endpoint.host)
    except OSError as error:
        if node_rank is None:
            return None  # a name of another host, which may come up later
        if not endpoint.local:
            raise ConfigError(
                f"--rdzv-endpoint {endpoint}: {endpoint.host} is not known here ({error.strerror}); "
                "write an address of this host, or add --local-addr"
            ) from error
        addresses = []
    if node_rank == 0 and endpoint.local:
        addresses = [endpoint.local]
    for address in addresses:
        try:
            listener = _try_to_listen(address, endpoint)
        except _TakenError as error:
            if node_rank == 0:
                raise ConfigError(str(error)) from error
            return None  # the first node has it, even where the name stands for further addresses of this host
        if listener is not None:
            return listener
    if node_rank == 0:
        raise ConfigError(
            f"--node-rank 0 has the coordinator, and {endpoint.host} is no address of this host; "
            "give the one to listen at with --local-addr"
        )
    return None


def _addresses(host: str) -> list[str]:
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


class _TakenError(Exception):
    """Somebody on this host listens there."""


def _try_to_listen(address: str, endpoint: Endpoint) -> socket.socket | None:
    """None where the address is not this host's."""
    where = f"[{address}]:{endpoint.port}" if ":" in address else f"{address}:{endpoint.port}"
    try:
        listener = listen(where)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise _TakenError(
                f"port {endpoint.port} of {address} is in use, by another program or job; "
                "write another one in --rdzv-endpoint on all hosts"
            ) from error
        if error.errno == errno.EACCES:
            raise ConfigError(
                f"port {endpoint.port} is not allowed here; write one above 1023 in --rdzv-endpoint"
            ) from error
        return None  # not this host's address
    if is_loopback(where) and not is_loopback(f"{endpoint.host}:0"):
        _log.warning(
            "%s is %s on this host, where other hosts cannot come; write an address in --rdzv-endpoint",
            endpoint.host,
            address,
        )
    return listener


def made_credentials(folder: Path) -> Credentials:
    """The job's credentials, made now if there are none.

    Raises:
        ConfigError: there is no openssl command, or others can read them.
        WorldError: they cannot be made or read.
    """
    if not folder.is_dir() or not any(folder.iterdir()):
        fresh = folder.with_name(f"{folder.name}.{secrets.token_hex(4)}")
        try:
            make_credentials(fresh)
            fresh.rename(folder)  # whole at once: other hosts look for it
        except OSError as error:
            raise WorldError(f"cannot make {folder} ({error.strerror})") from error
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    return load_credentials(folder, encrypted=True)

"""The rendezvous store of one attempt, in a process of its own: no rank's death takes it along, no stale key survives.

Run as a module; writes its port to standard output and then waits to be killed.
"""

import os
import signal
import socket
import sys
from datetime import timedelta

_TIMEOUT = timedelta(minutes=30)


def serve(host: str, port: int) -> int:
    """Serve a TCPStore on `host:port`, 0 being any free port, until the end; 1 when the port is taken."""
    import torch.distributed as dist

    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        os.write(1, f"error {error.strerror}\n".encode())
        return 1
    listener.listen(1024)
    bound_port = listener.getsockname()[1]
    _store = dist.TCPStore(  # type: ignore[attr-defined]
        host,
        bound_port,
        is_master=True,
        timeout=_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # so that it listens where we bound it, not on every interface
    )
    os.write(1, f"port {bound_port}\n".encode())
    while True:
        signal.pause()


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1], int(sys.argv[2])))

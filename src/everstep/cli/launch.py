"""Runs one job: on this host alone, or as one of its hosts."""

import socket
from collections.abc import Callable

from everstep.cli.coordinate import Listener, coordinate
from everstep.cli.host_parts import Seat, make_writable
from everstep.cli.run_arguments import RunPlan
from everstep.domain.commands import FinishJob
from everstep.domain.ids import HostId

__all__ = ["run_job"]


def run_job(plan: RunPlan, *, listen: Listener, tell: Callable[[str], None] = lambda _: None) -> FinishJob:
    """Run a job to its end and give the command that ended it. Nothing of it lives on this host afterwards.

    Args:
        plan: what to run.
        listen: hears every entry of the ledger; on hosts without the coordinator, the end.
        tell: hears sentences about hosts.

    Raises:
        ConfigError: a folder can't be used, or another `everstep run` uses it.
        EvidenceError: the ledger of a run to be continued is damaged or from a newer version.
        WorldError: the ledger can't be written any more.
    """
    make_writable(plan.run_dir, "--run-dir")
    make_writable(plan.log_dir, "--log-dir")
    if plan.hosts is not None:
        from everstep.cli.launch_hosts import run_on_hosts  # a job of one host does without

        return run_on_hosts(plan, plan.hosts, listen=listen, tell=tell)
    host = HostId(socket.gethostname())
    return coordinate(plan, lambda run: Seat(run=run, host=host, address=plan.address), listen=listen)

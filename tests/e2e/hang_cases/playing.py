"""Plays one case under the real `everstep run` and reads off its ledger what was said, of whom, and how soon."""

import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.hang_cases.expected import Case

from everstep.adapters.ledger_file import read_entries
from everstep.domain.commands import DismissSuspicion, RecordVerdict
from everstep.domain.errors import EverstepError
from everstep.domain.events import EvidenceCollected, StallSuspected, WorkerExited
from everstep.domain.verdicts import Trouble
from everstep.policy.hang import locate_hang

JOB = Path(__file__).with_name("job.py")
_BETWEEN_LOOKS_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """Attributes:
    trouble, ranks, reason: the verdict; an empty class when there was none.
    verdict_s: from the suspicion, or the first exit, to the verdict; None without one.
    borne: nothing was killed for it, since the rank's stack excuses it for now.
    code: exit code of `everstep run`; None when it was ended because it would have waited longer.
    """

    trouble: str = ""
    ranks: frozenset[int] = frozenset()
    reason: str = ""
    verdict_s: float | None = None
    borne: bool = False
    code: int | None = None
    took_s: float = 0.0

    def wrong(self, case: Case, victim: int) -> str:
        """Why this is not what must be said; empty when it is."""
        if not case.troubles:
            return (
                f"blamed {sorted(self.ranks)}: {self.reason}"
                if self.ranks
                else f"ended with {self.code}" * bool(self.code)
            )
        if self.ranks != case.culprits(victim):
            return f"named {sorted(self.ranks)} instead of {sorted(case.culprits(victim))}"
        return (
            "" if self.trouble in case.troubles else f"said {self.trouble or 'nothing'} instead of {case.troubles[0]}"
        )


def play(case: Case, *, seed: int, run_dir: Path, within_s: float = 120.0) -> Said:
    """Run the case until it has ended or all there is to say has been said."""
    command = [sys.executable, "-m", "everstep.cli.main", "run", "--nproc-per-node", str(case.world)]
    command += ["--run-dir", str(run_dir), "--hang-floor", "1.5", "--max-restarts", "0", "--grace", "0.5"]
    begun_s = time.monotonic()
    with subprocess.Popen(
        [*command, str(JOB), case.name, str(case.victim(seed))], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            said = Said()
            while process.poll() is None and time.monotonic() < begun_s + within_s:
                time.sleep(_BETWEEN_LOOKS_S)
                said = heard(run_dir, case)
                if said.borne and case.troubles and said.trouble not in (Trouble.UNKNOWN, Trouble.SLOW):
                    break  # while nobody knows, the job is looked at again: on a busy machine all may still be at work
        finally:
            code = process.poll()
            if code is None:
                _end(process)
    said = heard(run_dir, case)
    return Said(
        trouble=said.trouble,
        ranks=said.ranks,
        reason=said.reason,
        verdict_s=said.verdict_s,
        borne=said.borne,
        code=code,
        took_s=time.monotonic() - begun_s,
    )


def _end(process: "subprocess.Popen[bytes]") -> None:
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
        process.send_signal(number)
        try:
            process.wait(5.0)
        except subprocess.TimeoutExpired:
            continue
        return


def heard(run_dir: Path, case: Case) -> Said:
    """What the ledger says so far: the verdict, or for a job that bears a silence, what it thinks of it."""
    try:
        bodies = [entry.body for entry in read_entries(run_dir / "ledger.jsonl")]
    except (EverstepError, OSError):
        return Said()
    began_s = next((b.at_s for b in bodies if isinstance(b, StallSuspected | WorkerExited)), 0.0)
    if (end := next((b for b in bodies if isinstance(b, RecordVerdict)), None)) is not None:
        return Said(
            trouble=str(end.verdict.trouble),
            ranks=frozenset(end.verdict.ranks),
            reason=end.verdict.reason,
            verdict_s=end.at_s - (end.detected_at_s or began_s),
        )
    dismissed = [b for b in bodies if isinstance(b, DismissSuspicion)][-1:]
    pairs = [
        b for b in bodies if isinstance(b, EvidenceCollected) and dismissed and b.incident == dismissed[0].incident
    ]
    if len(pairs) < 2 or not case.troubles:
        return Said()  # a healthy job may be suspected, and must not be judged
    finding = locate_hang(pairs[0].summaries, pairs[1].summaries, apart_s=pairs[1].at_s - pairs[0].at_s).verdict
    suspected_s = [b.at_s for b in bodies if isinstance(b, StallSuspected) and b.at_s <= pairs[0].at_s]
    return Said(
        trouble=str(finding.trouble),
        ranks=frozenset(finding.ranks),
        reason=finding.reason,
        verdict_s=dismissed[0].at_s - suspected_s[-1],
        borne=True,
    )

"""Where published figures contradict each other or themselves, and what is used here instead."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Contradiction:
    """A claim that does not add up.

    Attributes:
        about: the key of a preset, or a word of the sources that it bears on.
        claim: what is published, and where.
        check: what the arithmetic says.
        used: what this package takes.
    """

    about: tuple[str, ...]
    claim: str
    check: str
    used: str


CONTRADICTIONS: tuple[Contradiction, ...] = (
    Contradiction(
        about=("Table 5", "prior"),
        claim="Llama 3, Table 5 prints 30.1 % for Faulty GPU, and the text says 58.7 % GPU issues.",
        check="148 of 419 is 35.3 %, GPU causes together are 268 of 419 = 64.0 %; the printed column sums to 94.9 %.",
        used="the counts",
    ),
    Contradiction(
        about=("Table 5", "prior"),
        claim='Llama 3, section 3.3.4: "approximately 78 %" of interruptions are confirmed or suspected hardware.',
        check="GPU and host causes are 69.0 %, with unplanned maintenance 76.6 %, with watchdog timeouts too 78.3 %.",
        used="the counts by cause",
    ),
    Contradiction(
        about=("Table 5", "prior"),
        claim="Meta's post of July 2025 has a third share: over 66 % from memory, compute and switches.",
        check="it is neither the printed column's sum nor that of the counts.",
        used="the counts",
    ),
    Contradiction(
        about=("2407.21783, section 3.3.1",),
        claim='Llama 3, section 3.3.4: power swings "on the order of tens of megawatts".',
        check="16,384 GPUs × 700 W are 11.5 MW in all: tens of megawatts need hosts and network too, or more jobs.",
        used="GPU power × (1 − what a waiting or idle GPU draws)",
    ),
    Contradiction(
        about=("scaling law",),
        claim="Llama 3, section 3.2.1 prints its law's constants twice: (0.53, 0.29) and, in figure 3, (0.537, 0.299).",
        check="at 3.8e25 FLOP they give 10.5T and 16.3T tokens; the paper says 16.55T, and 402B where C/(6D) is 383B.",
        used="figure 3's constants",
    ),
    Contradiction(
        about=("2410.21680",),
        claim="RSC, between failures: 47.7 days on 8 GPUs, 7.9 h on 1,024; projected 1.8 h, 16,384; 0.23 h, 131,072.",
        check="6.50 per 1000 host-days gives 1.80 h and 0.225 h, and 28.8 h at 1,024 (7.9 h is 23.7): not one line.",
        used="6.50 for RSC-1",
    ),
    Contradiction(
        about=("2410.21680",),
        claim='RSC: "21 minutes between checkpoints for 0.5" on 100,000 GPUs at RSC-2\'s rate.',
        check="its own linear formula gives 0.685; 0.5 needs restarts of about 14 minutes.",
        used="the exact model",
    ),
    Contradiction(
        about=("2410.21680", "exact model"),
        claim="RSC's linear formula: 0.520 on 100,000 GPUs with a checkpoint every 7 minutes at RSC-1's rate.",
        check="with failures during restarts and checkpoints too the share is 0.615; the linear form breaks above 0.3.",
        used="the exact model; the linear one is shown for comparison",
    ),
    Contradiction(
        about=("2602.00277",),
        claim="FT-HSDP: synchronous recovery stalls 10 minutes.",
        check="notes list detection 60 s, scheduling 120, load 120, groups 300 and first step 200: 800 s, not 600.",
        used="600 s, without the first step",
    ),
    Contradiction(
        about=("2602.00277",),
        claim="FT-HSDP: a failure every 18 minutes on 98K GPUs, and 2.3 interruptions per 1000 servers a day.",
        check="2.3 is one in 51 minutes on 12,288 servers; 18 minutes is 6.51 per 1000 host-days, RSC-1's rate.",
        used="18 minutes",
    ),
    Contradiction(
        about=("spares",),
        claim="Spares are often counted as Poisson.",
        check="StepFun's record: 9.26 of 400 hosts down on average, P99 31 where Poisson says 17.",
        used="a negative binomial with the record's spread",
    ),
    Contradiction(
        about=("spares",),
        claim="Rules for spares: 4 for 1,024 machines (ByteRobust), 12 to 18 for 128 hosts (OPT-175B).",
        check="at Llama 3's hardware rate 4 means hosts back within 10 hours, and 12 to 18 means two to four weeks.",
        used="the plan's own replacement time",
    ),
)


def contradictions(sources: frozenset[str]) -> tuple[Contradiction, ...]:
    """Those that bear on a plan whose inputs come from these sources, and those that bear on every plan."""
    every_plan = {"spares", "exact model", "scaling law"}
    return tuple(
        found
        for found in CONTRADICTIONS
        if any(word in every_plan or any(word in source for source in sources) for word in found.about)
    )

"""Compute, time and size of a training run: 6ND, compute-optimal sizes by three laws, and over-training a small model.

N, parameters; D, tokens; C, floating-point operations of the whole training. The laws were fitted far below the sizes
that they are asked about here: they are extrapolations, and they disagree.
"""

import math
from dataclasses import dataclass

FLOPS_PER_PARAMETER_TOKEN = 6.0
FLOPS_PER_PARAMETER_SERVED = 2.0
H100_PEAK_FLOPS = 989.4e12
"""Dense BF16, without sparsity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimum:
    """A model of so many parameters trained on so many tokens."""

    parameters: float
    tokens: float

    @property
    def tokens_per_parameter(self) -> float:
        return self.tokens / self.parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class LossLaw:
    """L = E + A/N^α + B/D^β."""

    name: str
    e: float
    a: float
    b: float
    alpha: float
    beta: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OverTraining:
    """A smaller model trained longer to the same loss.

    Attributes:
        model: its size and tokens.
        extra_compute_share: training compute above that of the optimum, as a share of it.
        break_even_tokens: so many tokens served pay for it, at 2 operations per parameter and token.
    """

    model: Optimum
    extra_compute_share: float
    break_even_tokens: float


CHINCHILLA = LossLaw(
    name="Chinchilla", e=1.69, a=406.4, b=410.7, alpha=0.34, beta=0.28, source="arXiv 2203.15556, approach 3"
)
EPOCH = LossLaw(
    name="Epoch's refit", e=1.8172, a=482.01, b=2085.43, alpha=0.3478, beta=0.3658, source="arXiv 2404.10102"
)
LLAMA3_ALPHA, LLAMA3_A = 0.537, 0.299
"""From the caption of figure 3. The text prints (0.53, 0.29), which gives 10.46T tokens at 3.8e25 and not 16.55T."""
LLAMA3_TEXT_ALPHA, LLAMA3_TEXT_A = 0.53, 0.29


def training_flops(*, parameters: float, tokens: float) -> float:
    """C = 6 N D."""
    return FLOPS_PER_PARAMETER_TOKEN * parameters * tokens


def training_s(*, flops: float, gpu_count: int, flops_per_gpu: float, effective_share: float) -> float:
    """Days are this ÷ 86,400: C ÷ (GPUs × achieved FLOP/s × effective training time)."""
    return flops / (gpu_count * flops_per_gpu * effective_share)


def optimum(law: LossLaw, *, flops: float) -> Optimum:
    """N* = (αA/(βB))^{1/(α+β)} · (C/6)^{β/(α+β)}, D* = C/(6 N*): the lowest loss that `flops` can buy."""
    total = law.alpha + law.beta
    scale = (law.alpha * law.a / (law.beta * law.b)) ** (1.0 / total)
    parameters = scale * (flops / FLOPS_PER_PARAMETER_TOKEN) ** (law.beta / total)
    return Optimum(parameters=parameters, tokens=flops / (FLOPS_PER_PARAMETER_TOKEN * parameters))


def llama3_optimum(*, flops: float, alpha: float = LLAMA3_ALPHA, a: float = LLAMA3_A) -> Optimum:
    """Llama 3's own law: tokens* = A·C^α, parameters = C/(6 tokens*) (arXiv 2407.21783, figure 3)."""
    tokens = a * flops**alpha
    return Optimum(parameters=flops / (FLOPS_PER_PARAMETER_TOKEN * tokens), tokens=tokens)


def loss(law: LossLaw, model: Optimum) -> float:
    """Nats per token under the law."""
    return law.e + law.a * math.pow(model.parameters, -law.alpha) + law.b * math.pow(model.tokens, -law.beta)


def over_training(law: LossLaw, *, flops: float, size_share: float = 0.5) -> OverTraining | None:
    """A model of `size_share` × the optimum's size, trained until its loss is the optimum's; None if it can't be."""
    best = optimum(law, flops=flops)
    parameters = best.parameters * size_share
    left = loss(law, best) - law.e - law.a / parameters**law.alpha
    if left <= 0:
        return None
    tokens = (law.b / left) ** (1.0 / law.beta)
    extra = training_flops(parameters=parameters, tokens=tokens) - flops
    saved = FLOPS_PER_PARAMETER_SERVED * (best.parameters - parameters)
    return OverTraining(
        model=Optimum(parameters=parameters, tokens=tokens),
        extra_compute_share=extra / flops,
        break_even_tokens=extra / saved if saved else 0.0,
    )

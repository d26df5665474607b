"""The demo's model and text: of the promised size, deterministic, and able to learn."""

from pathlib import Path

import torch

from everstep.worker.demo.gpt import GPT, GPTConfig, parameter_count
from everstep.worker.demo.text import CORPUS_BYTES_MAX, VOCABULARY_SIZE, Windows, read_corpus, to_tokens
from everstep.worker.demo.train import sha256_of

CONFIG = GPTConfig(vocabulary_size=VOCABULARY_SIZE)


def test_the_model_has_about_a_million_parameters_and_dropout() -> None:
    assert 0.9e6 < parameter_count(GPT(CONFIG)) < 1.1e6
    assert CONFIG.dropout > 0


def test_the_loss_starts_at_chance_and_falls_within_a_few_steps() -> None:
    torch.manual_seed(0)
    small = GPTConfig(vocabulary_size=VOCABULARY_SIZE, layer_count=2, width=64)
    model = GPT(small)
    data = Windows(to_tokens(read_corpus()[:20_000]), context=small.context)
    tokens, targets = (torch.stack(side) for side in zip(*(data[i] for i in range(8)), strict=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(15):
        loss = model(tokens, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert abs(losses[0] - torch.tensor(VOCABULARY_SIZE).log().item()) < 0.3
    assert losses[-1] < losses[0] - 1.0


def test_no_place_sees_the_tokens_after_it() -> None:
    model = GPT(CONFIG).eval()
    tokens = torch.randint(0, VOCABULARY_SIZE, (1, CONFIG.context))
    changed = tokens.clone()
    changed[0, 40:] = 1
    seen: list[torch.Tensor] = []
    model.head.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    for given in (tokens, changed):
        model(given, tokens)
    assert torch.equal(seen[0][0, :40], seen[1][0, :40])
    assert not torch.equal(seen[0][0, 40:], seen[1][0, 40:])


def test_the_corpus_is_the_same_every_time_and_capped() -> None:
    corpus = read_corpus()
    assert corpus == read_corpus()
    assert 1_000_000 < len(corpus) <= CORPUS_BYTES_MAX


def test_the_corpus_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        (tmp_path / f"{name}.py").write_text(f"{name}\n")
    assert read_corpus(tmp_path) == b"a\nb\nc\n"


def test_every_byte_has_a_token() -> None:
    tokens = to_tokens(bytes(range(256)))
    assert tokens.dtype == torch.uint8
    assert set(tokens.tolist()) == set(range(VOCABULARY_SIZE))


def test_targets_are_the_tokens_that_come_next() -> None:
    data = Windows(to_tokens(b"abcdefgh" * 4), context=5)
    tokens, targets = data[1]
    assert torch.equal(tokens[1:], targets[:-1])
    assert len(data) == 6
    assert len(data[5][1]) == 5


def test_a_digest_sees_the_last_bit() -> None:
    one = torch.ones(3)
    other = one.clone()
    other.view(torch.int32)[2] += 1
    assert sha256_of([one]) == sha256_of([one.clone()])
    assert sha256_of([one]) != sha256_of([other])

"""The test models themselves: if context did not move their logits, no equality test on them would mean anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.tiny import sentencepiece_like_tokenizer, tiny_model, tiny_tokenizer

TEXT = "Hello the  world\n\n été 日本 🙂 <|im_end|> <think>"


def test_an_early_token_moves_late_logits(family: str) -> None:
    model = tiny_model(family)
    ids = torch.randint(10, 300, (1, 300))
    other = ids.clone()
    other[0, 5] += 7
    with torch.no_grad():
        moved = (model(ids).logits - model(other).logits)[0, -1].abs().max()
    assert moved > 1e-2


def test_a_seed_fixes_the_weights() -> None:
    first, again, other = (torch.cat([p.flatten() for p in tiny_model(seed=s).parameters()]) for s in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_refused_families_can_be_built(refused: str) -> None:
    assert sum(p.numel() for p in tiny_model(refused).parameters()) > 0


@pytest.mark.parametrize("make", [tiny_tokenizer, sentencepiece_like_tokenizer])
def test_tokenizers_round_trip_and_know_their_specials(make: Callable[[], Any]) -> None:
    tokenizer = make()
    assert tokenizer.decode(tokenizer(TEXT, add_special_tokens=False).input_ids) == TEXT
    assert len(tokenizer("<|im_start|>", add_special_tokens=False).input_ids) == 1
    assert tokenizer("x").input_ids[0] == tokenizer.bos_token_id
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False).count("<s>") == 1


def test_sentencepiece_like_adds_a_space_to_every_span() -> None:
    tokenizer = sentencepiece_like_tokenizer()
    parts = [tokenizer(t, add_special_tokens=False).input_ids for t in ("the city", "text")]
    assert tokenizer.decode(parts[0] + parts[1]) == "the city text"
    assert tokenizer.decode(tokenizer(" lead", add_special_tokens=False).input_ids) == "lead"

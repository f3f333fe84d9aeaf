"""A request whose KV is four times the device's budget gives what an unlimited cache gives: prefill, chunk reuse, every
repair, decoding, scoring, held prefixes. Counters prove that pages really left the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvboost_rag import KVBoost, Repair
from kvboost_rag.model.streaming.virtual import VirtualBackend
from kvboost_rag.plan import KVBudget
from tests.engine.helpers import DOCS, POLICIES, TOLERANCE, chat, make_engine, prepared, reference
from tests.paged.helpers import dense, least_budget, pair, stats, times_budget
from tests.tiny import tiny_model

NEW = 24
UNKNOWN = "A document that nobody knows yet, not even the store."


@pytest.mark.parametrize("family", ["llama", "mha", "mqa", "phi3", "qwen3", "yarn"])
def test_generation_equals_an_unlimited_cache(family: str) -> None:
    engines = paged, _ = pair(family)
    for name in ("fast", "balanced", "faithful", "shifted", "mixed", "full"):
        repair = POLICIES[name]
        for engine in engines:
            engine.forget()
        ours, theirs = (e.generate(chat(), repair=repair, max_new_tokens=NEW) for e in engines)
        assert ours.token_ids == theirs.token_ids, name
        assert len(ours.token_ids) == NEW
        report = ours.report
        assert times_budget(paged, report.prompt_tokens + NEW) >= 4
        assert report.reused_tokens == theirs.report.reused_tokens
        assert report.repaired_positions == theirs.report.repaired_positions
        assert report.forwarded_tokens == theirs.report.forwarded_tokens
        assert report.hits == theirs.report.hits == len(DOCS)
        # Nothing of this holds with paging off:
        assert report.host_tokens > 0.7 * report.prompt_tokens
        assert report.spilled_pages > 0
        assert report.host_attended_tokens > (NEW - 1) * 0.7 * report.prompt_tokens
        assert theirs.report.host_tokens == theirs.report.spilled_pages == theirs.report.host_attended_tokens == 0


def test_logits_equal_an_unlimited_cache(family: str) -> None:
    engines = paged, _ = pair(family)
    prompt = chat([DOCS[0], UNKNOWN, DOCS[2]])
    for name, repair in POLICIES.items():
        options = {"repair": repair, "chunks": [UNKNOWN], "logits": True}
        ours, theirs = (e.score(prompt, list(range(40, 70)), **options) for e in engines)
        assert ours.logits is not None
        assert theirs.logits is not None
        assert (ours.logits - theirs.logits).abs().max() < TOLERANCE, name
        assert ours.report.host_tokens > 0
    assert stats(paged)["bytes_in"] > 0, "30 rows are many: the host's part comes to the device"


@pytest.mark.parametrize("reuse", ["off", "prefix"])
def test_plain_prefill_too(reuse: str, family: str) -> None:
    paged, unlimited = pair(family, reuse=reuse)
    for prompt in (chat(), chat(question="\n\nAnd which lake? " + "Say it in full. " * 12)):
        ours, theirs = (e.generate(prompt, max_new_tokens=NEW) for e in (paged, unlimited))
        assert ours.token_ids == theirs.token_ids
        assert ours.report.host_tokens > 0
        assert ours.report.prefix_tokens == theirs.report.prefix_tokens
    assert (ours.report.prefix_tokens > 0) == (reuse == "prefix")


def test_full_repair_is_a_full_prefill(family: str) -> None:
    paged, _ = pair(family)
    got, report = prepared(paged, chat(), repair=Repair.full())
    logits, layers = reference(tiny_model(family), got.prompt.token_ids)
    assert (got.logits[0] - logits[-1]).abs().max() < TOLERANCE
    n = got.prompt.num_tokens
    kv = dense(paged, got.cache, n)
    for layer, (keys, values) in enumerate(layers):
        assert (kv[layer, 0] - keys).abs().max() < TOLERANCE
        assert (kv[layer, 1] - values).abs().max() < TOLERANCE
    assert report.hits == 4


@pytest.mark.parametrize("policy", POLICIES)
def test_the_cache_itself_is_the_same(policy: str) -> None:
    """Every K and V, what spreading and shifting changed on the host included."""
    paged, unlimited = pair()
    (ours, _), (theirs, _) = (prepared(e, chat(), repair=POLICIES[policy]) for e in (paged, unlimited))
    n = theirs.prompt.num_tokens
    kv = dense(paged, ours.cache, n)
    assert (kv - theirs.cache.kv[:, :, :, :n]).abs().max() < TOLERANCE  # type: ignore[attr-defined]


@pytest.mark.parametrize(("page_tokens", "times"), [(1, 1), (1, 8), (3, 1), (3, 3), (8, 3), (64, 1), (16, 3)])
def test_any_page_size_and_any_budget(page_tokens: int, times: int) -> None:
    def budget(engine):  # type: ignore[no-untyped-def]
        least = least_budget(engine, page_tokens)
        return type(least)(least.nbytes * times, page_tokens)

    paged, unlimited = pair(budget=budget)
    for repair in ("balanced", POLICIES["mixed"]):
        ours, theirs = (e.score(chat(), list(range(40, 120)), repair=repair, logits=True) for e in (paged, unlimited))
        assert ours.logits is not None
        assert theirs.logits is not None
        assert (ours.logits - theirs.logits).abs().max() < 5 * TOLERANCE  # hundreds of parts
        ours, theirs = (e.generate(chat(), repair=repair, max_new_tokens=20) for e in (paged, unlimited))
        assert ours.token_ids == theirs.token_ids


def test_what_fits_stays_on_the_device() -> None:
    """One run of pages serves plain attention: nothing is copied, nothing is merged."""
    paged, unlimited = pair(budget=lambda e: "64MiB")
    ours, theirs = (e.generate(chat(), max_new_tokens=NEW) for e in (paged, unlimited))
    assert ours.token_ids == theirs.token_ids
    found = stats(paged)
    assert found["spilled_pages"] == found["placed_pages"] == found["bytes_in"] == found["bytes_out"] == 0
    assert ours.report.host_tokens == 0
    assert full_prefill_gap_of(paged) < TOLERANCE


def full_prefill_gap_of(engine) -> float:  # type: ignore[no-untyped-def]
    got, _ = prepared(engine, chat(), repair=Repair.full())
    logits, _ = reference(tiny_model(), got.prompt.token_ids)
    return float((got.logits[0] - logits[-1]).abs().max())


def test_broken_merging_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """These laws can fail: leave out the host's part, and the answers differ."""
    from kvboost_rag.model.paged.attention import PagedPlan

    paged, unlimited = pair()
    theirs = unlimited.score(chat(), [40, 41, 42], logits=True)
    monkeypatch.setattr(PagedPlan, "_host_part", lambda *a: None)
    ours = paged.score(chat(), [40, 41, 42], logits=True)
    assert ours.logits is not None
    assert theirs.logits is not None
    assert (ours.logits - theirs.logits).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_within_its_rounding(dtype: torch.dtype) -> None:
    def model() -> Any:
        return tiny_model(dtype=dtype)

    unlimited = make_engine(model=model())
    paged = make_engine(model=model(), kv_vram=least_budget(unlimited), kv_backend=VirtualBackend(order="late"))
    exact = make_engine()
    for engine in (paged, unlimited, exact):
        engine.warm(DOCS)
    options: dict[str, Any] = {"repair": Repair.boundary(4).with_spread(), "logits": True}
    ours, theirs, full = (e.score(chat(), [40, 50, 60], **options) for e in (paged, unlimited, exact))
    assert ours.logits is not None
    assert theirs.logits is not None
    assert full.logits is not None
    assert ours.report.host_tokens > 0
    rounding = (theirs.logits - full.logits).abs().max()
    assert (ours.logits - full.logits).abs().max() < 1.5 * rounding


@pytest.mark.slow
@pytest.mark.real_model
def test_the_real_model_too(smollm2: Any) -> None:
    """1,100 tokens of KV in pages that hold a quarter of it."""
    docs = [text * 11 for text in DOCS]
    prompt = chat(docs)
    answers = {}
    for name, kv in (("paged", KVBudget(270 * 46080)), ("unlimited", None)):
        with KVBoost(smollm2.model, smollm2.tokenizer, store="memory", filler_tokens=64, kv_vram=kv) as engine:
            engine.warm(docs)
            answers[name] = engine.generate(prompt, max_new_tokens=24)
    assert answers["paged"].token_ids == answers["unlimited"].token_ids
    report = answers["paged"].report
    assert report.hits == 4
    assert report.prompt_tokens + 24 > 4 * 270
    assert report.host_attended_tokens > 0

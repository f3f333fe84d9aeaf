"""The pool: pages come and go, requests share it, and what is cut off or over gives its pages back."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch

from kvboost_rag import KVBoost, Repair
from kvboost_rag.errors import CapacityError, UnsupportedModelError, UsageError
from kvboost_rag.model.streaming.virtual import VirtualBackend
from kvboost_rag.plan import KVBudget, page_sizes
from tests.engine.helpers import DOCS, TOLERANCE, chat, make_engine
from tests.paged.helpers import PAGE, dense, least_budget, pair, stats
from tests.tiny import tiny_model, tiny_tokenizer


def forward(engine: KVBoost, cache: Any, ids: torch.Tensor, start: int, end: int) -> torch.Tensor:
    positions = torch.arange(start, end)
    return engine.adapter.forward(ids[start:end], positions, cache, keep_logits=0)


IDS = torch.randint(10, 300, (200,), generator=torch.Generator().manual_seed(0))


# --- one request --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("step", [1, 5, 17, 64])
def test_rows_in_any_steps_give_the_same(step: int, times: int) -> None:
    """Pages spill between forwards and inside a prefill; few rows and many take different ways."""
    paged, unlimited = pair(order="late", budget=lambda e: KVBudget(times * least_budget(e).nbytes, PAGE))
    ours, theirs = paged.adapter.new_cache(200), unlimited.adapter.new_cache(200)
    for start in range(0, 200, step):
        end = min(200, start + step)
        a, b = (forward(e, c, IDS, start, end) for e, c in ((paged, ours), (unlimited, theirs)))
        assert (a - b).abs().max() < TOLERANCE
    assert (dense(paged, ours, 200) - dense(unlimited, theirs, 200)).abs().max() < TOLERANCE
    assert stats(paged)["spilled_pages"] > 0 or step == 64


@pytest.mark.parametrize("keep", [199, 190, 150, 97, 96, 95, 8, 1])
def test_crop_then_go_on(keep: int) -> None:
    """Behind the cut everything is forgotten, wherever the cut lies; what follows equals a cache that never had it."""
    paged, unlimited = pair()
    cache = paged.adapter.new_cache(200)
    forward(paged, cache, IDS, 0, 200)
    cache.crop(keep - 200)
    assert cache.get_seq_length() == keep
    other = IDS.flip(0)
    mixed = torch.cat([IDS[:keep], other[: 200 - keep]])
    got = torch.cat([forward(paged, cache, mixed, a, min(200, a + 30)) for a in range(keep, 200, 30)])
    theirs = unlimited.adapter.new_cache(200)
    expected = forward(unlimited, theirs, mixed, 0, 200)[keep:]
    assert (got - expected).abs().max() < TOLERANCE
    with pytest.raises(ValueError, match="negative"):
        cache.crop(1)
    cache.crop(-200)
    assert stats(paged)["free_pages"] == stats(paged)["pages"]


def test_a_row_in_the_middle_again() -> None:
    """Rows over complete pages, on both sides of the border, give their own logits again."""
    paged, _ = pair()
    cache = paged.adapter.new_cache(200)
    full = forward(paged, cache, IDS, 0, 200)
    for rows in ([0], [5, 6], [1, 90, 199], list(range(0, 200, 3)), [199]):
        positions = torch.tensor(rows)
        again = paged.adapter.forward(IDS[positions], positions, cache, keep_logits=0)
        assert (again - full[positions]).abs().max() < TOLERANCE


def test_pages_are_spilled_once() -> None:
    paged, _ = pair()
    cache = paged.adapter.new_cache(200)
    for i in range(200):
        forward(paged, cache, IDS, i, i + 1)
    found = stats(paged)
    page_bytes = PAGE * paged.adapter.spec.bytes_per_token
    assert found["spilled_pages"] == 200 // PAGE - 1
    assert found["bytes_out"] == found["spilled_pages"] * page_bytes
    assert found["bytes_in"] == 0, "one row at a time, nothing comes back"


# --- several requests ---------------------------------------------------------------------------------------


def test_streams_side_by_side() -> None:
    """Two answers, token by token in turn, in a pool that holds neither."""
    paged, unlimited = pair(order="random")
    prompts = [chat(), chat(DOCS[::-1])]
    expected = [unlimited.generate(p, max_new_tokens=30).text for p in prompts]
    streams = [paged.stream(p, max_new_tokens=30) for p in prompts]
    texts = ["", ""]
    live = {0, 1}
    while live:
        for i in sorted(live):
            piece = next(streams[i])
            texts[i] += piece.text
            if piece.result is not None:
                live.discard(i)
    assert texts == expected


def test_threads_share_the_pool() -> None:
    paged, unlimited = pair()
    prompts = [chat(DOCS[i:] + DOCS[:i]) for i in range(4)]
    expected = [unlimited.generate(p, max_new_tokens=12).token_ids for p in prompts]
    got: dict[int, list[int]] = {}

    def ask(i: int) -> None:
        got[i] = paged.generate(prompts[i], max_new_tokens=12).token_ids

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert [got[i] for i in range(4)] == expected


def test_what_is_over_gives_its_pages_back() -> None:
    paged, _ = pair(prefix_bytes=0)
    for _ in range(3):
        paged.generate(chat(), max_new_tokens=20)
        for piece in paged.stream(chat(), max_new_tokens=20):
            if piece.text:
                break  # the reader walks away
        del piece
        gc.collect()
        found = stats(paged)
        assert found["free_pages"] == found["pages"]
    assert found["host_bytes"] <= 4 * found["page_tokens"] * paged.adapter.spec.bytes_per_token, "a few are kept"


def test_held_turns_make_room() -> None:
    """What conversations hold moves to the host, serves from there, and never keeps a request from running."""
    paged, unlimited = pair(budget=lambda e: KVBudget(least_budget(e).nbytes * 6, PAGE))
    for turn in range(3):
        for i in range(3):
            messages = chat([DOCS[i]], question="\n\nWhich? " + "Tell me more. " * turn)
            ours, theirs = (e.generate(messages, max_new_tokens=16) for e in (paged, unlimited))
            assert ours.token_ids == theirs.token_ids
            assert ours.report.prefix_tokens == theirs.report.prefix_tokens
            assert turn == 0 or ours.report.prefix_tokens > 0
    assert stats(paged)["spilled_pages"] > 0
    assert paged.engine.prefixes.nbytes > 0
    paged.forget()
    gc.collect()
    assert stats(paged)["free_pages"] == stats(paged)["pages"]


# --- sizes --------------------------------------------------------------------------------------------------


def test_callers_in_and_outside_of_inference_mode_share_host_memory() -> None:
    """Memory that was made in that mode cannot be written outside of it."""
    paged, unlimited = pair(prefix_bytes=0)
    expected = unlimited.generate(chat(), max_new_tokens=6).token_ids
    with torch.inference_mode():
        assert paged.generate(chat(), max_new_tokens=6).token_ids == expected
    assert paged.generate(chat(), max_new_tokens=6).token_ids == expected
    assert stats(paged)["host_bytes"] > 0


def test_too_small_a_budget_names_the_smallest() -> None:
    engine = make_engine()
    least = least_budget(engine)
    with pytest.raises(CapacityError, match=str(least.nbytes)):
        make_engine(kv_vram=KVBudget(least.nbytes - 1, PAGE))
    make_engine(kv_vram=least)


@pytest.mark.parametrize("vram", [1, 3, 10, 100, 1000])
@pytest.mark.parametrize("page_tokens", [1, 16, 64])
def test_the_device_never_holds_more_than_its_budget(vram: int, page_tokens: int) -> None:
    token, layers = 8192, 8
    budget = KVBudget(vram * 5 * page_tokens * token, page_tokens)
    sizes = page_sizes(budget, token, layers)
    assert sizes.device_bytes <= budget.nbytes
    assert sizes.device_bytes > budget.nbytes - sizes.page_bytes - 2 * sizes.segment_layer_bytes
    assert sizes.segment_tokens % page_tokens == 0
    assert sizes.pages >= 2


def test_the_stand_in_device_counts_every_byte() -> None:
    backend = VirtualBackend()
    budget = least_budget(make_engine())
    engine = make_engine(kv_vram=KVBudget(3 * budget.nbytes, PAGE), kv_backend=backend)
    assert backend.allocated == stats(engine)["device_bytes"] <= 3 * budget.nbytes
    engine.generate(chat(), max_new_tokens=8)
    assert backend.allocated == stats(engine)["device_bytes"]
    with pytest.raises(CapacityError, match="virtual device"):
        make_engine(kv_vram="1GiB", kv_backend=VirtualBackend(limit=1 << 20))


def test_wrong_settings() -> None:
    for wrong in ("lots", 0, "-1GiB"):
        with pytest.raises(UsageError, match=r"size|no memory"):
            make_engine(kv_vram=wrong)
    with pytest.raises(UsageError, match="page_tokens"):
        KVBudget("1GiB", page_tokens=0)
    with pytest.raises(UsageError, match="no folder"):
        KVBudget("1GiB", disk="/nowhere/at/all")
    with pytest.raises(UnsupportedModelError):
        KVBoost(tiny_model("gemma2"), tiny_tokenizer(), store=None, reuse="off", kv_vram="1GiB")


def test_full_repair_without_a_backend_of_its_own() -> None:
    """A budget on a CPU: the stand-in that copies at once is chosen."""
    engine = make_engine(kv_vram=least_budget(make_engine()))
    engine.warm(DOCS)
    ours = engine.generate(chat(), repair=Repair.full(), max_new_tokens=8)
    plain = make_engine(reuse="off").generate(chat(), max_new_tokens=8)
    assert ours.report.spilled_pages + ours.report.host_tokens > 0
    assert len(ours.token_ids) == len(plain.token_ids)


def test_other_devices_are_refused() -> None:
    from kvboost_rag.model.paged.pool import choose_backend

    with pytest.raises(UsageError, match="this is mps"):
        choose_backend(torch.device("mps"))

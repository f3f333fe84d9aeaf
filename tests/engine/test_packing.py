"""Chunks packed into one row of tokens give the blocks that they give alone, and none of them sees another."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvboost_rag import KVBoost
from kvboost_rag.model import kernels, packed
from kvboost_rag.model.packed import ONE_BY_ONE, Segments, choose_packed, one_by_one
from tests.engine.helpers import DOCS, chat, make_engine, plain_ids
from tests.tiny import tiny_model

TIGHT = 2e-5  # fp32, relative to the largest value
CPU = torch.device("cpu")
SHAPE = ((4, 2), 16)


def gap(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


def chunks_of(engine: KVBoost, lengths: tuple[int, ...] = (1, 37, 8, 20)) -> list[tuple[int, ...]]:
    ids = plain_ids(engine.tokenizer, " ".join(DOCS))
    return [tuple(ids[7 * i : 7 * i + n]) for i, n in enumerate(lengths)]


@pytest.mark.parametrize("options", [{}, {"alone": True}, {"filler_tokens": 0}], ids=["filler", "alone", "head"])
def test_packed_blocks_are_those_of_single_chunks(options: dict[str, Any], family: str) -> None:
    engine = make_engine(family, **options)
    chunks = chunks_of(engine)
    together = engine.encoder(packs=True).encode(chunks)
    counts = engine.stats()["encoding"]
    assert isinstance(counts, dict)
    assert (counts["packed_forwards"], counts["packed_chunks"], counts["padding"]) == (1, 4, 0)
    singles = engine.encoder(packs=False)
    for chunk, block in zip(chunks, together, strict=True):
        (alone,) = singles.encode([chunk])
        assert block.token_ids == alone.token_ids == chunk
        assert block.key == alone.key
        assert gap(block.kv, alone.kv) < TIGHT
        assert block.kv.is_contiguous()
    assert engine.adapter.encoded.packed_forwards == 1, "single chunks went through the padded path"


@pytest.mark.parametrize("changed", [0, 1, 3])
def test_a_changed_chunk_changes_no_bit_of_another(changed: int, family: str) -> None:
    encoder = make_engine(family).encoder(packs=True)
    chunks = chunks_of(make_engine(family), (12, 37, 8, 20))
    before = encoder.encode(chunks)
    other = list(chunks)
    other[changed] = tuple(reversed(chunks[changed]))
    after = encoder.encode(other)
    for i, (a, b) in enumerate(zip(before, after, strict=True)):
        assert torch.equal(a.kv, b.kv) == (i != changed)


def test_order_and_company_do_not_matter() -> None:
    encoder = make_engine("qwen3").encoder(packs=True)
    chunks = chunks_of(make_engine("qwen3"))
    first, second = encoder.encode(chunks), encoder.encode(chunks[::-1])[::-1]
    for a, b in zip(first, second, strict=True):
        assert gap(a.kv, b.kv) < TIGHT


def test_contamination_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """These laws can fail: let every chunk see those before it."""
    engine = make_engine()
    chunks = chunks_of(engine)
    honest = engine.encoder(packs=True).encode(chunks)

    def leaky(query: Any, key: Any, value: Any, segments: Segments, scaling: float) -> Any:
        if segments.causal:
            total = segments.rows[-1]
            segments = Segments.of([total], [total], query.device, causal=True)
        return one_by_one(query, key, value, segments, scaling)

    engine.adapter.packed = packed.PackedKernel("leaky", "test", leaky)
    for i, (a, b) in enumerate(zip(engine.encoder(packs=True).encode(chunks), honest, strict=True)):
        assert (gap(a.kv, b.kv) > 0.01) == (i > 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_within_its_rounding(dtype: torch.dtype) -> None:
    engine, exact = make_engine(model=tiny_model(dtype=dtype)), make_engine(model=tiny_model(dtype=dtype).float())
    chunks = chunks_of(engine)
    together, padded = engine.encoder(packs=True).encode(chunks), engine.encoder(packs=False).encode(chunks)
    for a, b, c in zip(together, padded, exact.encoder().encode(chunks), strict=True):
        assert (a.kv.float() - c.kv).abs().max() < 1.5 * (b.kv.float() - c.kv).abs().max() + 1e-6


def test_a_warm_up_that_packs(family: str) -> None:
    """Other lengths share a forward; the answers are those of padded blocks."""
    engines = packing, padding = [make_engine(family) for _ in range(2)]
    docs = [*DOCS, "A short one.", DOCS[0] * 3]
    for engine, packs in zip(engines, (True, False), strict=True):
        report = engine.warm(docs, packs=packs, batch_tokens=400)
        assert (report.stored, report.failed) == (len(docs), 0)
    ours, theirs = (engine.adapter.encoded for engine in (packing, padding))
    assert (ours.packed_chunks, ours.padding) == (len(docs), 0)
    assert (theirs.packed_chunks, theirs.chunks) == (0, len(docs))
    assert 1 < ours.forwards < theirs.forwards, "more fit into one forward where nothing is padded"
    a, b = (engine.score(chat(), list(range(40, 60)), logits=True) for engine in engines)
    assert a.report.hits == b.report.hits == len(DOCS)
    assert a.logits is not None
    assert b.logits is not None
    assert (a.logits - b.logits).abs().max() < 1e-3


def test_a_cpu_packs_only_when_asked() -> None:
    assert make_engine().encoder().packs is False
    assert make_engine().encoder(packs=True).packs is True


# --- which kernel ---------------------------------------------------------------------------------------------------


def test_kernels_without_a_packed_form_go_one_by_one() -> None:
    found = choose_packed("sdpa", CPU, torch.float32, *SHAPE)
    assert (found.name, found.run) == ("one by one", one_by_one)
    assert ONE_BY_ONE.run is one_by_one


def wrong(query: Any, key: Any, value: Any, segments: Segments, scaling: float) -> Any:
    out, lse = one_by_one(query, key, value, segments, scaling)
    return out, lse + segments.causal  # base-2 logarithms, say


def failing(*args: Any) -> Any:
    raise RuntimeError("no kernel image is available")


@pytest.mark.parametrize(("run", "reason"), [(wrong, "its result is wrong"), (failing, "no kernel image")])
def test_a_kernel_that_is_wrong_is_not_taken(run: Any, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "_KERNELS", {"varlen": run})
    found = choose_packed("varlen", CPU, torch.float32, *SHAPE)
    assert found.run is one_by_one
    assert reason in found.reason


def test_a_package_that_is_missing_is_said() -> None:
    assert "not installed" in choose_packed("flash-attn", CPU, torch.float32, *SHAPE).reason


@pytest.mark.parametrize("turned", [False, True])
def test_what_a_flash_kernel_is_handed(turned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels' shapes: rows first, ends as int32, the log-sum-exp either way round."""
    calls: list[tuple[Any, ...]] = []

    def flash(query: Any, key: Any, value: Any, segments: Segments, scaling: float) -> Any:
        calls.append((query.shape, key.shape, segments.row_ends.tolist(), segments.key_ends.tolist(), segments.longest))
        assert segments.row_ends.dtype == segments.key_ends.dtype == torch.int32
        heads, kv_heads = query.shape[1], key.shape[1]
        folded = query.transpose(0, 1).reshape(kv_heads, heads // kv_heads, query.shape[0], -1)
        out, lse = one_by_one(folded, key.transpose(0, 1), value.transpose(0, 1), segments, scaling)
        flat = lse.reshape(heads, -1)
        return out.reshape(heads, query.shape[0], -1).transpose(0, 1), flat.T if turned else flat

    monkeypatch.setattr(packed, "_KERNELS", {"varlen": packed._folded(flash)})
    engine = make_engine("qwen2")
    engine.adapter.packed = choose_packed("varlen", CPU, torch.float32, (4, 2), 16)
    assert engine.adapter.packed.name == "varlen"
    calls.clear()
    chunks = chunks_of(engine)
    together = engine.encoder(packs=True).encode(chunks)
    context = len(engine.encoder()._contexts["canonical"].token_ids)
    own = ((66, 4, 16), (66, 2, 16), [0, 1, 38, 46, 66], [0, 1, 38, 46, 66], (37, 37))
    shared = ((66, 4, 16), (context, 2, 16), [0, 66], [0, context], (66, context))
    assert calls == [own, shared] * 4
    for a, b in zip(together, engine.encoder(packs=False).encode(chunks), strict=True):
        assert gap(a.kv, b.kv) < TIGHT


@pytest.mark.parametrize("causal", [True, False])
def test_the_call_fits_the_torch_that_is_here(causal: bool) -> None:
    """On the meta device torch checks the call and gives the shapes, whatever options its version has."""
    meta = torch.device("meta")
    segments = Segments.of((30, 40), (30, 40) if causal else (9, 11), meta, causal=causal)
    query = torch.empty(2, 2, 70, 16, device=meta, dtype=torch.float16)
    key = torch.empty(2, 70 if causal else 20, 16, device=meta, dtype=torch.float16)
    out, lse = packed._KERNELS["varlen"](query, key, key, segments, 0.25)
    assert (out.shape, lse.shape) == ((2, 2, 70, 16), (2, 2, 70))
    flat = kernels._varlen(query.flatten(0, 1)[None], key[None], key[None], 0.25)
    assert flat.shape == (1, 70, 4, 16)


def test_older_and_newer_varlen_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.10, 2.11 and 2.12 ask for different options."""
    import torch.nn.attention.varlen as module

    seen: dict[str, Any] = {}

    def v210(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, is_causal: Any = False) -> None:
        seen.update(is_causal=is_causal)

    def v211(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, *, scale: Any = None,
             window_size: Any = (-1, -1)) -> None:  # fmt: skip
        seen.update(scale=scale, window_size=window_size)

    def v212(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, *, scale: Any = None,
             window_size: Any = (-1, -1), enable_gqa: bool = False) -> None:  # fmt: skip
        seen.update(scale=scale, window_size=window_size, enable_gqa=enable_gqa)

    q, k, ends = torch.empty(5, 4, 16), torch.empty(5, 2, 16), torch.tensor([0, 5], dtype=torch.int32)
    for function, expected in (
        (v210, {"is_causal": True}),
        (v211, {"scale": 0.25, "window_size": (-1, 0)}),
        (v212, {"scale": 0.25, "window_size": (-1, 0), "enable_gqa": True}),
    ):
        seen.clear()
        monkeypatch.setattr(module, "varlen_attn", function)
        packed.varlen_attention(q, k, k, ends, ends, (5, 5), 0.25, causal=True)
        assert seen == expected
    monkeypatch.setattr(module, "varlen_attn", v210)
    with pytest.raises(NotImplementedError, match="scale"):
        packed.varlen_attention(q, k, k, ends, ends, (5, 5), 0.3, causal=True)

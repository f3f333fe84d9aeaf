"""Streamed = resident: the same logits through plain forwards, reuse and repair, in every legal order of copies; with
counters that prove that layers were streamed, and checks that a missing wait is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvboost_rag import KVBoost, Repair
from kvboost_rag.errors import CapacityError, CheckpointError, UnsupportedModelError, UsageError
from kvboost_rag.model.direct.files import CheckpointFiles
from kvboost_rag.model.load import load_model
from kvboost_rag.model.streaming.host import HostEmbedding, HostLinear
from kvboost_rag.model.streaming.virtual import RaceError, VirtualBackend
from kvboost_rag.plan import Budget
from tests.awq.rtn import edit_quantization, edit_tensors, save_awq
from tests.engine.helpers import DOCS, TOLERANCE, chat, full_prefill_gap, prepared
from tests.streaming.helpers import IDS, budget_for, load_streamed, logits, streamed_engine
from tests.tiny import save_tiny, tiny_model

ORDERS = ["late", "early", "random"]


def check_counters(model: Any, *, resident: int, forwards: int | None = None) -> None:
    stats, layers = model.kvboost_streamer.stats, model.config.num_hidden_layers
    assert stats.resident_layers == resident
    assert stats.resident_layers + stats.streamed_layers == layers
    assert stats.bytes_copied > 0
    assert stats.bytes_copied == stats.copies * model.kvboost_plan.slot_bytes
    if forwards is not None:
        assert stats.layers_run == forwards * stats.streamed_layers
        assert stats.late_fetches == 0
        # One fill at the start, then one copy for each layer that was run.
        assert stats.copies == stats.slots + stats.layers_run


# --- plain forwards -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "phi3", "tied"])
def test_plain_weights(family: str, order: Any, tmp_path: Path) -> None:
    save_tiny(tmp_path, family)
    model = load_streamed(tmp_path, budget_for(tmp_path, 0), VirtualBackend(order=order))
    for _ in range(3):
        assert (logits(model) - logits(tiny_model(family))).abs().max() < TOLERANCE
    check_counters(model, resident=0, forwards=3)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_packed_weights(family: str, order: Any, tmp_path: Path) -> None:
    oracle = save_awq(tmp_path, family, num_hidden_layers=6)
    model = load_streamed(tmp_path, budget_for(tmp_path, 1), VirtualBackend(order=order))
    for _ in range(3):
        assert (logits(model) - logits(oracle)).abs().max() < TOLERANCE
    check_counters(model, resident=1)


@pytest.mark.parametrize(("streamed", "slots"), [(3, 2), (4, 2), (7, 2), (4, 3), (5, 3), (7, 3), (5, 4)])
def test_any_number_of_layers_through_any_number_of_slots(streamed: int, slots: int, tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", num_hidden_layers=7)
    oracle = tiny_model("llama", num_hidden_layers=7)
    for seed in range(2):
        backend = VirtualBackend(order="random", seed=seed)
        model = load_streamed(tmp_path, budget_for(tmp_path, 7 - streamed, slots=slots), backend)
        assert len(model.kvboost_plan.streamed) == streamed
        for _ in range(3):
            assert (logits(model) - logits(oracle)).abs().max() < TOLERANCE
        check_counters(model, resident=7 - streamed)
        assert model.kvboost_streamer.stats.late_fetches == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_bit_equal(dtype: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen2")
    resident = load_model(tmp_path, device="cpu", dtype=dtype).model
    budget = budget_for(tmp_path, 0)
    model = load_streamed(tmp_path, Budget(budget.vram // 2 + 4096, 64, 0, 0), dtype=dtype)
    assert model.dtype == resident.dtype
    assert torch.equal(logits(model), logits(resident))
    check_counters(model, resident=0)


def test_device_memory_stays_inside_the_budget(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", num_hidden_layers=8)
    budget = budget_for(tmp_path, 3)
    backend = VirtualBackend(limit=budget.vram)
    model = load_streamed(tmp_path, budget, backend)
    plan = model.kvboost_plan
    assert backend.allocated == plan.resident_bytes + plan.slots * plan.slot_bytes
    assert plan.device_bytes <= budget.vram
    assert len(plan.resident) == 3


def test_memory_of_the_host_is_the_streamed_layers_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvboost_rag.model.direct import files
    from tests.awq.test_load import Peak

    save_tiny(tmp_path, "llama", num_hidden_layers=12, dtype=torch.float16)
    budget = budget_for(tmp_path, 2)
    monkeypatch.setattr(files, "STAGING", 1 << 14)
    with Peak() as memory:
        model = load_streamed(tmp_path, budget)
    plan = model.kvboost_plan
    everything = plan.weights.total + plan.slots * plan.slot_bytes
    assert plan.host_bytes > 8 * plan.slot_bytes
    assert everything * 0.9 < memory.peak < everything + plan.slot_bytes


class Measured(VirtualBackend):
    """A bus of a known speed, on which the host never waits."""

    def measure(self, target: torch.Tensor, source: torch.Tensor) -> float | None:
        return source.numel() / 25e9

    def synchronize(self, event: Any) -> None:
        raise AssertionError("the host waits inside a forward")


def test_the_speed_to_expect_is_told_before_anything_runs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_tiny(tmp_path)
    with caplog.at_level("INFO"):
        model = load_streamed(tmp_path, budget_for(tmp_path, 1), Measured())
    expected = model.kvboost_plan.tokens_per_s(25e9)
    assert "25.0 GB/s measured" in caplog.text
    assert f"at most {expected:.2f} tokens/s" in caplog.text
    assert model.kvboost_streamer.stats.probed_gb_per_s == pytest.approx(25)
    assert model.kvboost_streamer.stats.layers_run == 0


def test_the_host_never_waits_inside_forwards(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    model = load_streamed(tmp_path, budget_for(tmp_path, 0), Measured(order="late"))
    for _ in range(3):
        assert (logits(model) - logits(tiny_model())).abs().max() < TOLERANCE
    check_counters(model, resident=0, forwards=3)


# --- tables on the host -------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "tied"])
def test_embedding_and_output_matrix_on_the_host(family: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, family)
    model = load_streamed(tmp_path, budget_for(tmp_path, 0, head=False))
    assert (model.kvboost_plan.embed_on_host, model.kvboost_plan.head_on_host) == (True, True)
    assert isinstance(model.get_input_embeddings(), HostEmbedding)
    assert isinstance(model.get_output_embeddings(), HostLinear)
    if family == "tied":
        assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert (logits(model) - logits(tiny_model(family))).abs().max() < TOLERANCE


def test_embedding_alone_on_the_host(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    model = load_streamed(tmp_path, budget_for(tmp_path, 1))
    assert isinstance(model.get_input_embeddings(), HostEmbedding)
    assert type(model.get_output_embeddings()) is torch.nn.Linear


def test_enough_memory_streams_nothing(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    model = load_streamed(tmp_path, Budget(vram=1 << 30, reserve=0, workspace=0))
    assert model.kvboost_streamer is None
    assert (logits(model) - logits(tiny_model("llama"))).abs().max() < TOLERANCE


@pytest.mark.parametrize("order", ORDERS)
def test_copies_and_stalls_are_timed(order: Any, tmp_path: Path) -> None:
    save_tiny(tmp_path)
    model = load_streamed(tmp_path, budget_for(tmp_path, 0), VirtualBackend(order=order))
    for _ in range(5):
        logits(model)
    stats = model.kvboost_streamer.stats
    assert stats.timed_bytes > 0.5 * stats.bytes_copied
    assert stats.copy_s > 0
    assert stats.gb_per_s is not None


# --- reuse and repair ---------------------------------------------------------------------------------------

POLICIES: dict[str, Any] = {
    "fast": "fast",
    "balanced": "balanced",
    "faithful": "faithful",
    "deviation": Repair.deviation(0.2),  # probes a few layers and leaves the forward early
    "mixed": Repair.boundary(2) | Repair.attention(0.1) | Repair.deviation(0.1),
}


@pytest.mark.parametrize("kind", ["plain", "awq"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_reuse_and_repair(family: str, kind: str, tmp_path: Path) -> None:
    oracle = save_awq(tmp_path, family) if kind == "awq" else tiny_model(family)
    if kind == "plain":
        save_tiny(tmp_path, family)
    # Two slots for three layers: the circle closes in the middle.
    engine = streamed_engine(tmp_path, budget_for(tmp_path, 1), VirtualBackend(order="random"))
    dense = KVBoost(oracle, engine.tokenizer, store="memory", filler_tokens=48)
    for e in (engine, dense):
        e.warm(DOCS)
    prompt = chat([DOCS[2], DOCS[0], DOCS[3]])
    for name, repair in POLICIES.items():
        (ours, report), (theirs, _) = (prepared(e, prompt, repair=repair) for e in (engine, dense))
        assert [c.outcome for c in report.chunks] == ["hit"] * 3
        assert report.reused_tokens > 0
        assert (ours.logits - theirs.logits).abs().max() < TOLERANCE, name
    assert full_prefill_gap(engine, oracle, prompt, repair=Repair.full()) < TOLERANCE
    texts = [e.generate(prompt, max_new_tokens=8).token_ids for e in (engine, dense)]
    assert texts[0] == texts[1]
    assert engine.stats()["streaming"]["bytes_copied"] > 0  # type: ignore[index]
    assert dense.stats()["streaming"] is None
    check_counters(engine.model, resident=len(engine.model.kvboost_plan.resident))


def test_reuse_saves_passes_over_the_bus(tmp_path: Path) -> None:
    """A pass costs the same whatever its rows: reuse must not add passes to what plain prefill needs."""
    save_tiny(tmp_path)
    engine = streamed_engine(tmp_path, budget_for(tmp_path, 0))
    engine.warm(DOCS)
    options: dict[str, dict[str, Any]] = {
        "off": {"reuse": "off"}, "fast": {"repair": "fast"}, "boundary": {"repair": Repair.boundary(8)}, "balanced": {},
    }  # fmt: skip
    passes = {}
    for name, option in options.items():
        before = engine.model.kvboost_streamer.stats.layers_run
        engine.generate(chat(), max_new_tokens=1, **option)
        passes[name] = (engine.model.kvboost_streamer.stats.layers_run - before) / 4
    assert passes == {"off": 1, "fast": 1, "boundary": 1, "balanced": 2}  # as docs/big-models.md says


def test_blocks_of_a_resident_model_serve_a_streamed_one(tmp_path: Path) -> None:
    save_awq(tmp_path / "m", "qwen2")
    store = tmp_path / "store"
    with KVBoost.from_pretrained(tmp_path / "m", device="cpu", store=store, filler_tokens=48) as resident:
        resident.warm(DOCS)
        fingerprint = resident.adapter.fingerprint
    budget = budget_for(tmp_path / "m", 0, head=False)
    with streamed_engine(tmp_path / "m", budget, store=store) as engine:
        assert engine.adapter.fingerprint == fingerprint
        result = engine.generate(chat(), max_new_tokens=2)
        assert [c.outcome for c in result.report.chunks] == ["hit"] * 4
        # The slots hold other layers by now: the identity is read off the host's copy.
        engine.adapter._fingerprint = None
        assert engine.adapter.fingerprint == fingerprint


def test_earlier_requests_hold_device_memory_only_when_asked(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    budget = budget_for(tmp_path, 1)
    assert streamed_engine(tmp_path, budget).engine.prefixes.limit_bytes == 0
    with pytest.raises(CapacityError, match="at least"):
        streamed_engine(tmp_path, budget, prefix_bytes=1 << 30)


# --- forwards that are left early ---------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
def test_a_forward_left_early_at_any_layer(order: Any, tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", num_hidden_layers=6)
    oracle = tiny_model("llama", num_hidden_layers=6)
    model = load_streamed(tmp_path, budget_for(tmp_path, 1), VirtualBackend(order=order))

    class Stop(Exception):
        pass

    def stop(*args: Any) -> None:
        raise Stop

    for place in [layer.mlp for layer in model.model.layers] + [layer.input_layernorm for layer in model.model.layers]:
        handle = place.register_forward_pre_hook(stop)
        for _ in range(2):
            with pytest.raises(Stop):
                logits(model)
        handle.remove()
        for _ in range(2):
            assert (logits(model) - logits(oracle)).abs().max() < TOLERANCE


def test_any_layer_may_be_called_by_itself(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", num_hidden_layers=6)
    model = load_streamed(tmp_path, budget_for(tmp_path, 1))
    streamer, plan = model.kvboost_streamer, model.kvboost_plan
    for j in (4, 1, 3, 0, 4):
        streamer.enter(j)
        name = f"model.layers.{plan.streamed[j]}.mlp.up_proj.weight"
        assert torch.equal(model.get_parameter(name), model.kvboost_host_weights[name])
        streamer.leave(j)


# --- races are found ----------------------------------------------------------------------------------------


class Forgetful(VirtualBackend):
    """Leaves out the waits of one stream."""

    forgets = ""

    def wait(self, stream: Any, event: Any) -> None:
        if stream != self.forgets:
            VirtualBackend.wait(self, stream, event)


def forgetful(stream: str, **options: Any) -> Forgetful:
    backend = Forgetful(**options)
    backend.forgets = stream
    return backend


@pytest.mark.parametrize("order", ORDERS)
def test_a_missing_wait_for_the_copy_is_caught(order: Any, tmp_path: Path) -> None:
    save_tiny(tmp_path)
    model = load_streamed(tmp_path, budget_for(tmp_path, 0), forgetful("compute", order=order))
    with pytest.raises(RaceError, match="before the copy"):
        logits(model)


@pytest.mark.parametrize("order", ORDERS)
def test_a_missing_wait_for_the_readers_is_caught(order: Any, tmp_path: Path) -> None:
    save_tiny(tmp_path)
    model = load_streamed(tmp_path, budget_for(tmp_path, 0), forgetful("copy", order=order))
    with pytest.raises(RaceError, match="still being read"):
        logits(model)


def test_without_the_checker_the_poison_shows(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    model = load_streamed(tmp_path, budget_for(tmp_path, 0), forgetful("compute", check=False))
    assert logits(model).isnan().all()


def test_a_slot_read_after_its_time_is_poisoned(tmp_path: Path) -> None:
    """Who keeps a layer's weight beyond its forward sees no stale numbers but NaN."""
    save_tiny(tmp_path)
    model = load_streamed(tmp_path, budget_for(tmp_path, 0))
    logits(model)
    assert model.model.layers[0].mlp.up_proj.weight.isnan().all()


# --- host memory --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "pinned"),
    [
        (VirtualBackend(), "whole"),
        (VirtualBackend(lock_each=300_000), "blocks"),
        (VirtualBackend(lock_each=300_000, lock_total=300_000, lock_new=True), "torch"),
        (VirtualBackend(lock_each=0), "pageable"),
    ],
    ids=["whole", "blocks", "torch", "pageable"],
)
def test_page_locking_falls_back_and_says_so(
    backend: VirtualBackend, pinned: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny(tmp_path)
    model = load_streamed(tmp_path, budget_for(tmp_path, 0), backend)
    assert model.kvboost_streamer.stats.pinned == pinned
    assert ("could not be page-locked" in caplog.text) == (pinned == "pageable")
    assert (logits(model) - logits(tiny_model())).abs().max() < TOLERANCE
    assert (backend.locked > 0) == (pinned in ("whole", "blocks"))
    del model
    import gc

    gc.collect()
    assert backend.locked == 0, "locked memory is given back with the model"


def test_host_memory_too_small_is_refused_before_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(tmp_path)
    monkeypatch.setattr(CheckpointFiles, "read_into", lambda *a: pytest.fail("weights were read"))
    with pytest.raises(CapacityError, match=r"needs \S+ GiB of host memory.*\S+ GiB are available"):
        load_streamed(tmp_path, budget_for(tmp_path, 0, host=1000))
    with pytest.raises(CapacityError, match="at least"):
        load_streamed(tmp_path, Budget(vram=1000, context=1, reserve=0, workspace=0))


@pytest.mark.parametrize("damage", ["shard", "shape", "short", "config", "gone"])
def test_damage_is_named_before_anything_is_read_or_pinned(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_awq(tmp_path, shards=3)
    budget, second = budget_for(tmp_path, 0), tmp_path / "model-00002-of-00003.safetensors"
    if damage == "shard":
        second.unlink()
    elif damage == "short":
        second.write_bytes(second.read_bytes()[:-1])
    elif damage == "config":
        edit_quantization(tmp_path, version="gemv")
    else:
        save_awq(tmp_path)
        (tmp_path / "model.safetensors.index.json").unlink()
        name = "model__layers__2__mlp__up_proj__scales"
        edit_tensors(tmp_path, **{name: None if damage == "gone" else torch.zeros(3, 8, dtype=torch.float16)})
    monkeypatch.setattr(CheckpointFiles, "read_into", lambda *a: pytest.fail("weights were read"))
    expected = {
        "shard": "lacks 1 of 3 weight files.*00002", "shape": r"up_proj\.scales has the shape \[3, 8\]",
        "short": "00002.* is damaged or cut short", "config": "gemv", "gone": r"layers\.2\.mlp\.up_proj",
    }  # fmt: skip
    backend = VirtualBackend()
    with pytest.raises(CheckpointError, match=expected[damage]):
        load_streamed(tmp_path, budget, backend)
    assert (backend.locked, backend.allocated) == (0, 0)


def test_a_device_with_less_free_than_planned(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    budget = budget_for(tmp_path, 0)
    with pytest.raises(CapacityError, match="are free"):
        load_streamed(tmp_path, budget, VirtualBackend(limit=budget.vram // 2))


# --- wrong calls --------------------------------------------------------------------------------------------


def test_vram_without_a_gpu(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    with pytest.raises(UsageError, match="this is cpu"):
        KVBoost.from_pretrained(tmp_path, device="cpu", vram="8GiB", store=None)
    for wrong in ("lots", 0, "-3GiB"):
        with pytest.raises(UsageError, match=r"size|no memory"):
            load_model(tmp_path, device="cpu", vram=wrong, backend=VirtualBackend())
    with pytest.raises(UsageError, match="tells its memory"):
        load_model(tmp_path, device="cpu", vram="auto", backend=VirtualBackend())


def test_vram_auto_takes_what_is_free(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    model = load_model(tmp_path, device="cpu", vram="auto", backend=VirtualBackend(limit=1 << 33)).model
    assert model.kvboost_plan.budget.vram == 1 << 33
    assert model.kvboost_streamer is None


def test_gguf_and_other_quantisation_are_not_streamed(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(UsageError, match="not streamed"):
        load_model(tmp_path / "m.gguf", device="cpu", vram="8GiB", backend=VirtualBackend())
    save_awq(tmp_path)
    edit_quantization(tmp_path, quant_method="fp8")
    with pytest.raises(UnsupportedModelError, match="fp8"):
        load_model(tmp_path, device="cpu", vram="8GiB", backend=VirtualBackend())


def test_generate_of_transformers_works_too(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3")
    model = load_streamed(tmp_path, budget_for(tmp_path, 1))
    options = {"attention_mask": torch.ones_like(IDS), "max_new_tokens": 6, "do_sample": False}
    assert torch.equal(model.generate(IDS, **options), tiny_model("qwen3").generate(IDS, **options))

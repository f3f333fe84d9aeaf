"""AWQ checkpoints through the public loader: equal to the dense oracle, and each damage is an error that names it."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch

from kvboost_rag import KVBoost, Repair
from kvboost_rag.errors import CheckpointError, KVBoostError, UnsupportedModelError
from kvboost_rag.model.awq.linear import AwqLinear
from kvboost_rag.model.load import load_model
from kvboost_rag.model.streaming.virtual import VirtualBackend
from tests.awq.rtn import edit_quantization, edit_tensors, save_awq
from tests.engine.helpers import DOCS, TOLERANCE, chat, full_prefill_gap, prepared
from tests.tiny import save_tiny

IDS = torch.arange(10, 60)[None]
FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "tied"]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def engine_of(path: Path, **options: Any) -> KVBoost:
    return KVBoost.from_pretrained(path, device="cpu", store="memory", filler_tokens=48, **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_the_dense_oracle(family: str, tmp_path: Path) -> None:
    oracle = save_awq(tmp_path, family)
    model = load_model(tmp_path, device="cpu").model
    assert model.dtype == torch.float32
    assert sum(isinstance(m, AwqLinear) for m in model.modules()) == 7 * 4
    assert (logits(model) - logits(oracle)).abs().max() < TOLERANCE
    assert not any(t.is_meta for t in [*model.parameters(), *model.buffers()])


@pytest.mark.parametrize("group", [32, 64, 128, -1])
def test_every_group_size(group: int, tmp_path: Path) -> None:
    oracle = save_awq(tmp_path, "qwen2", group_size=group, shards=3)
    assert (logits(load_model(tmp_path, device="cpu").model) - logits(oracle)).abs().max() < TOLERANCE


def test_modules_that_are_not_converted(tmp_path: Path) -> None:
    oracle = save_awq(tmp_path, "llama", not_converted=("down_proj", "o_proj"))
    model = load_model(tmp_path, device="cpu").model
    assert type(model.model.layers[0].mlp.down_proj) is torch.nn.Linear
    assert (logits(model) - logits(oracle)).abs().max() < TOLERANCE


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_reuse_and_repair_equal_the_dense_oracle(family: str, tmp_path: Path) -> None:
    """Composed and repaired on packed weights = composed and repaired on the dense model, token for token."""
    oracle = save_awq(tmp_path, family)
    packed = engine_of(tmp_path)
    dense = KVBoost(oracle, packed.tokenizer, store="memory", filler_tokens=48)
    for engine in (packed, dense):
        engine.warm(DOCS)
    prompt = chat([DOCS[2], DOCS[0], DOCS[3]])
    for repair in ("fast", "balanced", "faithful"):
        (ours, report), (theirs, _) = (prepared(e, prompt, repair=repair) for e in (packed, dense))
        assert [c.outcome for c in report.chunks] == ["hit"] * 3
        assert (ours.logits - theirs.logits).abs().max() < TOLERANCE
    assert full_prefill_gap(packed, oracle, prompt, repair=Repair.full()) < TOLERANCE
    same = [e.generate(prompt, max_new_tokens=8).token_ids for e in (packed, dense)]
    assert same[0] == same[1]


def test_generate_of_transformers_works_too(tmp_path: Path) -> None:
    oracle = save_awq(tmp_path, "qwen2")
    model = load_model(tmp_path, device="cpu").model
    options = {"attention_mask": torch.ones_like(IDS), "max_new_tokens": 6, "do_sample": False}
    assert torch.equal(model.generate(IDS, **options), oracle.generate(IDS, **options))
    assert model.generation_config.eos_token_id == [2, 5]


def test_packed_weights_are_part_of_the_fingerprint(tmp_path: Path) -> None:
    save_awq(tmp_path / "a", group_size=32)
    save_awq(tmp_path / "b", group_size=32, seed=1)
    save_awq(tmp_path / "c", group_size=64)
    save_awq(tmp_path / "d", group_size=32)
    a, b, c, d = (engine_of(tmp_path / n).adapter.fingerprint for n in "abcd")
    assert a.weights != b.weights
    assert a.quantization != c.quantization
    assert a == d
    from safetensors.torch import load_file

    name = "model.layers.1.mlp.up_proj.qweight"
    words = load_file(tmp_path / "d" / "model.safetensors")[name]
    edit_tensors(tmp_path / "d", **{name.replace(".", "__"): words ^ 1})
    assert engine_of(tmp_path / "d").adapter.fingerprint.weights != a.weights


# --- memory -------------------------------------------------------------------------------------------------


class Peak(torch.utils._python_dispatch.TorchDispatchMode):
    """Bytes of CPU storage alive, and their peak: counts what every operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in [out] if isinstance(out, torch.Tensor) else []:
            if tensor.device.type == "cpu":
                self._see(tensor.untyped_storage())
        return out

    def _see(self, storage: torch.UntypedStorage) -> None:
        import weakref

        key = storage._cdata
        if key not in self.live:
            self.live[key] = storage.nbytes()
            weakref.finalize(storage, self.live.pop, key, None)
        self.peak = max(self.peak, sum(self.live.values()))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_memory_never_exceeds_the_model_and_one_staging_buffer(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_awq(tmp_path, "llama", num_hidden_layers=12, shards=2)
    from kvboost_rag.model.direct import files

    staging = 1 << 16
    monkeypatch.setattr(files, "STAGING", staging)
    tracemalloc.start()
    with Peak() as torch_memory:
        model = load_model(tmp_path, device="cpu", dtype=dtype).model
    python_peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    storages = [t.untyped_storage() for t in [*model.parameters(), *model.buffers()]]
    size = sum({s._cdata: s.nbytes() for s in storages}.values())
    one_layer = model.model.layers[0].mlp.up_proj.qweight.untyped_storage().nbytes()
    assert size > 8 * one_layer
    assert size <= torch_memory.peak < size + one_layer
    assert python_peak < 64 << 20  # headers and transformers' own objects; no tensor bytes pass through Python


# --- damage -------------------------------------------------------------------------------------------------


def refuses(path: Path, message: str, error: type[KVBoostError] = CheckpointError) -> None:
    with pytest.raises(error, match=message):
        load_model(path, device="cpu")


@pytest.mark.parametrize("version", ["gemv", "GEMV_FAST", "marlin", "exllama", "llm-awq"])
def test_other_layouts_are_refused_by_name(version: str, tmp_path: Path) -> None:
    save_awq(tmp_path)
    edit_quantization(tmp_path, version=version)
    refuses(tmp_path, version.lower())


@pytest.mark.parametrize("method", ["gptq", "compressed-tensors"])
def test_other_methods_are_refused_by_name(method: str, tmp_path: Path) -> None:
    save_awq(tmp_path)
    edit_quantization(tmp_path, quant_method=method)
    refuses(tmp_path, method, UnsupportedModelError)
    with pytest.raises(UnsupportedModelError, match=f"{method}: only AWQ and plain weights are streamed") as caught:
        load_model(tmp_path, device="cpu", vram="8GiB", backend=VirtualBackend())
    assert "install" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"bits": 8}, "8 bits"), ({"group_size": 16}, "group size 16"), ({"group_size": 64}, "shape.*group_size")],
)
def test_a_config_that_does_not_fit(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_awq(tmp_path, group_size=32)
    edit_quantization(tmp_path, **changes)
    refuses(tmp_path, message)


def test_a_packed_layer_that_is_listed_as_not_converted(tmp_path: Path) -> None:
    save_awq(tmp_path)
    edit_quantization(tmp_path, modules_to_not_convert=["up_proj"])
    refuses(tmp_path, "up_proj is packed although")


def test_awq_config_over_plain_weights(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace("{", '{"quantization_config": {"quant_method": "awq"},', 1))
    refuses(tmp_path, "no packed weight")


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.2.mlp.down_proj.scales",
        "model.layers.0.self_attn.q_proj.qzeros",
        "model.layers.3.input_layernorm.weight",
        "model.layers.1.self_attn.v_proj.qweight",
        "model.embed_tokens.weight",
        "lm_head.weight",
    ],
)
def test_a_missing_tensor_is_named_never_zero(name: str, tmp_path: Path) -> None:
    save_awq(tmp_path)
    edit_tensors(tmp_path, **{name.replace(".", "__"): None})
    refuses(tmp_path, name.rpartition(".")[0].replace(".", r"\."))


def test_a_left_over_tensor_is_named(tmp_path: Path) -> None:
    save_awq(tmp_path)
    edit_tensors(tmp_path, model__layers__9__mlp__up_proj__qweight=torch.zeros(8, 8, dtype=torch.int32))
    refuses(tmp_path, r"no place for.*layers\.9")


def test_old_checkpoints_with_rotary_tables_are_read(tmp_path: Path) -> None:
    save_awq(tmp_path)
    edit_tensors(tmp_path, model__layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(16))
    load_model(tmp_path, device="cpu")


def test_wrong_shape_and_wrong_dtype(tmp_path: Path) -> None:
    save_awq(tmp_path)
    edit_tensors(tmp_path, model__norm__weight=torch.zeros(127, dtype=torch.float16))
    refuses(tmp_path, r"model\.norm\.weight has the shape \[127\], the model needs \[128\]")
    edit_tensors(tmp_path, model__norm__weight=torch.zeros(128, dtype=torch.int32))
    refuses(tmp_path, r"model\.norm\.weight is torch\.int32")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    save_awq(tmp_path, shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    refuses(tmp_path, "lacks 1 of 3 weight files.*model-00002-of-00003")


def test_no_weights_at_all_and_a_damaged_index(tmp_path: Path) -> None:
    save_awq(tmp_path, shards=2)
    (tmp_path / "model.safetensors.index.json").write_text("{")
    refuses(tmp_path, r"index\.json is damaged")
    (tmp_path / "model.safetensors.index.json").unlink()
    refuses(tmp_path, r"no model\.safetensors")


def test_a_shard_outside_the_folder_is_not_followed(tmp_path: Path) -> None:
    save_awq(tmp_path / "m", shards=2)
    index = tmp_path / "m" / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-00001", "../model-00001"))
    (tmp_path / "m" / "model-00001-of-00002.safetensors").rename(tmp_path / "model-00001-of-00002.safetensors")
    refuses(tmp_path / "m", "lacks 1 of 2")


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_file_that_is_cut_short(keep: int, tmp_path: Path) -> None:
    save_awq(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    refuses(tmp_path, "damaged or cut short")

"""Loading: what is read comes out equal, what is wrong leaves as one of our errors."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvboost_rag.errors import (
    CheckpointError,
    ModelError,
    ModelNotFoundError,
    TokenizerError,
    UnknownOptionError,
    UnsupportedModelError,
    UsageError,
)
from kvboost_rag.model.load import DTYPES, load_model, resolve_source
from tests.tiny import save_tiny, tiny_model, tiny_tokenizer
from tests.tiny_gguf import save_tiny_gguf

TEXT = "Hello the  world\n\n\tété 日本 🙂 in 2024  <b>"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "model")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVBOOST_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(10, 60)[None]).logits


def edit_config(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


# --- folders ------------------------------------------------------------------------------------------------


def test_every_family_loads_with_equal_logits(family: str, tmp_path: Path) -> None:
    loaded = load_model(save_tiny(tmp_path, family), device="cpu")
    assert torch.equal(logits(loaded.model), logits(tiny_model(family)))
    assert not loaded.model.training


def test_tokenizer_and_end_tokens_come_along(folder: Path) -> None:
    loaded = load_model(str(folder), device="cpu")
    ids = loaded.tokenizer(TEXT, add_special_tokens=False).input_ids
    assert loaded.tokenizer.decode(ids) == TEXT
    assert loaded.model.generation_config.eos_token_id == [2, 5]
    assert (loaded.name, loaded.revision) == (str(folder), None)


@pytest.mark.parametrize("name", [*DTYPES, "torch.bfloat16", torch.float16])
def test_dtype_is_what_was_asked_for(folder: Path, name: str | torch.dtype) -> None:
    expected = name if isinstance(name, torch.dtype) else DTYPES[name.removeprefix("torch.")]
    assert load_model(folder, dtype=name, device="cpu").model.dtype == expected


@pytest.mark.parametrize(
    ("stored", "loaded"),
    [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32), (torch.float16, torch.float32)],
)
def test_auto_dtype_is_the_checkpoints_own_but_no_half_on_cpu(
    tmp_path: Path, stored: torch.dtype, loaded: torch.dtype
) -> None:
    assert load_model(save_tiny(tmp_path, dtype=stored), device="cpu").model.dtype == loaded


def test_auto_dtype_without_a_config_entry(tmp_path: Path) -> None:
    save_tiny(tmp_path, dtype=torch.float16)
    edit_config(tmp_path, dtype=None)
    assert load_model(tmp_path, device="cpu").model.dtype == torch.float32


# --- wrong calls --------------------------------------------------------------------------------------------


def test_unknown_dtype_lists_the_names(folder: Path) -> None:
    with pytest.raises(UnknownOptionError, match=r"'int7'.*auto, float32.*bf16"):
        load_model(folder, dtype="int7")
    with pytest.raises(UnknownOptionError):
        load_model(folder, dtype=torch.int8)


def test_unknown_device(folder: Path) -> None:
    with pytest.raises(UnknownOptionError, match="'abacus'"):
        load_model(folder, device="abacus")
    with pytest.raises(UsageError, match="CUDA devices are visible"):
        load_model(folder, device="cuda:99")


@pytest.mark.parametrize("name", ["", "  ", None, 7])
def test_a_name_that_is_none(name: Any) -> None:
    with pytest.raises(UsageError):
        load_model(name)


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/folder", "~/no-such-folder", "a/b/c", "missing.gguf"])
def test_missing_path_says_what_was_tried(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="local path"):
        load_model(name)


def test_a_path_object_is_never_a_hub_id() -> None:
    with pytest.raises(ModelNotFoundError, match="local path"):
        resolve_source(Path("owner/model"))


def test_unknown_hub_id_names_offline_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelNotFoundError, match="HF_HUB_OFFLINE is set") as caught:
        load_model("kvboost-tests/no-such-model")
    assert "kvboost-tests/no-such-model" in str(caught.value)
    assert caught.value.__cause__ is not None


def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ModelNotFoundError, match="is a file"):
        load_model(tmp_path / "model.bin")


# --- damaged and foreign checkpoints ------------------------------------------------------------------------


def _cut(folder: Path, num_bytes: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:num_bytes])


def _pickle_only(folder: Path) -> None:
    torch.save(tiny_model().state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "no config": lambda f: (f / "config.json").unlink(),
    "config is no json": lambda f: (f / "config.json").write_text("{"),
    "no weights": lambda f: (f / "model.safetensors").unlink(),
    "empty weights": lambda f: _cut(f, 0),
    "cut in the header": lambda f: _cut(f, 100),
    "cut in the data": lambda f: _cut(f, 50_000),
    "garbage": lambda f: (f / "model.safetensors").write_bytes(b"x" * 5000),
    "a layer is missing": lambda f: edit_config(f, num_hidden_layers=5),
    "shapes differ": lambda f: edit_config(f, intermediate_size=64),
    "pickle only": _pickle_only,
}


@pytest.mark.parametrize("damage", list(DAMAGES))
def test_damage_is_a_checkpoint_error(folder: Path, damage: str) -> None:
    DAMAGES[damage](folder)
    with pytest.raises(CheckpointError, match=str(folder)):
        load_model(folder, device="cpu")


def _no_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()


NO_TOKENIZER: dict[str, Callable[[Path], object]] = {
    "no files": _no_tokenizer,
    "no vocabulary": lambda f: (f / "tokenizer.json").unlink(),
    "damaged": lambda f: (f / "tokenizer.json").write_text("{}"),
    "class of its own without vocabulary": lambda f: [
        (f / "tokenizer.json").unlink(),
        (f / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}'),
    ],
}


@pytest.mark.parametrize("damage", list(NO_TOKENIZER))
def test_missing_tokenizer_is_a_tokenizer_error(folder: Path, damage: str) -> None:
    NO_TOKENIZER[damage](folder)
    with pytest.raises(TokenizerError, match=str(folder)):
        load_model(folder, device="cpu")


def test_encoder_decoder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        load_model(save_tiny(tmp_path, "t5"))


def test_encoder_with_a_causal_head_in_transformers_is_refused(folder: Path) -> None:
    edit_config(folder, model_type="bert", architectures=["BertForMaskedLM"])
    with pytest.raises(UnsupportedModelError, match="BertForMaskedLM"):
        load_model(folder)


@pytest.mark.parametrize("model_type", ["vit", "no_such_type"])
def test_other_model_types_are_refused(folder: Path, model_type: str) -> None:
    edit_config(folder, model_type=model_type, architectures=[])
    with pytest.raises(UnsupportedModelError):
        load_model(folder)


def test_remote_code_is_refused_unless_trusted(folder: Path) -> None:
    edit_config(folder, model_type="own", auto_map={"AutoConfig": "m.C", "AutoModelForCausalLM": "m.M"})
    with pytest.raises(UnsupportedModelError, match="trust_remote_code=True"):
        load_model(folder)


@pytest.mark.parametrize(("method", "named"), [("gptq", "gptqmodel"), ("hqq", "hqq")])
def test_quantised_checkpoint_names_the_missing_library(
    folder: Path, method: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n, *a: None if n == named else real(n, *a))
    edit_config(folder, quantization_config={"quant_method": method, "bits": 4})
    with pytest.raises(UnsupportedModelError, match=f"{method}.*pip install {named}"):
        load_model(folder)


def test_unknown_quantisation_is_refused(folder: Path) -> None:
    edit_config(folder, quantization_config={"quant_method": "homemade"})
    with pytest.raises(UnsupportedModelError, match="homemade"):
        load_model(folder)


# --- gguf ---------------------------------------------------------------------------------------------------


def test_gguf_equals_the_model_it_was_written_from(tmp_path: Path, cache: Path) -> None:
    original = save_tiny_gguf(tmp_path / "tiny.gguf")
    loaded = load_model(tmp_path / "tiny.gguf", device="cpu")
    assert torch.equal(logits(loaded.model), logits(original))
    assert loaded.model.dtype == torch.float32
    assert loaded.revision is not None
    assert loaded.revision.startswith("gguf:")
    assert len(list(cache.iterdir())) == 1


def test_gguf_second_load_does_not_convert(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvboost_rag.model import gguf

    save_tiny_gguf(tmp_path / "tiny.gguf")
    first = load_model(tmp_path / "tiny.gguf", device="cpu")
    monkeypatch.setattr(gguf, "_convert", lambda *a: pytest.fail("converted again"))
    second = load_model(tmp_path / "tiny.gguf", device="cpu")
    assert torch.equal(logits(first.model), logits(second.model))
    assert first.tokenizer.chat_template == second.tokenizer.chat_template


def test_gguf_changed_file_is_converted_again(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "tiny.gguf"
    save_tiny_gguf(path)
    load_model(path, device="cpu")
    other = save_tiny_gguf(path, seed=1)
    assert torch.equal(logits(load_model(path, device="cpu").model), logits(other))
    assert len(list(cache.iterdir())) == 2


def test_gguf_dtypes_do_not_share_a_conversion(tmp_path: Path, cache: Path) -> None:
    original = save_tiny_gguf(tmp_path / "tiny.gguf")
    half = load_model(tmp_path / "tiny.gguf", dtype="bfloat16", device="cpu")
    full = load_model(tmp_path / "tiny.gguf", device="cpu")
    assert half.model.dtype == torch.bfloat16
    assert torch.equal(logits(full.model), logits(original))


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer.json"])
def test_gguf_damaged_conversion_is_made_anew(tmp_path: Path, cache: Path, file: str) -> None:
    original = save_tiny_gguf(tmp_path / "tiny.gguf")
    load_model(tmp_path / "tiny.gguf", device="cpu")
    damaged = next(cache.iterdir()) / file
    damaged.write_bytes(damaged.read_bytes()[:50])
    assert torch.equal(logits(load_model(tmp_path / "tiny.gguf", device="cpu").model), logits(original))
    load_model(next(cache.iterdir()), device="cpu")


def test_gguf_loads_where_nothing_can_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("KVBOOST_CACHE", str(tmp_path / "file"))
    original = save_tiny_gguf(tmp_path / "tiny.gguf")
    with pytest.warns(RuntimeWarning, match="KVBOOST_CACHE"):
        loaded = load_model(tmp_path / "tiny.gguf", device="cpu")
    assert torch.equal(logits(loaded.model), logits(original))
    assert getattr(loaded.model.config, "quantization_config", None) is None


def test_gguf_loads_when_the_disk_is_full(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors import SafetensorError
    from transformers import PreTrainedModel

    def full(*args: Any, **kwargs: Any) -> None:
        raise SafetensorError("I/O error: No space left on device")

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", full)
    save_tiny_gguf(tmp_path / "tiny.gguf")
    with pytest.warns(RuntimeWarning, match="No space left"):
        load_model(tmp_path / "tiny.gguf", device="cpu")
    assert not list(cache.iterdir())


def test_gguf_end_of_turn_is_an_end_token(tmp_path: Path, cache: Path) -> None:
    save_tiny_gguf(tmp_path / "tiny.gguf")
    loaded = load_model(tmp_path / "tiny.gguf", device="cpu")
    ends = [loaded.tokenizer.convert_tokens_to_ids(t) for t in ("</s>", "<|im_end|>")]
    assert loaded.model.generation_config.eos_token_id == ends


def test_gguf_tokenizer_is_the_one_that_was_written(tmp_path: Path, cache: Path) -> None:
    save_tiny_gguf(tmp_path / "tiny.gguf")
    read, written = load_model(tmp_path / "tiny.gguf", device="cpu").tokenizer, tiny_tokenizer()
    for text in (TEXT, "<s>the<|im_end|></s>"):
        encoded = [t(text, add_special_tokens=False).input_ids for t in (read, written)]
        assert encoded[0] == encoded[1]
    assert (read.bos_token, read.eos_token, read.unk_token) == ("<s>", "</s>", "<unk>")
    assert read.chat_template == written.chat_template


@pytest.mark.parametrize("content", [b"", b"nope" * 100, b"GGUF" + bytes(100)])
def test_gguf_of_another_format_is_a_checkpoint_error(tmp_path: Path, cache: Path, content: bytes) -> None:
    (tmp_path / "bad.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"bad\.gguf"):
        load_model(tmp_path / "bad.gguf")


@pytest.mark.parametrize("share", [0.1, 0.5, 0.95])
def test_gguf_truncated_is_a_model_error(tmp_path: Path, cache: Path, share: float) -> None:
    save_tiny_gguf(tmp_path / "cut.gguf")
    whole = (tmp_path / "cut.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(ModelError, match=r"cut\.gguf"):
        load_model(tmp_path / "cut.gguf")
    assert not cache.exists() or not list(cache.iterdir())


# --- smollm2 ------------------------------------------------------------------------------------------------


@pytest.mark.real_model
def test_smollm2_is_the_packaged_file_and_its_package_is_not_imported() -> None:
    code = (
        "import sys; from kvboost_rag.model.load import SMOLLM2_PACKAGE, resolve_source; "
        "print(resolve_source('smollm2'), SMOLLM2_PACKAGE in sys.modules)"
    )
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    path, imported = done.stdout.rsplit(maxsplit=1)
    assert path.endswith(".gguf")
    assert imported == "False"


def test_smollm2_falls_back_to_the_hub_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvboost_rag.model.load.SMOLLM2_PACKAGE", "no_such_package_at_all")
    assert resolve_source("smollm2") == "HuggingFaceTB/SmolLM2-135M-Instruct"


def test_smollm2_has_template_end_tokens_and_a_round_trip(smollm2: Any) -> None:
    tokenizer = smollm2.tokenizer
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert "<|im_start|>user\nHi<|im_end|>" in prompt
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in smollm2.model.generation_config.eos_token_id
    assert tokenizer.decode(tokenizer(TEXT, add_special_tokens=False).input_ids) == TEXT
    assert tokenizer("<|im_end|>").input_ids == [2]


def test_smollm2_splits_digits_as_it_was_trained(smollm2: Any) -> None:
    assert smollm2.tokenizer.tokenize("a  33") == ["a", "ĠĠ", "3", "3"]


def test_smollm2_answers(smollm2: Any) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    batch = smollm2.tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = smollm2.model.generate(**batch, max_new_tokens=12, do_sample=False)
    assert "Paris" in smollm2.tokenizer.decode(out[0, batch["input_ids"].shape[1] :])

"""What identifies a model: every field counts, nothing else does."""

from __future__ import annotations

import copy
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvboost_rag.errors import TokenizerError
from kvboost_rag.fingerprint import Fingerprint, canonical_json
from kvboost_rag.model.identity import fingerprint_model, weights_digest
from tests.tiny import FAMILIES, tiny_model, tiny_tokenizer

BASE = Fingerprint("arch", "weights", "float32", "", "rope", "", "tok")


@pytest.mark.parametrize("name", [f.name for f in fields(Fingerprint)])
def test_every_field_counts(name: str) -> None:
    assert replace(BASE, **{name: "other"}).digest != BASE.digest


def test_a_value_cannot_move_to_the_next_field() -> None:
    assert Fingerprint("a", "b", "", "", "", "", "").digest != Fingerprint("ab", "", "", "", "", "", "").digest
    assert Fingerprint("a", "", "", "", "", "", "").digest != Fingerprint("", "a", "", "", "", "", "").digest


def test_families_differ_from_each_other() -> None:
    same = {"gqa", "untied"}  # these are the plain Llama by another name
    digests = {f: fingerprint_model(tiny_model(f), tiny_tokenizer()).digest for f in FAMILIES if f not in same}
    assert len(set(digests.values())) == len(digests)


def changed(**values: Any) -> Any:
    model = copy.deepcopy(tiny_model())
    for name, value in values.items():
        setattr(model.config, name, value)
    return model


@pytest.mark.parametrize(
    ("field", "model"),
    [
        ("dtype", lambda: tiny_model(dtype=torch.float16)),
        ("weights", lambda: tiny_model(seed=1)),
        ("rope", lambda: tiny_model("linear")),
        ("rope", lambda: tiny_model("llama3-scaling")),
        ("rope", lambda: tiny_model("yarn")),
        ("quantization", lambda: changed(quantization_config={"quant_method": "awq", "bits": 4})),
        ("architecture", lambda: changed(rms_norm_eps=1e-3)),
        ("architecture", lambda: changed(hidden_act="relu")),
    ],
)
def test_what_differs_shows_in_its_field(field: str, model: Any) -> None:
    one, two = (fingerprint_model(m, tiny_tokenizer()) for m in (tiny_model(), model()))
    assert getattr(one, field) != getattr(two, field)
    assert one.digest != two.digest


def test_what_does_not_change_kv_does_not_count() -> None:
    base = fingerprint_model(tiny_model(), tiny_tokenizer())
    eager = tiny_model()
    eager.set_attn_implementation("eager")
    tokenizer = tiny_tokenizer(chat_template="{{ messages }}")
    tokenizer.backend_tokenizer.enable_truncation(10)
    tokenizer.backend_tokenizer.enable_padding()
    renamed = changed(_name_or_path="another/name", use_cache=False)
    for model, tok in ((eager, tiny_tokenizer()), (tiny_model(), tokenizer), (renamed, tiny_tokenizer())):
        assert fingerprint_model(model, tok).digest == base.digest


def test_any_matrix_that_changed_as_a_whole_is_noticed() -> None:
    base = weights_digest(tiny_model())
    names = [n for n, _ in tiny_model().named_parameters()]
    for name in names:
        model = tiny_model()
        with torch.no_grad():
            dict(model.named_parameters())[name].mul_(1.001)
        assert weights_digest(model) != base, name


def test_saved_buffers_count_and_others_do_not() -> None:
    """Quantised layers keep their weights in buffers; a rotary table that is recomputed is none of them."""
    base = weights_digest(tiny_model())
    packed = tiny_model()
    packed.model.layers[0].self_attn.q_proj.register_buffer("qweight", torch.arange(64, dtype=torch.int32))
    first = weights_digest(packed)
    packed.model.layers[0].self_attn.q_proj.qweight += 1
    assert len({base, first, weights_digest(packed)}) == 3
    scratch = tiny_model()
    scratch.model.register_buffer("scratch", torch.zeros(4), persistent=False)
    assert weights_digest(scratch) == base


def test_tied_weights_are_one() -> None:
    assert weights_digest(tiny_model("tied")) == weights_digest(tiny_model("tied"))
    assert weights_digest(tiny_model("tied")) != weights_digest(tiny_model("untied"))


@pytest.mark.parametrize("active", [["a"], ["b"], ["a", "b"]])
def test_the_active_adapters_count(active: list[str]) -> None:
    model = tiny_model()
    model.peft_config = {"a": object(), "b": object()}
    model.active_adapters = active
    base = fingerprint_model(tiny_model(), tiny_tokenizer())
    assert fingerprint_model(model, tiny_tokenizer()).adapter != base.adapter
    disabled = tiny_model()
    disabled.peft_config, disabled.active_adapters = model.peft_config, active
    disabled.model.layers[0]._disable_adapters = True
    assert fingerprint_model(disabled, tiny_tokenizer()).adapter != fingerprint_model(model, tiny_tokenizer()).adapter


@pytest.mark.parametrize("change", ["token", "normalizer", "bos", "merge"])
def test_the_tokenizer_counts(change: str) -> None:
    from tokenizers import normalizers

    tokenizer = tiny_tokenizer(add_bos=change != "bos")
    if change == "token":
        tokenizer.add_tokens(["qqqq"])
    if change == "normalizer":
        tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    if change == "merge":
        tokenizer.backend_tokenizer.add_special_tokens(["<|new|>"])
    base = fingerprint_model(tiny_model(), tiny_tokenizer())
    assert fingerprint_model(tiny_model(), tokenizer).tokenizer != base.tokenizer


def test_a_slow_tokenizer_is_refused() -> None:
    with pytest.raises(TokenizerError):
        fingerprint_model(tiny_model(), object())


def test_json_is_canonical() -> None:
    assert canonical_json({"b": 1, "a": [1, 2]}) == '{"a":[1,2],"b":1}'
    assert canonical_json({"d": torch.float16}) == '{"d":"torch.float16"}'


@pytest.mark.slow
def test_another_process_has_the_same_fingerprint() -> None:
    code = (
        "from tests.tiny import *; from kvboost_rag.model.identity import fingerprint_model as f;"
        "print(f(tiny_model(), tiny_tokenizer()).digest)"
    )
    root = Path(__file__).resolve().parents[1]
    out = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert out.stdout.split()[-1] == fingerprint_model(tiny_model(), tiny_tokenizer()).digest

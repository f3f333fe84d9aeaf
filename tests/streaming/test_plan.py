"""The planner against arithmetic done elsewhere: the table for Qwen2.5-32B in AWQ, and real tiny models' bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost_rag.cli import main
from kvboost_rag.errors import CapacityError, CheckpointError, ModelNotFoundError, UnsupportedModelError, UsageError
from kvboost_rag.plan import SHAPES, Budget, Weights, available_host_memory, find_weights, make_plan, parse_bytes
from kvboost_rag.plan.placement import spread
from tests.awq.rtn import edit_quantization, save_awq
from tests.tiny import save_tiny

GIB = 1 << 30
QWEN = "qwen2.5-32b-awq"


def plan_of(vram_gib: float, **options: Any) -> Any:
    return make_plan(find_weights(QWEN), Budget(vram=int(vram_gib * GIB), **options))


@pytest.mark.parametrize(
    ("vram", "resident", "gb_per_token", "rates"),
    [
        (8, 16, 12.16, (0.49, 1.03, 2.06, 4.28)),
        (10, 25, 9.88, (0.61, 1.27, 2.53, 5.26)),
        (12, 33, 7.85, (0.76, 1.59, 3.18, 6.62)),
        (16, 50, 3.55, (1.69, 3.52, 7.05, 14.7)),
    ],
)
def test_the_table_for_32b(vram: int, resident: int, gb_per_token: float, rates: tuple[float, ...]) -> None:
    plan = plan_of(vram)
    assert len(plan.resident) == resident
    assert len(plan.resident) + len(plan.streamed) == 64
    assert (plan.embed_on_host, plan.head_on_host, plan.slots) == (True, False, 2)
    assert plan.streamed_bytes / 1e9 == pytest.approx(gb_per_token, rel=0.05)
    for bandwidth, expected in zip((6, 12.5, 25, 52), rates, strict=True):
        assert plan.tokens_per_s(bandwidth * 1e9) == pytest.approx(expected, rel=0.05)
    assert plan.device_bytes <= vram * GIB < plan.device_bytes + plan.slot_bytes


def test_the_parts_of_32b() -> None:
    w = find_weights(QWEN)
    assert w.layers[0] == pytest.approx(253.3e6, rel=0.005)
    assert (w.embed, w.head) == (1_557_135_360, 1_557_135_360)
    assert w.total == pytest.approx(19.3e9, rel=0.01)
    assert w.kv_per_token == 64 * 2 * 8 * 128 * 2


def test_a_card_that_holds_everything_streams_nothing() -> None:
    plan = plan_of(24)
    assert (plan.streamed, plan.slots, plan.host_bytes, plan.embed_on_host) == ((), 0, 0, False)
    assert plan.tokens_per_s(25e9) is None


def test_too_small_a_budget_names_the_smallest_that_works() -> None:
    with pytest.raises(CapacityError, match=r"at least \S+ GiB .* the budget is 2.00 GiB") as caught:
        plan_of(2)
    least = int(caught.value.hint.split("=")[1].split()[0])
    plan = make_plan(find_weights(QWEN), Budget(vram=least))
    assert (len(plan.streamed), plan.head_on_host, plan.device_bytes) == (64, True, least)
    with pytest.raises(CapacityError):
        make_plan(find_weights(QWEN), Budget(vram=least - 1))


def test_too_little_host_memory_is_refused_with_both_numbers() -> None:
    with pytest.raises(CapacityError, match=r"needs 12\.\d\d GiB of host memory.*8\.00 GiB are available"):
        plan_of(8, host=8 * GIB)
    assert plan_of(8, host=14 * GIB).host_bytes <= 14 * GIB


def test_longer_contexts_and_held_kv_take_layers() -> None:
    counts = [len(plan_of(12, context=n).resident) for n in (1024, 4096, 16384)]
    assert counts[0] > counts[1] > counts[2]
    assert len(plan_of(12, held=GIB).resident) == len(plan_of(11).resident)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 400), min_size=1, max_size=40), st.integers(1, 500), st.integers(1, 3000),
    st.booleans(), st.integers(2, 4),
)  # fmt: skip
def test_laws(layers: list[int], table: int, vram: int, tied: bool, slots: int) -> None:
    weights = Weights(tuple(layers), table, table, 1, 1, tied)

    def plan(vram: int) -> Any:
        return make_plan(weights, Budget(vram, context=8, reserve=2, workspace=3, slots=slots))

    try:
        made = plan(vram)
    except CapacityError as e:
        least = int(e.hint.split("=")[1].split()[0])
        assert least > vram
        made = plan(least)
    else:
        assert made.device_bytes <= vram
        assert plan(vram + 50).streamed_bytes <= made.streamed_bytes or made.head_on_host
    assert sorted([*made.resident, *made.streamed]) == list(range(len(layers)))
    on_device = made.resident_bytes + made.dense_bytes
    assert on_device + made.host_bytes == weights.total


def test_spread_is_even() -> None:
    assert spread(0, 5) == ()
    assert spread(5, 5) == (0, 1, 2, 3, 4)
    assert spread(2, 8) == (2, 6)
    gaps = [b - a for a, b in zip(spread(48, 64), spread(48, 64)[1:], strict=False)]
    assert set(gaps) == {1, 2}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "phi3", "tied"])
def test_sizes_from_the_config_are_the_real_ones(family: str, tmp_path: Path) -> None:
    from kvboost_rag.model.load import load_model

    model = load_model(save_tiny(tmp_path, family), device="cpu").model
    w = find_weights(tmp_path)
    assert w.layers[0] == sum(p.numel() * 4 for p in model.model.layers[0].parameters())
    assert w.total == sum(p.numel() * 4 for p in model.parameters())
    assert w.tied == (family == "tied")
    assert find_weights(tmp_path / "config.json") == w


def test_sizes_of_a_packed_model_are_the_real_ones(tmp_path: Path) -> None:
    save_awq(tmp_path, "qwen2", group_size=64)
    from kvboost_rag.model.load import load_model

    layer = load_model(tmp_path, device="cpu", dtype="float16").model.model.layers[0]
    tensors = [*layer.parameters(), *layer.buffers()]
    assert find_weights(tmp_path).layers[0] == sum(t.numel() * t.element_size() for t in tensors)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "phi3"])
def test_sizes_of_a_partly_packed_model_are_the_real_ones(family: str, tmp_path: Path) -> None:
    own_name = "qkv_proj" if family == "phi3" else "k_proj"
    save_awq(tmp_path, family, group_size=32, not_converted=("down_proj", own_name))
    from kvboost_rag.model.load import load_model

    layers = load_model(tmp_path, device="cpu", dtype="float16").model.model.layers
    planned = find_weights(tmp_path).layers
    assert planned == tuple(sum(t.nbytes for t in [*la.parameters(), *la.buffers()]) for la in layers)
    edit_quantization(tmp_path, modules_to_not_convert=None)
    assert find_weights(tmp_path).layers[0] < planned[0]


def test_single_layers_that_are_not_converted_are_counted(tmp_path: Path) -> None:
    save_awq(tmp_path, "llama", group_size=32, num_hidden_layers=12)
    plain = find_weights(tmp_path).layers
    for listed in (["model.layers.1"], ["layers.1.mlp", "model.layers.1.self_attn"]):
        edit_quantization(tmp_path, modules_to_not_convert=listed)
        layers = find_weights(tmp_path).layers
        assert layers[1] > 2 * plain[1]
        assert layers[0] == plain[0]
        assert layers[10:] == plain[10:]
    for nothing in ([], "lm_head", ["lm_head", ""], {"mlp": 1}):
        edit_quantization(tmp_path, modules_to_not_convert=nothing)
        assert find_weights(tmp_path).layers == plain


def test_configs_that_cannot_be_planned(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no such path"):
        find_weights("nothing-like-this")
    file = tmp_path / "config.json"
    awq = {"quant_method": "awq"}

    def config(**changes: Any) -> str:
        return json.dumps({**SHAPES["llama-3.1-8b"], **changes})

    for text, error, message in [
        ("{", CheckpointError, "cannot be read"),
        ("[]", CheckpointError, "not an object"),
        ('{"model_type": "mamba"}', UnsupportedModelError, "mamba"),
        ('{"model_type": "llama"}', CheckpointError, "lacks 'hidden_size'"),
        (config(head_dim=None, num_attention_heads=0), CheckpointError, "lacks"),
        (config(num_hidden_layers=0), CheckpointError, "above zero"),
        (config(quantization_config=[1]), CheckpointError, "quantization_config"),
        (config(quantization_config={**awq, "bits": 8}), UnsupportedModelError, "8 bits"),
        (config(quantization_config={**awq, "version": "marlin"}), UnsupportedModelError, "marlin"),
        (config(quantization_config={**awq, "group_size": 0}), UnsupportedModelError, "group size 0"),
        (json.dumps({**SHAPES["llama-3.1-8b"], "quantization_config": {"quant_method": "gptq"}}),
         UnsupportedModelError, "gptq"),
    ]:  # fmt: skip
        file.write_text(text)
        with pytest.raises(error, match=message):
            find_weights(tmp_path)


def test_sizes_as_people_write_them() -> None:
    assert parse_bytes("8GiB") == parse_bytes("8 g") == parse_bytes(8 * GIB) == 8 * GIB
    assert parse_bytes("7500MB") == 7_500_000_000
    for wrong in ("", "GiB", "8 apples", "-1", "0", "1.5", True):
        with pytest.raises(UsageError):
            parse_bytes(wrong)
    with pytest.raises(UsageError, match="at least 2"):
        Budget(vram=1, slots=1)
    with pytest.raises(UsageError, match="whole number"):
        Budget(vram=1, slots=2.5)  # type: ignore[arg-type]
    assert Budget("8GiB").vram == 8 * GIB  # type: ignore[arg-type]
    for wrong_budget in ({"vram": 0}, {"vram": float("nan")}, {"context": 0}, {"kv": 0}, {"host": -1}):
        with pytest.raises(UsageError):
            Budget(**{"vram": GIB, **wrong_budget})


def test_host_memory_respects_the_container(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:     5000 kB\n")
    assert available_host_memory(tmp_path, tmp_path / "none") == 5000 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert available_host_memory(tmp_path, tmp_path) == 5000 * 1024
    (tmp_path / "memory.max").write_text("3000\n")
    assert available_host_memory(tmp_path, tmp_path) == 2000
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 400\n")
    assert available_host_memory(tmp_path, tmp_path) == 2400
    assert available_host_memory(tmp_path / "x", tmp_path / "y") is None


# --- command line -------------------------------------------------------------------------------------------


def run(*args: str) -> Any:
    return CliRunner().invoke(main, ["plan", *args])


def test_command_prints_the_plan() -> None:
    result = run(QWEN, "--vram", "8GiB", "--bandwidth", "25")
    assert result.exit_code == 0, result.output
    assert "16 resident layers" in result.output
    assert "2.06 tokens/s at 25 GB/s" in result.output
    assert result.output.count("tokens/s") == 1
    assert run(QWEN, "--vram", "8GiB").output.count("tokens/s") == 4
    assert "Everything fits" in run(QWEN, "--vram", "40GiB").output


def test_command_as_json() -> None:
    result = run(QWEN, "--vram", "12GiB", "--bandwidth", "25", "--context", "4096", "--json")
    found = json.loads(result.stdout)
    assert (found["resident_layers"], len(found["streamed_layers"]), found["embedding"]) == (33, 31, "host")
    assert found["predicted"][0]["tokens_per_s"] == pytest.approx(3.18, rel=0.05)
    assert found["device_bytes"] <= found["vram_bytes"]


def test_command_says_what_is_wrong() -> None:
    small = run(QWEN, "--vram", "1GiB")
    assert (small.exit_code, "at least" in small.stderr, small.stdout) == (1, True, "")
    assert run(QWEN, "--vram", "8GiB", "--host-memory", "4GiB").exit_code == 1
    assert run(QWEN, "--vram", "lots").exit_code == 2
    assert run("no-such-model", "--vram", "8GiB").exit_code == 1
    for rate in ("nan", "inf", "0", "-3"):
        wrong = run(QWEN, "--vram", "8GiB", "--bandwidth", rate)
        assert (wrong.exit_code, "--bandwidth" in wrong.stderr, wrong.stdout) == (2, True, "")


def planned(*options: str) -> tuple[str, dict[str, Any]]:
    """What the command says, and the same as JSON."""
    text, as_json = run(QWEN, *options), run(QWEN, *options, "--json")
    assert (text.exit_code, as_json.exit_code) == (0, 0), text.output
    return text.stdout, json.loads(as_json.stdout)


def test_pages_instead_of_a_context() -> None:
    text, found = planned("--vram", "12GiB", "--kv-vram", "1GiB")
    assert "pages with KV of 3904 tokens" in text
    assert found["kv_bytes"] == GIB
    assert found["resident_layers"] == len(plan_of(12, context=4096).resident), "as much as 4,096 tokens of KV"
    done = run(QWEN, "--vram", "12GiB", "--kv-vram", "1MiB")
    assert done.exit_code != 0
    assert "67633152" in done.output
    none = run(QWEN, "--vram", "12GiB", "--kv-vram", "0")
    assert (none.exit_code, "no memory" in none.stderr, none.stdout) == (2, True, ""), "not: pages of nothing"
    large = run(QWEN, "--vram", "8GiB", "--kv-vram", "20GiB").stderr
    assert "kv_vram of 20.00 GiB" in large
    assert "context" not in large, "a shorter one would not help"


def test_a_tier_of_the_store_takes_its_part() -> None:
    text, found = planned("--vram", "12GiB", "--store-vram", "2GiB")
    assert "blocks of the store" in text
    assert found["held_bytes"] == 2 * GIB
    assert found["resident_layers"] == len(plan_of(10, context=4096).resident), "as if the card were so much smaller"
    assert "blocks of the store" not in run(QWEN, "--vram", "12GiB").stdout

"""The fidelity harness itself: it must see what is wrong, and nothing where nothing is."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import deviation  # noqa: E402
import fidelity  # noqa: E402
import fidelity_data as data  # noqa: E402
import fidelity_metrics as metrics  # noqa: E402
import fidelity_report  # noqa: E402
import tables  # noqa: E402
from fidelity_policies import Outcome, Row, rows  # noqa: E402

from kvboost_rag import Repair  # noqa: E402
from tests.tiny import save_tiny, tiny_model  # noqa: E402

ROUNDING = 1e-5  # nats


@pytest.fixture
def bench(tiny: Any, tokenizer: Any) -> fidelity.Bench:
    def load(dtype: str) -> tuple[Any, Any]:
        assert dtype == "float32"
        return tiny, tokenizer

    return fidelity.Bench(load, max_new_tokens=4)


@pytest.fixture
def items() -> list[data.Item]:
    return data.synthetic("needle", 2, seed=1, chunks=3, chunk_tokens=60)


def measure(bench: fidelity.Bench, items: list[data.Item], *wanted: Row) -> list[dict[str, Outcome]]:
    return fidelity.run(bench, data.DataSet("needle", tuple(items), "gold"), wanted, quiet=True)


# --- the measure -------------------------------------------------------------------------------------------------


def test_full_repair_has_no_divergence_and_naive_reuse_a_large_one(bench: Any, items: list[data.Item]) -> None:
    found = measure(bench, items, Row("everything", repair=Repair.full()), *rows("alone,fast,balanced"))
    for outcomes in found:
        everything, alone = outcomes["everything"], outcomes["alone"]
        assert everything.kl_greedy < ROUNDING
        assert everything.kl_gold < ROUNDING
        assert (everything.agreement, everything.same_text) == (1.0, 1.0)
        assert alone.kl_greedy > 0.05
        assert alone.repaired_share == 0
        assert 0 < outcomes["balanced"].repaired_share <= 0.15
        assert outcomes["fast"].forwarded < outcomes["balanced"].forwarded < outcomes["full"].forwarded


def test_a_set_judged_by_the_greedy_answer_says_nothing_of_the_gold_one(bench: Any, items: list[data.Item]) -> None:
    kept: list[int] = []
    wanted = rows("no-context,fast")
    found = fidelity.run(
        bench, data.DataSet("x", tuple(items), "greedy"), wanted, quiet=True, keep=lambda r: kept.append(len(r))
    )
    assert kept == [1, 2]
    row = fidelity_report.summary(found, "greedy", against="fast")["rows"]["fast"]
    assert row["kl_greedy"] > 0
    assert not {"kl_gold", "nll_gold", "d_nll", "gap_nll_gold"} & set(row)
    assert "NaN" not in json.dumps(row)
    assert "fast" in fidelity_report.table(fidelity_report.summary(found, "greedy"))


def test_rows_after_another_row_measure_the_same(bench: Any, items: list[data.Item]) -> None:
    """No row profits from KV that another left behind."""
    wanted = rows("cacheblend-15,legolink-16")
    first = measure(bench, items[:1], *wanted)[0]
    second = measure(bench, items[:1], *reversed(wanted))[0]
    assert first["cacheblend-15"].forwarded == second["cacheblend-15"].forwarded
    assert first["legolink-16"].kl_greedy == pytest.approx(second["legolink-16"].kl_greedy, abs=ROUNDING)


def test_a_mask_that_leaks_the_future_is_caught(
    bench: Any, items: list[data.Item], monkeypatch: pytest.MonkeyPatch
) -> None:
    """CacheBlend's released mask: bottom-right aligned, so chosen rows see keys behind them."""
    from kvboost_rag.model.attention import RowsPlan

    exact = measure(bench, items[:1], Row("repaired", repair=Repair(first=8, cap=1.0)))[0]["repaired"]

    def leaking(self: RowsPlan, index: int, device: torch.device) -> torch.Tensor:
        a, b, end = self.tiles[index]
        shift = end - (b - a)
        return torch.arange(end)[None] > (torch.arange(b - a)[:, None] + shift)

    monkeypatch.setattr(RowsPlan, "_hidden", leaking)
    leaked = measure(bench, items[:1], Row("repaired", repair=Repair(first=8, cap=1.0)))[0]["repaired"]
    assert abs(leaked.kl_greedy - exact.kl_greedy) > 100 * ROUNDING
    assert leaked.kl_greedy > exact.kl_greedy


def test_the_noise_floor_is_full_prefill_in_bfloat16(tokenizer: Any, items: list[data.Item]) -> None:
    def load(dtype: str) -> tuple[Any, Any]:
        return tiny_model("llama", dtype=getattr(torch, dtype), vocab_size=len(tokenizer)), tokenizer

    noisy = fidelity.Bench(load, max_new_tokens=4)
    found = measure(noisy, items[:1], *rows("full-bf16,fast"))[0]
    assert ROUNDING < found["full-bf16"].kl_gold < found["fast"].kl_gold
    assert found["full-bf16"].repaired_share == 1.0


def test_kl_and_agreement_of_known_distributions() -> None:
    full = torch.log(torch.tensor([[0.5, 0.5], [0.9, 0.1]]))
    other = torch.log(torch.tensor([[0.25, 0.75], [0.9, 0.1]]))
    expected = 0.5 * torch.log(torch.tensor(0.5 / 0.25)) + 0.5 * torch.log(torch.tensor(0.5 / 0.75))
    assert metrics.kl(full, other).tolist() == pytest.approx([float(expected), 0.0], abs=1e-6)
    assert metrics.agreement(torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([[0.0, 1.0], [1.0, 0.0]])) == 0.5


def test_f1_and_exact_match_are_those_of_squad() -> None:
    assert metrics.f1("The Eiffel Tower!", ["eiffel tower"]) == 1.0
    assert metrics.f1("in Paris", ["Paris", "Rome"]) == pytest.approx(2 / 3)
    assert metrics.exact_match("An answer.", ["answer"]) == 1.0
    assert metrics.exact_match("no answer", ["answer"]) == 0.0


def test_gap_recovered() -> None:
    assert metrics.gap_recovered(4.0, 2.5, 2.0) == 0.75
    assert metrics.gap_recovered(0.1, 0.1, 0.1) is None


# --- the bootstrap -----------------------------------------------------------------------------------------------


def test_bootstrap_covers_the_true_mean_about_as_often_as_it_says() -> None:
    draw = random.Random(0)
    inside = 0
    for trial in range(200):
        values = [draw.gauss(1.0, 2.0) for _ in range(40)]
        _, low, high = metrics.bootstrap(values, seed=trial, samples=300)
        inside += low <= 1.0 <= high
    assert 175 <= inside <= 199


def test_paired_bootstrap_sees_a_small_steady_difference_that_unpaired_intervals_hide() -> None:
    draw = random.Random(1)
    a = [draw.gauss(0.0, 5.0) for _ in range(30)]
    b = [x - 0.1 + draw.gauss(0.0, 0.02) for x in a]
    mean, low, high = metrics.paired_bootstrap(a, b)
    assert 0 < low <= mean <= high
    (_, low_a, high_a), (_, low_b, high_b) = metrics.bootstrap(a), metrics.bootstrap(b)
    assert low_a < high_b
    assert low_b < high_a
    with pytest.raises(ValueError, match="same items"):
        metrics.paired_bootstrap(a, b[:-1])


# --- data sets ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(data.SYNTHETIC))
def test_synthetic_sets_repeat_and_hold_their_answer(name: str) -> None:
    items = data.synthetic(name, 3, seed=5, chunks=6, chunk_tokens=80)
    assert items == data.synthetic(name, 3, seed=5, chunks=6, chunk_tokens=80)
    assert items != data.synthetic(name, 3, seed=6, chunks=6, chunk_tokens=80)
    for item in items:
        assert len(item.passages) == 6
        text = " ".join(item.passages)
        assert all(part in text for part in item.answers[0].split(" and "))


@pytest.mark.parametrize("tokens", [64, 128, 256, 512, 1024])
def test_chunks_of_any_size(tokenizer: Any, tokens: int, tmp_path: Path) -> None:
    file = tmp_path / "long.jsonl"
    prose = " ".join(f"Sentence {i} says little." for i in range(2000))
    file.write_text(json.dumps({"question": "q?", "answer": "Sentence 1200", "passages": [prose, prose[::-1]]}))
    (item,) = data.load_set(str(file), tokenizer, n=1, chunks=2, chunk_tokens=tokens).items
    lengths = [len(tokenizer(p, add_special_tokens=False)["input_ids"]) for p in item.passages]
    assert all(tokens - 4 <= n <= tokens + 1 for n in lengths)
    assert "Sentence 1200" in item.passages[0]
    short = data.synthetic("needle", 1, seed=0, chunks=2, chunk_tokens=tokens)[0].passages[0]
    assert tokens / 2 < len(short.split()) * 1.4 < tokens * 1.2 + 20  # the needle comes on top


def test_any_jsonl_file_is_a_set(tokenizer: Any, tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    lines = [
        {"question": f"q{i}?", "answers": [f"a{i}", "x"], "passages": [f"p{i}.{j}" for j in range(6)]} for i in range(5)
    ]
    file.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    found = data.load_set(str(file), tokenizer, n=5)
    assert (found.over, len(found.items)) == ("gold", 5)
    assert found.items[3].answers == ("a3", "x")
    assert found.items[3].passages == tuple(lines[3]["passages"])
    assert [i.id for i in data.load_set(str(file), tokenizer, n=2, split="held").items] == ["mine:3", "mine:4"]
    assert all(len(i.passages) == 4 for i in data.load_set(str(file), tokenizer, n=5, chunks=4).items)
    with pytest.raises(SystemExit, match="no data set at"):
        data.load_set(str(tmp_path / "none.jsonl"), tokenizer, n=1)


def test_passages_can_be_permuted_and_a_seed_says_how(tokenizer: Any, tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    passages = [f"p{j}" for j in range(8)]
    file.write_text(json.dumps({"question": "q?", "answers": ["a"], "passages": passages}))
    orders = [
        data.load_set(str(file), tokenizer, n=1, shuffle=True, seed=seed).items[0].passages for seed in (0, 0, 1, 2)
    ]
    assert orders[0] == orders[1]
    assert len({*orders, tuple(passages)}) == 4
    assert all(sorted(o) == passages for o in orders)


def test_two_hop_needs_two_passages() -> None:
    for item in data.synthetic("twohop", 10, seed=2, chunks=8, chunk_tokens=40):
        place = item.question.removeprefix("What is the seal number of the courier of ").rstrip("?")
        first = next(p for p in item.passages if f"courier of {place} is" in p)
        second = next(p for p in item.passages if f"is {item.answers[0]}." in p)
        assert first != second


def test_cut_keeps_the_answer(tokenizer: Any) -> None:
    text = "word " * 200 + "Exeter College " + "tail " * 50
    short = data.cut(tokenizer, text, 64, ["Exeter College"])
    assert "Exeter College" in short
    assert len(tokenizer(short, add_special_tokens=False)["input_ids"]) <= 65


def test_halves_do_not_overlap() -> None:
    items = [data.Item(str(i), "q", ("a",), ("p",)) for i in range(7)]
    tune, held = data.half(items, "tune"), data.half(items, "held")
    assert not set(tune) & set(held)
    assert tune + held == items


def test_a_bad_line_of_a_data_set_is_named(tmp_path: Path) -> None:
    file = tmp_path / "my.jsonl"
    file.write_text('{"question": "q", "answers": ["a"], "passages": ["p"]}\n{"question": "q"}\n')
    with pytest.raises(SystemExit, match=r"my\.jsonl:2"):
        data.read_jsonl(file)


# --- rows and reports --------------------------------------------------------------------------------------------


def test_policies_by_name_and_by_spec() -> None:
    custom = rows("fast,first=4+query=0.2@head")[1]
    assert custom.variant == "head"
    assert custom.repair == Repair(first=4, query=0.2)
    with pytest.raises(SystemExit, match="known: no-context"):
        rows("fats")


@pytest.fixture
def outcomes() -> Callable[[], list[dict[str, Outcome]]]:
    def make() -> list[dict[str, Outcome]]:
        draw = random.Random(0)
        return [
            {
                "full": Outcome(nll_gold=1.0, forwarded=100.0, agreement=1.0, f1=0.5, exact=1.0),
                "no-context": Outcome(nll_gold=3.0, forwarded=10.0, kl_gold=1.0, f1=0.1),
                "balanced": Outcome(nll_gold=1.5, forwarded=20.0, kl_gold=0.02 + 0.01 * draw.random()),
                "fast": Outcome(nll_gold=2.0, forwarded=5.0, kl_gold=0.1 + 0.01 * draw.random(), f1=0.2),
            }
            for _ in range(8)
        ]

    return make


def test_summary_has_gap_intervals_and_paired_difference(outcomes: Callable[[], Any]) -> None:
    found = fidelity_report.summary(outcomes(), "gold", against="balanced")
    fast = found["rows"]["fast"]
    assert fast["gap_nll_gold"] == 0.5
    assert fast["gap_f1"] == pytest.approx(0.25)
    assert (fast["f1"], fast["exact"]) == (0.2, 0.0)
    assert fast["forwarded_share"] == 0.05
    low, high = fast["ci95"]["kl_gold"]
    assert low <= fast["kl_gold"] <= high
    assert fast["kl_minus_balanced"][1] > 0
    text = fidelity_report.table(found)
    assert all(name in text for name in ("no-context", "balanced", "fast", "n=8"))


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the scripts write, in place of the committed results."""
    monkeypatch.setattr(sys.modules["common"], "RESULTS", tmp_path / "results")
    return tmp_path / "results"


def test_the_script_writes_what_the_tables_read(tokenizer: Any, results: Path, tmp_path: Path) -> None:
    """From a checkpoint and a jsonl file to a result file, a table and a picture."""
    pytest.importorskip("matplotlib")
    model, questions, picture = save_tiny(tmp_path / "model"), tmp_path / "mine.jsonl", tmp_path / "mine.png"
    lines = [
        {"question": i.question, "answers": i.answers, "passages": i.passages}
        for i in data.synthetic("needle", 2, seed=1, chunks=3, chunk_tokens=60)
    ]
    questions.write_text("\n".join(json.dumps(line) for line in lines))
    words = f"--set {questions} --model {model} --n 2 --max-new-tokens 3 --plot {picture}".split()
    fidelity.main([*words, "--policies", "no-context,alone,balanced,ape,kamera-4,kvshift-15"])
    found = json.loads((results / "fidelity-mine-all.json").read_text())
    assert (found["n"], found["items"]) == (2, ["mine:1", "mine:2"])
    assert {"gap_nll_gold", "gap_f1", "kl_minus_balanced", "ttft_s", "exact"} <= set(found["rows"]["alone"])
    table = tables.whole("fidelity-mine-all", results)
    assert all(f"`{name}`" in table for name in ("alone", "balanced", "ape", "kamera-4", "kvshift-15"))
    assert picture.stat().st_size > 1000


def test_deviation_is_none_where_no_context_is_known_and_some_above(tokenizer: Any, tmp_path: Path) -> None:
    """Layer 0 turns each token into K and V on its own; everything above has seen the prompt."""
    model = save_tiny(tmp_path / "model")
    found = deviation.measure(str(model), data.synthetic("needle", 1, seed=1, chunks=3, chunk_tokens=60))
    assert set(found) == {"alone", "head", "canonical"}
    for of_variant in found.values():
        assert of_variant.shape == (4, 2, len(deviation.BINS))
        assert of_variant[0].max() < 1e-4 < of_variant[1:, :, :4].min()


@pytest.mark.slow
def test_the_real_model_ranks_policies_as_published(smollm2: Any, shared_data: Path) -> None:
    bench = fidelity.Bench(lambda dtype: (smollm2.model, smollm2.tokenizer), max_new_tokens=8)
    found = data.load_set("squad", smollm2.tokenizer, n=2, split="held", data=shared_data)
    results = fidelity.run(bench, found, rows("no-context,alone,balanced,faithful"), quiet=True)
    mean = {name: sum(r[name].kl_gold for r in results) / len(results) for name in results[0]}
    assert mean["faithful"] < mean["alone"] < mean["no-context"]
    assert mean["balanced"] < mean["alone"]

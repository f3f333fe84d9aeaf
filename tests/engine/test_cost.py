"""Reuse is skipped where it cannot win: decided by what is known of the machine, told in the report, never a guess."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kvboost_rag import KVBoost, Repair
from kvboost_rag.engine import cost as cost_module
from kvboost_rag.engine import engine as engine_module
from kvboost_rag.engine import report as report_module
from kvboost_rag.engine.cost import CHEAPER, CostModel, machine_name
from kvboost_rag.engine.curve import SAMPLES, STEPS, Curve
from kvboost_rag.store import DiskStore, MemoryStore, TieredStore
from tests.engine.helpers import DOCS, chat, make_engine, prepared, spy
from tests.tiny import tiny_model

ALL_SIZES = [2.0 ** (i / STEPS) for i in range(16 * STEPS)]


class Fixed(Curve):
    """Learns nothing from what this machine happens to do now."""

    def __init__(self, points: list[tuple[float, float]]) -> None:
        super().__init__()
        self._points = Curve(points)._points

    def observe(self, size: float, seconds: float) -> bool:
        return False

    learn = observe


def flat(seconds: float) -> Curve:
    return Fixed([(size, seconds) for size in ALL_SIZES])


def set_costs(engine: KVBoost, *, forward: float, load: float, choose: float = 1e-9) -> CostModel:
    """Seconds of any forward, any load from any tier and any choice."""
    costs = engine.engine.costs
    assert costs is not None
    costs.forward = flat(forward)
    costs.load = {tier: flat(load) for tier in range(3)}
    costs.choose = {r.recipe: flat(choose) for r in (engine.repair, Repair.none())}
    return costs


def make(*, warm: bool = True, slow_load: bool = True, **options: Any) -> KVBoost:
    engine = make_engine(**{"cost_model": True, "on_low_fidelity": "ignore", "prefix_bytes": 0, **options})
    if warm:
        engine.warm(DOCS)
    set_costs(engine, forward=1.0, load=10.0 if slow_load else 1e-9)
    return engine


def outcomes(engine: KVBoost, prompt: Any = None, **options: Any) -> list[tuple[str, str]]:
    report = engine.generate(prompt or chat(), max_new_tokens=2, **options).report
    return [(c.outcome, c.reason) for c in report.chunks]


# --- the decision ---------------------------------------------------------------------------------------------------


def test_what_is_cheaper_is_recomputed_exactly_and_the_report_says_so() -> None:
    engine = make()
    with spy(engine) as rows:
        got = engine.generate(chat(), max_new_tokens=1)
    report = got.report
    assert [(c.outcome, c.reason) for c in report.chunks] == [("miss", CHEAPER)] * 4
    assert report.forwarded_tokens == report.prompt_tokens == rows.total
    assert report.exact
    assert report.reused_tokens == report.repaired_tokens == report.stored_tokens == 0
    assert CHEAPER in report.table()
    assert engine.store.stats().hits == 0, "nothing was loaded"
    assert got.token_ids == engine.generate(chat(), max_new_tokens=1, repair=Repair.full()).token_ids
    assert engine.stats()["cost"]["recomputed"] == 1  # type: ignore[index]


def test_where_loading_is_cheap_blocks_are_reused() -> None:
    engine = make(slow_load=False)
    assert [o for o, _ in outcomes(engine)] == ["hit"] * 4
    assert engine.stats()["cost"]["recomputed"] == 0  # type: ignore[index]


@pytest.mark.parametrize("unknown", ["forward", "load", "everything"])
def test_what_is_not_known_decides_nothing(unknown: str) -> None:
    engine = make()
    costs = engine.engine.costs
    assert costs is not None
    if unknown in ("forward", "everything"):
        costs.forward = Curve()
    if unknown in ("load", "everything"):
        costs.load = {}
    assert [o for o, _ in outcomes(engine)] == ["hit"] * 4


def test_the_choice_of_tokens_counts_as_well() -> None:
    engine = make(slow_load=False)
    set_costs(engine, forward=1.0, load=1e-9, choose=1.0)
    assert outcomes(engine) == [("miss", CHEAPER)] * 4
    assert [o for o, _ in outcomes(engine, repair="fast")] == ["hit"] * 4, "nothing is chosen there"


def test_a_linear_forward_lets_reuse_win_with_many_chunk_tokens_and_lose_with_few() -> None:
    engine = make()
    costs = set_costs(engine, forward=1.0, load=0.06)
    costs.forward = Fixed([(size, 0.001 * size) for size in ALL_SIZES])
    assert [o for o, _ in outcomes(engine)] == ["hit"] * 4
    assert outcomes(engine, chat([DOCS[0][:30]]), chunks=[DOCS[0][:30]], repair="fast") == [("miss", CHEAPER)]


def test_scores_verifications_and_full_repair_are_not_its_business() -> None:
    engine = make()
    assert engine.score(chat(), "the river").report.hits == 4
    item = {"question": "which?", "passages": list(DOCS)}
    assert engine.verify([item], max_new_tokens=2).items[0].reused_tokens > 0
    assert [o for o, _ in outcomes(engine, repair=Repair.full())] == ["hit"] * 4


def test_it_is_off_by_default() -> None:
    engine = make_engine()
    assert engine.engine.costs is None
    assert engine.stats()["cost"] is None


@pytest.mark.parametrize("slow_load", [True, False])
def test_one_text_by_every_road(slow_load: bool) -> None:
    engine = make(slow_load=slow_load)
    want = engine.generate(chat(), max_new_tokens=6)
    *_, last = engine.stream(chat(), max_new_tokens=6)
    later = asyncio.run(engine.agenerate(chat(), max_new_tokens=6))
    assert last.result is not None
    for other in (last.result, later, engine.generate_batch([chat()], max_new_tokens=6)[0]):
        assert other.token_ids == want.token_ids
        assert [c.reason for c in other.report.chunks] == [c.reason for c in want.report.chunks]


def test_a_held_prefix_goes_on_and_only_the_rest_is_weighed() -> None:
    engine = make(prefix_bytes=1 << 28, slow_load=False)
    first = engine.generate(chat(DOCS[:2]), max_new_tokens=2)
    set_costs(engine, forward=1.0, load=10.0)
    said = first.text
    longer = [*chat(DOCS[:2]), {"role": "assistant", "content": said}, {"role": "user", "content": DOCS[2]}]
    got = outcomes(engine, longer)
    assert got[-1] == ("miss", CHEAPER)
    assert all(outcome == "prefix" or reason == CHEAPER for outcome, reason in got)


# --- tiers and the store --------------------------------------------------------------------------------------------


def test_the_tier_counts_and_what_was_skipped_comes_near(tmp_path: Path) -> None:
    near, far = MemoryStore(), DiskStore(tmp_path)
    engine = make(store=TieredStore([near, far]))
    near.clear()
    costs = set_costs(engine, forward=1.0, load=1e-9)
    costs.load[1] = flat(10.0)
    assert outcomes(engine) == [("miss", CHEAPER)] * 4
    assert len(list(near.keys())) == 4, "fetched after the answer"
    assert [o for o, _ in outcomes(engine)] == ["hit"] * 4


def test_chunks_that_are_in_no_tier_are_stored_after_the_answer() -> None:
    engine = make(warm=False)
    report = engine.generate(chat(), chunks=DOCS, max_new_tokens=1).report
    assert report.stored_tokens == sum(c.num_tokens for c in report.chunks)
    again = engine.generate(chat(), max_new_tokens=1).report
    assert [c.reason for c in again.chunks] == [CHEAPER] * 4
    assert again.stored_tokens == 0


# --- what is learned ------------------------------------------------------------------------------------------------


def learned(engine: KVBoost) -> dict[str, Any]:
    return engine.stats()["cost"]["measured"]  # type: ignore[index, no-any-return]


def test_requests_teach_what_they_took() -> None:
    engine = make_engine(cost_model=True, prefix_bytes=0)
    engine.warm(DOCS)
    for _ in range(SAMPLES - 1):
        prepared(engine, chat())  # without costs: nothing is learned from it
        engine.generate(chat(), max_new_tokens=1)
    assert learned(engine) == {"forward": [], "load": {"0": []}, "choose": {engine.repair.recipe: []}}
    engine.generate(chat(), max_new_tokens=1)
    known = learned(engine)
    assert len(known["forward"]) >= 1
    (size, seconds), *_ = known["load"]["0"]
    assert size == sum(len(c) for c in prepared(engine, chat())[0].prompt.chunks)
    assert 0 < seconds < 60
    assert known["choose"][engine.repair.recipe]


class Clock:
    """Time passes only where it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        for module in (engine_module, report_module, cost_module):
            monkeypatch.setattr(module, "perf_counter", lambda: self.now)

    def slow(self, engine: KVBoost, *, row_s: float, load_s: float) -> None:
        """Every row of a forward and every look-up take so long."""
        forward, get_many = engine.adapter.forward, engine.store.get_many

        def slow_forward(ids: Any, *args: Any, **options: Any) -> Any:
            self.now += row_s * ids.numel()
            return forward(ids, *args, **options)

        def slow_get_many(keys: Any) -> Any:
            self.now += load_s
            return get_many(keys)

        engine.adapter.forward = slow_forward  # type: ignore[method-assign]
        engine.store.get_many = slow_get_many  # type: ignore[method-assign]


@pytest.mark.parametrize(("row_s", "load_s", "pays"), [(0.001, 5.0, False), (0.001, 0.01, True), (1.0, 5.0, True)])
def test_a_machine_is_learned_from_its_first_requests(
    row_s: float, load_s: float, pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock of our own: on a machine where loading takes longer than recomputing, reuse ends after a few
    requests, and nothing but their own seconds says so."""
    engine = make_engine(cost_model=True, on_low_fidelity="ignore", prefix_bytes=0, repair="fast")
    engine.warm(DOCS)
    Clock(monkeypatch).slow(engine, row_s=row_s, load_s=load_s)
    seen = [outcomes(engine)[0][1] == CHEAPER for _ in range(SAMPLES + 3)]
    assert seen[:SAMPLES] == [False] * SAMPLES, "nothing is known yet"
    assert seen[SAMPLES + 1 :] == [not pays] * 2


def test_a_new_process_measures_nothing_again_and_another_machine_does(tmp_path: Path, monkeypatch: Any) -> None:
    with make_engine(store=tmp_path, cost_model=True, prefix_bytes=0) as engine:
        engine.warm(DOCS)
        for _ in range(SAMPLES):
            engine.generate(chat(), max_new_tokens=1)
        known = learned(engine)
        assert known["forward"]
    with make_engine(store=tmp_path, cost_model=True) as again:
        assert learned(again) == known
    with make_engine(store=tmp_path, cost_model=True, model=tiny_model(seed=3)) as other:
        assert learned(other)["forward"] == []
    monkeypatch.setattr(cost_module, "_cpu_name", lambda: "another processor")
    with make_engine(store=tmp_path, cost_model=True) as moved:
        assert learned(moved)["forward"] == []


def test_the_name_of_a_machine_holds_no_host_name(monkeypatch: Any) -> None:
    engine = make_engine()
    name = machine_name(engine.adapter, engine.store)
    monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
    monkeypatch.setattr("platform.node", lambda: "elsewhere")
    assert machine_name(engine.adapter, engine.store) == name
    assert machine_name(engine.adapter, TieredStore([engine.store, MemoryStore()])) != name


@pytest.mark.parametrize("value", [b"{", b"[]", b'{"forward": 3}', b'{"load": {"x": [[1, 2]]}}', b'{"forward": [[1]]}'])
def test_an_unreadable_entry_is_measured_again(value: bytes) -> None:
    store = MemoryStore()
    store.set_meta(machine_name(make_engine().adapter, store), value)
    engine = make_engine(store=store, cost_model=True)
    assert learned(engine) == {"forward": [], "load": {}, "choose": {}}
    engine.warm(DOCS)
    assert [o for o, _ in outcomes(engine)] == ["hit"] * 4


def test_two_processes_keep_what_either_learned(tmp_path: Path) -> None:
    with make_engine(store=tmp_path, cost_model=True) as one, make_engine(store=tmp_path, cost_model=True) as two:
        for engine, size in ((one, 10.0), (two, 1000.0)):
            assert engine.engine.costs is not None
            engine.engine.costs.forward.learn(size, size)
            engine.engine.costs._save()
    with make_engine(store=tmp_path, cost_model=True) as three:
        assert [size for size, _ in learned(three)["forward"]] == [10.0, 1000.0]


# --- the one measurement of its own ---------------------------------------------------------------------------------


def probes(engine: KVBoost, monkeypatch: Any) -> list[int]:
    """The token counts of the probes that are run from now on, each of which takes a millisecond."""
    ran: list[int] = []

    def forward_s(ids: tuple[int, ...]) -> float:
        ran.append(len(ids))
        return 0.001

    monkeypatch.setattr(engine.engine.costs, "_forward_s", forward_s)
    return ran


def open_costs(engine: KVBoost, *forward: tuple[float, float]) -> CostModel:
    """A model to which reuse costs 50 ms of choosing, and that knows these forwards."""
    costs = set_costs(engine, forward=1.0, load=1e-9, choose=0.05)
    costs.forward = Curve(forward)
    return costs


def test_a_full_forward_is_measured_after_an_answer_where_the_decision_hangs_on_it(monkeypatch: Any) -> None:
    engine = make()
    open_costs(engine, (200.0, 0.04))
    ran = probes(engine, monkeypatch)
    first = engine.generate(chat(), max_new_tokens=1).report
    assert first.hits == 4, "the measurement comes after the answer"
    assert ran == [first.prompt_tokens] * 2
    assert outcomes(engine) == [("miss", CHEAPER)] * 4
    assert len(ran) == 2, "once"


def test_as_much_is_measured_as_is_sure_to_be_short(monkeypatch: Any) -> None:
    engine = make()
    open_costs(engine, (40.0, 0.0444))
    monkeypatch.setattr(cost_module, "PROBE_S", 0.25)
    ran = probes(engine, monkeypatch)
    n = engine.generate(chat(), max_new_tokens=1).report.prompt_tokens
    assert n > 225
    assert ran == [225, 225]


@pytest.mark.parametrize(
    "forward",
    [
        [],  # nothing is known
        [(300.0, 0.2)],  # reuse wins anyhow
        [(100.0, 10.0)],  # would take long
        [(700.0, 0.0001)],  # known well enough
    ],
)
def test_nothing_is_measured_where_it_would_not_matter_or_take_long(monkeypatch: Any, forward: Any) -> None:
    engine = make()
    open_costs(engine).forward = Fixed(forward)
    ran = probes(engine, monkeypatch)
    engine.generate(chat(), max_new_tokens=1)
    assert ran == []


def test_a_probe_that_finds_no_room_costs_no_answer(monkeypatch: Any) -> None:
    engine = make()
    costs = open_costs(engine, (200.0, 0.04))

    def fail(ids: tuple[int, ...]) -> float:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(costs, "_forward_s", fail)
    assert engine.generate(chat(), max_new_tokens=1).token_ids
    assert costs.forward.points == [(200.0, 0.04)]


def test_a_real_probe_returns_seconds() -> None:
    engine = make()
    costs = engine.engine.costs
    assert costs is not None
    assert 0 < costs._forward_s(tuple(range(40, 80))) < 60

"""The laws of the warm-up job, on an encoder that records its forwards."""

from __future__ import annotations

import io
import logging
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost_rag.errors import UsageError
from kvboost_rag.store.memory import MemoryStore
from kvboost_rag.warmup import Corpus, SourceChunk, WarmProgress, WarmReport, plan, warm
from kvboost_rag.warmup.progress import format_seconds, showing
from kvboost_rag.warmup.source import InputProblem, shard_of, text_digest
from tests.warmup.fakes import FakeEncoder, RefusingStore, text_of

TEXTS = [text_of(i, words=1 + i % 50) for i in range(300)]


def keys(encoder: FakeEncoder, texts: list[str], context: str = "canonical") -> set[str]:
    return {encoder.key(encoder.tokenize(text.strip()), context) for text in texts}


def test_everything_is_stored_and_registered() -> None:
    encoder = FakeEncoder()
    report = warm(encoder, TEXTS)
    assert (report.chunks, report.stored, report.skipped, report.failed) == (300, 300, 0, 0)
    assert set(encoder.store.keys()) == keys(encoder, TEXTS)
    assert encoder.registered == {text: encoder.key(encoder.tokenize(text)) for text in TEXTS}
    assert report.tokens == sum(len(text.split()) for text in TEXTS)
    assert report.bytes == report.tokens * encoder.bytes_per_token
    assert report.ok


def test_several_chunks_go_into_one_forward_without_waste() -> None:
    encoder = FakeEncoder()
    warm(encoder, [text_of(i, words=30 + i % 3) for i in range(200)], batch_tokens=320)
    assert len(encoder.batches) <= 24
    assert all(len(lengths) * max(lengths) <= 320 for _, lengths in encoder.batches)


def test_a_rerun_computes_nothing_and_still_registers() -> None:
    encoder = FakeEncoder()
    warm(encoder, TEXTS)
    again = FakeEncoder(encoder.store)
    report = warm(again, TEXTS)
    assert (report.stored, report.skipped, report.tokens) == (0, 300, 0)
    assert again.batches == []
    assert len(again.registered) == 300


def test_an_evicted_block_is_computed_anew() -> None:
    encoder = FakeEncoder()
    warm(encoder, TEXTS)
    encoder.store.delete(encoder.key(encoder.tokenize(TEXTS[7])))
    report = warm(encoder, TEXTS)
    assert (report.stored, report.skipped) == (1, 299)


def test_repeated_texts_count_once_whatever_their_outer_space() -> None:
    report = warm(FakeEncoder(), ["a b", " a b\n", "c", "a b"])
    assert (report.chunks, report.stored) == (2, 2)


def test_a_head_gives_each_chunk_a_second_block() -> None:
    encoder = FakeEncoder(head="You are helpful.")
    assert encoder.head
    report = warm(encoder, TEXTS)
    assert set(encoder.store.keys()) == keys(encoder, TEXTS) | keys(encoder, TEXTS, encoder.head)
    assert (report.stored, report.tokens) == (300, 2 * sum(len(text.split()) for text in TEXTS))


def test_a_head_given_later_computes_only_its_own_blocks() -> None:
    encoder = FakeEncoder()
    warm(encoder, TEXTS)
    later = FakeEncoder(encoder.store, head="You are helpful.")
    report = warm(later, TEXTS)
    assert {context for context, _ in later.batches} == {later.head}
    assert (report.stored, report.skipped) == (300, 0)
    assert len(later.registered) == 300


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 9))
def test_shards_are_disjoint_and_together_everything(count: int) -> None:
    parts = []
    for number in range(1, count + 1):
        encoder = FakeEncoder()
        warm(encoder, TEXTS, shard=(number, count))
        parts.append(set(encoder.store.keys()))
    assert sum(map(len, parts)) == len(TEXTS)
    assert set().union(*parts) == keys(FakeEncoder(), TEXTS)


def test_shards_are_of_like_size_and_never_change() -> None:
    shares = [shard_of(text_digest(text), 4) for text in TEXTS]
    assert all(50 <= shares.count(number) <= 100 for number in range(1, 5))
    assert text_digest(" a chunk\n").hex() == "1b68ed0edb6e4540cbe4c453b70a0d35"
    assert shard_of(text_digest("a chunk"), 8) == 4


@pytest.mark.parametrize("shard", [(0, 2), (3, 2), (1, 0)])
def test_a_shard_that_does_not_exist_is_refused(shard: tuple[int, int]) -> None:
    with pytest.raises(UsageError, match="no such shard"):
        warm(FakeEncoder(), TEXTS, shard=shard)


@pytest.mark.parametrize("at", [0, 1, 5])
def test_after_ctrl_c_a_rerun_does_the_rest_and_no_more(at: int) -> None:
    encoder = FakeEncoder()
    encoder.interrupt_at = at
    report = warm(encoder, TEXTS, batch_tokens=200)
    assert report.interrupted
    assert not report.ok
    done = set(encoder.store.keys())
    assert report.stored == len(done)
    again = FakeEncoder(encoder.store)
    rest = warm(again, TEXTS, batch_tokens=200)
    assert (rest.stored, rest.skipped) == (300 - len(done), len(done))
    assert len(again.registered) == 300


def test_should_stop_ends_between_batches() -> None:
    encoder = FakeEncoder()
    report = warm(encoder, TEXTS, batch_tokens=100, should_stop=lambda: len(encoder.batches) == 3)
    assert report.interrupted
    assert len(encoder.batches) == 3
    assert report.stored == len(set(encoder.store.keys()))


def test_ctrl_c_while_reading_keeps_what_is_done() -> None:
    def chunks() -> object:
        yield from TEXTS[:256]
        raise KeyboardInterrupt

    report = warm(FakeEncoder(), chunks())  # type: ignore[arg-type]
    assert (report.interrupted, report.stored) == (True, 256)


def test_out_of_memory_halves_until_it_fits() -> None:
    encoder = FakeEncoder()
    encoder.slots_limit = 300
    report = warm(encoder, TEXTS, batch_tokens=4000)
    assert (report.stored, report.failed, report.problems) == (300, 0, [])


def test_out_of_memory_is_remembered() -> None:
    encoder = FakeEncoder()
    attempts: list[int] = []
    encode = encoder.encode
    encoder.encode = lambda chunks, **kw: attempts.append(len(chunks)) or encode(chunks, **kw)  # type: ignore[method-assign]
    encoder.slots_limit = 100
    warm(encoder, [text_of(i, 10) for i in range(320)], batch_tokens=1600, window=160)
    assert len(attempts) - len(encoder.batches) <= 5


def test_a_chunk_that_fails_alone_is_a_problem_and_the_rest_is_done() -> None:
    encoder = FakeEncoder()
    encoder.poison = {TEXTS[42]}
    chunks = [SourceChunk(text, "file.txt", i) for i, text in enumerate(TEXTS)]
    report = warm(encoder, chunks)
    assert (report.stored, report.failed) == (299, 1)
    assert [(p.source, p.line) for p in report.problems] == [("file.txt", 42)]
    assert "NaN" in report.problems[0].reason
    assert TEXTS[42] not in encoder.registered


def test_many_scattered_failures_do_not_end_the_job() -> None:
    encoder = FakeEncoder()
    encoder.poison = set(TEXTS[::3])
    report = warm(encoder, TEXTS, window=10)
    assert (report.stored, report.failed) == (200, 100)


def test_a_failing_machine_ends_the_job_early() -> None:
    encoder = FakeEncoder()
    encoder.slots_limit = 0
    report = warm(encoder, TEXTS)
    assert report.failed < 100
    assert "in a row" in str(report.problems[-1])
    assert not report.interrupted


def test_refused_writes_are_failures_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    encoder = FakeEncoder(RefusingStore(room=280))
    with caplog.at_level(logging.WARNING):
        report = warm(encoder, TEXTS)
    assert (report.stored, report.failed, report.chunks) == (280, 20, 300)
    assert len(caplog.records) == 1
    assert [str(problem) for problem in report.problems] == ["store: 20 blocks not written, see the store's warning"]
    assert set(encoder.registered.values()) == set(encoder.store.keys())


def test_a_store_without_any_room_ends_the_job_early() -> None:
    encoder = FakeEncoder(RefusingStore(room=0))
    report = warm(encoder, [text_of(i, 20) for i in range(2000)], batch_tokens=200)
    assert report.stored == 0
    assert len(encoder.batches) <= 4


def test_a_corpus_larger_than_the_store_is_told() -> None:
    encoder = FakeEncoder(MemoryStore(limit_bytes=8 * 50))
    report = warm(encoder, [text_of(i, 10) for i in range(12)])
    assert "7 blocks made room" in str(report.problems[0])
    assert not report.ok


@pytest.mark.parametrize(
    ("text", "word"),
    [("word " * 101, "101 tokens"), ("untokenizable", "round-trip"), ("\ud800", "surrogate"), ("  ", "empty")],
)
def test_an_unusable_text_is_a_problem(text: str, word: str) -> None:
    report = warm(FakeEncoder(), [SourceChunk(text, "a.jsonl", 3), SourceChunk("fine", "a.jsonl", 4)])
    assert (report.stored, report.failed) == (1, 1)
    (problem,) = report.problems
    assert (problem.source, problem.line) == ("a.jsonl", 3)
    assert word in problem.reason


def test_a_chunk_that_just_fits_is_computed() -> None:
    assert warm(FakeEncoder(), [text_of(1, 100)], batch_tokens=10).stored == 1


@pytest.mark.parametrize("chunks", ["one string", [b"bytes"], [3]])
def test_wrong_types_are_refused(chunks: object) -> None:
    with pytest.raises(UsageError):
        warm(FakeEncoder(), chunks)  # type: ignore[arg-type]


def test_bad_files_are_in_the_report(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\nnonsense\n')
    (tmp_path / "b.png").write_bytes(b"x")
    report = warm(FakeEncoder(), Corpus([tmp_path], skip_unknown=True))
    assert (report.stored, report.ignored) == (1, {".png": 1})
    assert [problem.line for problem in report.problems] == [2]
    assert WarmReport.from_dict(report.as_dict()) == report


def test_tags_are_on_every_block() -> None:
    encoder = FakeEncoder()
    warm(encoder, ["a b c"], tags=("handbook",))
    block = encoder.store.get(next(encoder.store.keys()))
    assert block.header.tags == ("handbook",)  # type: ignore[union-attr]


def test_a_document_s_blocks_can_be_deleted_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "alpha one", "id": "a-1"}\n{"text": "alpha two", "id": "a-2"}\n')
    (tmp_path / "b.jsonl").write_text('{"text": "beta one"}\n{"text": "alpha two", "id": "elsewhere"}\n')
    encoder = FakeEncoder()
    warm(encoder, Corpus([tmp_path / "a.jsonl", tmp_path / "b.jsonl"]), tags=("both",))
    store = encoder.store
    tags = sorted(store.get(key).header.tags for key in store.keys())  # type: ignore[union-attr]
    a, b = str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")
    assert tags == [("both", a, "a-1"), ("both", a, "a-2"), ("both", b)]
    assert store.delete_tagged("a-1") == 1
    assert store.delete_tagged(a) == 1
    assert store.delete_tagged("both") == 1


def test_merged_counts_add_up_and_shared_problems_are_told_once() -> None:
    shared = InputProblem("a.pdf", None, "unreadable")
    own = InputProblem("b.txt", 3, "too long")
    one = WarmReport(stored=1, skipped=2, failed=1, tokens=10, bytes=80, seconds=2.0, problems=[shared, own])
    two = WarmReport(stored=3, tokens=30, bytes=240, seconds=5.0, problems=[shared], interrupted=True)
    whole = WarmReport.merged([one, two])
    assert (whole.chunks, whole.tokens, whole.bytes, whole.seconds) == (7, 40, 320, 5.0)
    assert whole.problems == [shared, own]
    assert whole.interrupted


@pytest.mark.parametrize("head", [None, "You are helpful."])
@pytest.mark.parametrize("poison", [set(), {TEXTS[3], TEXTS[299]}])
def test_progress_runs_from_zero_to_one(head: str | None, poison: set[str]) -> None:
    seen: list[WarmProgress] = []
    encoder = FakeEncoder(head=head)
    encoder.poison = poison
    warm(encoder, TEXTS, batch_tokens=400, window=64, progress=seen.append)
    fractions = [now.fraction for now in seen]
    assert None not in fractions
    assert fractions == sorted(fractions)  # type: ignore[type-var]
    assert (fractions[0], fractions[-1]) == (0.0, 1.0)
    assert seen[-1].chunks == 300
    assert seen[-1].left_s == 0.0


def test_progress_of_an_endless_source_has_no_fraction() -> None:
    seen: list[WarmProgress] = []
    warm(FakeEncoder(), (text for text in TEXTS), progress=seen.append)
    assert {(now.fraction, now.left_s) for now in seen} == {(None, None)}


def test_what_was_skipped_at_the_start_does_not_shorten_the_time_left() -> None:
    encoder = FakeEncoder()
    warm(encoder, TEXTS[:256])
    seen: list[WarmProgress] = []
    warm(encoder, TEXTS, window=256, progress=seen.append)
    assert seen[0].left_s is None


def test_progress_draws_nothing_on_request() -> None:
    with showing(False) as callback:
        assert callback is None


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_on_a_terminal_shows_rate_and_time_left() -> None:
    out = _Terminal()
    now = WarmProgress(10, 8, 2, 0, 1000, 500.0, 0.25, 90.0)
    with showing(True, out) as callback:
        assert callback
        callback(now)
    assert "500 tokens/s, 1 min 30 s left" in out.getvalue()


def test_progress_elsewhere_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 100, 2))
    monkeypatch.setattr("kvboost_rag.warmup.progress.time.monotonic", lambda: next(clock))
    out = io.StringIO()
    with showing(True, out) as callback:
        assert callback
        for _ in range(10):
            callback(WarmProgress(10, 8, 2, 0, 1000, 500.0, None, None))
    assert 1 <= out.getvalue().count("\n") < 10
    assert "10 chunks (2 there before), 500 tokens/s" in out.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.44, "0.4 s"), (59, "59 s"), (185, "3 min 05 s"), (7800, "2 h 10 min")]
)
def test_seconds_for_people(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_plan_says_what_warm_then_does() -> None:
    encoder = FakeEncoder(head="You are helpful.")
    warm(encoder, TEXTS[:100])
    texts = [*TEXTS, "word " * 101]
    found = plan(texts, encoder)
    assert (found.chunks, found.new_chunks, found.already_stored) == (301, 200, 100)
    report = warm(encoder, texts)
    assert (report.chunks, report.stored, report.skipped) == (301, 200, 100)
    assert (report.tokens, report.bytes) == (found.tokens, found.bytes)
    assert list(found.problems) == report.problems


def test_plan_stores_and_registers_nothing() -> None:
    encoder = FakeEncoder()
    found = plan(TEXTS, encoder)
    assert list(encoder.store.keys()) == []
    assert encoder.registered == {}
    assert found.estimate_s is not None
    assert found.estimate_s > 0


def test_plan_without_a_measurement_has_no_estimate() -> None:
    encoder = FakeEncoder()
    assert plan(TEXTS, encoder, probe=False).estimate_s is None
    assert encoder.batches == []
    encoder.slots_limit = 0
    assert plan(TEXTS, encoder).estimate_s is None


def test_plan_of_nothing_new_takes_no_time() -> None:
    encoder = FakeEncoder()
    warm(encoder, TEXTS)
    assert plan(TEXTS, encoder).estimate_s == 0.0


def test_plan_of_shards_adds_up() -> None:
    parts = [plan(TEXTS, FakeEncoder(), shard=(i, 3), probe=False) for i in (1, 2, 3)]
    assert sum(part.tokens for part in parts) == plan(TEXTS, FakeEncoder(), probe=False).tokens


@pytest.mark.parametrize("packs", [False, True])
def test_what_one_forward_may_take_bounds_every_batch(packs: bool) -> None:
    encoder = FakeEncoder()
    encoder.packs, encoder.max_batch_tokens = packs, 70
    assert warm(encoder, TEXTS).stored == len(TEXTS)
    sizes = [sum(lengths) if packs else len(lengths) * max(lengths) for _, lengths in encoder.batches]
    assert max(sizes) <= 70
    assert any(len(set(lengths)) > 3 for _, lengths in encoder.batches) == packs, "other lengths share a packed row"


def test_packed_batches_are_halved_when_memory_runs_out() -> None:
    encoder = FakeEncoder()
    encoder.packs, encoder.slots_limit = True, 120
    report = warm(encoder, TEXTS, batch_tokens=1000)
    assert (report.stored, report.failed) == (len(TEXTS), 0)

"""The anchor index finds every known text, whatever its order, and nothing else: laws against a brute-force search."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost_rag.errors import StoreError, UsageError
from kvboost_rag.store.anchors import AnchorIndex, TextSpan

ROOT = Path(__file__).resolve().parents[1]


def key(name: object) -> str:
    return "kv1:" + hashlib.sha256(str(name).encode("utf-8", "surrogatepass")).hexdigest()


def chunk(i: int, words: int = 30) -> str:
    draw = random.Random(i)
    return (
        " ".join(draw.choice(["stone", "river", "light", "under", "seven", "paper"]) for _ in range(words)) + f" {i}."
    )


def filled(texts: Iterable[str], path: Path | None = None, salt: str = "") -> AnchorIndex:
    index = AnchorIndex(path)
    index.add([(text, key(text)) for text in texts], salt)
    return index


def intervals(index: AnchorIndex, text: str, **options: object) -> list[tuple[int, int]]:
    return [(span.start, span.end) for span in index.find(text, **options).spans]  # type: ignore[arg-type]


def brute(known: Iterable[str], named: Iterable[str], text: str) -> list[tuple[int, int]]:
    """Leftmost, then longest, by trying everything."""
    texts = {t.strip() for t in known if len(t.strip()) >= 32} | {t.strip() for t in named if t.strip()}
    spans, cursor = [], 0
    while cursor < len(text):
        here = [len(t) for t in texts if text.startswith(t, cursor)]
        if here:
            spans.append((cursor, cursor + max(here)))
        cursor += max(here, default=1)
    return spans


# -- laws ------------------------------------------------------------------------------------------------------------


@st.composite
def worlds(draw: st.DrawFn) -> tuple[str, list[str], list[str]]:
    """A prompt that repeats itself, known texts cut out of it (so that they overlap and nest), and near misses."""
    letters = st.sampled_from(["a", "b", "ab", "aab", " ", "🙂", "\ud800", "\x00", "e\u0301"])
    pieces = draw(st.lists(st.tuples(letters, st.integers(1, 70)), min_size=1, max_size=9))
    prompt = "".join(letter * times for letter, times in pieces)
    cut = st.tuples(st.integers(0, len(prompt)), st.integers(0, 200))
    known = [prompt[start : start + size] for start, size in draw(st.lists(cut, max_size=12))]
    known += [text + "ab" for text in known[:3]] + ["c" + text for text in known[3:5]]
    named = [prompt[start : start + size] for start, size in draw(st.lists(cut, max_size=2))]
    return prompt, known, named


@settings(max_examples=300, deadline=None)
@given(worlds())
def test_find_equals_brute_force(world: tuple[str, list[str], list[str]]) -> None:
    prompt, known, named = world
    index = filled(known)
    matches = index.find(prompt, extra=named)
    assert [(s.start, s.end) for s in matches.spans] == brute(known, named, prompt)
    stored = {text.strip() for text in known}
    for span in matches.spans:
        text = prompt[span.start : span.end]
        indexed = len(text) >= 32 and text in stored
        # Equal texts may have been added before stripping, under several names.
        assert set(span.keys) == ({key(t) for t in known if t.strip() == text} if indexed else set())
    for candidate in matches.cuts:
        assert not any(s.start <= candidate.start < s.end for s in matches.spans)
        assert candidate.keys
        begin = prompt[candidate.start : candidate.start + 32]
        assert all(begin == t.strip()[:32] for t in known if key(t) in candidate.keys)


@settings(max_examples=30, deadline=None)
@given(
    st.permutations(range(8)),
    st.lists(st.sampled_from(["\n", "\n\n---\n", " Source: x\n", ""]), min_size=8, max_size=8),
)
def test_any_order_any_glue(order: list[int], glue: list[str]) -> None:
    index = filled(chunk(i) for i in range(20))
    prompt, expected = "Use this context.\n", []
    for number, between in zip(order, glue, strict=True):
        expected.append((len(prompt), len(prompt) + len(chunk(number)), key(chunk(number))))
        prompt += chunk(number) + between
    spans = index.find(prompt + "\nQuestion?").spans
    assert [(s.start, s.end, s.keys[0]) for s in spans] == expected


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_one_changed_character_is_no_match(data: st.DataObject) -> None:
    text = chunk(1, data.draw(st.sampled_from([8, 30, 200])))
    at = data.draw(st.integers(0, len(text) - 1))
    index = filled([text])
    assert intervals(index, f"x {text} y") == [(2, 2 + len(text))]
    assert intervals(index, f"x {text[:at]}#{text[at + 1 :]} y") == []
    assert intervals(index, f"x {text[:at]}{text[at + 1 :]} y") == []


def test_texts_that_collide_in_the_finding_hash_are_told_apart() -> None:
    # A Thue-Morse word and its complement have equal polynomial hashes modulo 2^64, whatever the (odd) base.
    word = "".join("ab"[bin(i).count("1") % 2] for i in range(2048))
    other = word.translate(str.maketrans("ab", "ba"))
    head = chunk(1)
    index = filled([head + word])
    assert intervals(index, head + other) == []
    assert index.add([(head + other, key("other"))]) == 1
    assert index.find(head + other).spans[0].keys == (key("other"),)
    assert index.find(head + word).spans[0].keys == (key(head + word),)


def test_duplicates_are_found_each_time() -> None:
    text = chunk(3)
    assert len(intervals(filled([text]), f"{text}{text} {text}")) == 3


def test_many_batches_and_slabs_are_one_index() -> None:
    index = AnchorIndex()
    for start in range(0, 6000, 750):
        assert index.add((chunk(i), key(i)) for i in range(start, start + 750)) == 750
    for i in random.Random(0).sample(range(6000), 60):
        assert index.find(f"?? {chunk(i)} ??").spans == (TextSpan(3, 3 + len(chunk(i)), (key(i),)),)


# -- adding ----------------------------------------------------------------------------------------------------------


def test_add_counts_what_is_new() -> None:
    index = AnchorIndex()
    assert index.add([(chunk(1), key("a")), (chunk(2), key("b")), (chunk(1), key("a"))]) == 2
    assert index.add([(f"\n {chunk(1)} \t", key("a"))]) == 0
    assert index.add([(chunk(1), key("c"))]) == 1  # the same text under another key: another model, another context
    assert index.add([("x" * 31, key("d")), (" " * 50, key("d")), ("x" * 32, key("d"))]) == 1
    assert len(index) == 4
    assert index.find(chunk(1)).spans[0].keys == (key("a"), key("c"))


def test_adding_everything_again_adds_nothing(tmp_path: Path) -> None:
    texts = [chunk(i) for i in range(9000)]
    index = filled(texts, tmp_path / "anchors")
    size = (tmp_path / "anchors").stat().st_size
    assert index.add((t, key(t)) for t in reversed(texts)) == 0
    assert (tmp_path / "anchors").stat().st_size == size == 64 * 9001


def test_contains() -> None:
    index = filled([chunk(1), chunk(1) + " and more", "short"])
    assert index.contains(chunk(1))
    assert index.contains(f" {chunk(1)}\n")
    assert index.contains(chunk(1) + " and more")
    assert not index.contains(chunk(1) + " and")
    assert not index.contains(chunk(1)[1:])
    assert not index.contains("short")
    assert not index.contains("")


@pytest.mark.parametrize(
    "bad", ["", "kv1:", "kv2:" + "0" * 64, "kv1:" + "g" * 64, "kv1:" + "0" * 63, "kv1:" + "0 " * 32]
)
def test_bad_keys_are_refused(bad: str) -> None:
    with pytest.raises(UsageError, match="64 hex"):
        AnchorIndex().add([(chunk(1), bad)])


def test_bad_types_are_refused() -> None:
    with pytest.raises(UsageError):
        AnchorIndex().find(b"bytes")  # type: ignore[arg-type]
    with pytest.raises(UsageError):
        AnchorIndex().add([(chunk(1), None)])  # type: ignore[list-item]


# -- salt, extras, odd text ------------------------------------------------------------------------------------------


def test_another_tenants_texts_never_match() -> None:
    index = filled([chunk(1)], salt="tenant a")
    for salt in ("", "tenant b", "tenant a ", "\ud800"):
        matches = index.find(f"> {chunk(1)} <", salt)
        assert (matches.spans, matches.cuts) == ((), ())
        assert not index.contains(chunk(1), salt)
        assert index.add([(chunk(1), key(salt))], salt) == 1
    assert index.find(chunk(1), "tenant a").spans[0].keys == (key(chunk(1)),)


@pytest.mark.parametrize("odd", ["🙂", "\ud83d", "\udc00x", "e\u0301", "\x00", "\U0010ffff", "\r\n.", "漢字", "ﷺ"])
def test_odd_characters(odd: str, tmp_path: Path) -> None:
    text = "x" + odd * 40 + "x"
    index = filled([text, chunk(1)], tmp_path / "anchors")
    assert intervals(index, f"{odd}{text}{chunk(1)}{odd}", extra=["nowhere", odd * 50]) == [
        (len(odd), len(odd) + len(text)),
        (len(odd) + len(text), len(odd) + len(text) + len(chunk(1))),
    ]


def test_extras_merge_under_the_same_rule() -> None:
    index = filled([chunk(1)])
    prompt = f"ab {chunk(1)} ab"
    both = index.find(prompt, extra=[" ab\n", "", "  ", chunk(1)[:40], chunk(1) + " a"])
    assert [(s.start, s.end, bool(s.keys)) for s in both.spans] == [
        (0, 2, False),
        (3, 3 + len(chunk(1)) + 2, False),  # named, and longer than the known text
    ]
    assert index.find(prompt, extra=[chunk(1)]).spans[0].keys == (key(chunk(1)),)
    assert intervals(index, "aaaaa", extra=["aa", "a"]) == [(0, 2), (2, 4), (4, 5)]


# -- cuts ------------------------------------------------------------------------------------------------------------


def test_a_cut_chunk_is_a_candidate() -> None:
    long, short = chunk(1, 100), chunk(2, 12)
    index = filled([chunk(i, 100) for i in range(1, 50, 2)] + [short])
    cut = short[: len(short) // 2 + 5]
    prompt = f"{long[:300]} ... {chunk(3, 100)} ... {cut}"
    matches = index.find(prompt)
    assert [(s.start, s.end) for s in matches.spans] == brute([chunk(3, 100)], [], prompt)
    assert [(c.start, c.keys, c.lengths) for c in matches.cuts] == [
        (0, (key(long),), (len(long),)),
        (len(prompt) - len(cut), (key(short),), (len(short),)),
    ]


def test_cut_candidates_are_limited_and_longest_first() -> None:
    head = chunk(1, 60)
    index = filled(head + "x" * i for i in range(1, 60))
    (candidate,) = index.find(f"... {head}").cuts
    assert candidate.start == 4
    assert candidate.lengths == tuple(len(head) + i for i in range(59, 51, -1))
    assert candidate.keys == tuple(key(head + "x" * i) for i in range(59, 51, -1))


# -- boilerplate and hostile prompts (work is bounded; the benchmark has the times) ----------------------------------


def test_one_beginning_for_a_hundred_thousand_texts(tmp_path: Path) -> None:
    head = "Source: handbook of the company, page 1\n"
    texts = [f"{head}{i:x} " + "lorem ipsum dolor " * (i % 40) + f"end {i}" for i in range(100_000)]
    index = filled(texts, tmp_path / "anchors")
    chosen = random.Random(5).sample(range(100_000), 8)
    prompt = "\n".join(f"{texts[i]}\n{head}unknown words {i}" for i in chosen)
    assert intervals(index, prompt) == brute([texts[i] for i in chosen], [], prompt)


@pytest.mark.parametrize("unit", ["a", "ab", "Source: handbook of the company, page 1\n"])
def test_an_anchor_repeated_thousands_of_times(unit: str) -> None:
    run = unit * (120_000 // len(unit))
    index = filled([run[:size] + "!" for size in range(200, 1200)] + [run[:777]])
    size = len(run[:777].strip())
    spans = intervals(index, run)
    assert spans[:2] == [(0, size), (spans[1][0], spans[1][0] + size)]
    assert len(spans) == len(brute([run[:777]], [], run))
    assert intervals(filled([run[:500] + "!"]), run) == []


# -- the file --------------------------------------------------------------------------------------------------------


def test_a_new_process_finds_the_same(tmp_path: Path) -> None:
    filled((chunk(i) for i in range(100)), tmp_path / "deep" / "anchors").close()
    again = AnchorIndex(tmp_path / "deep" / "anchors")
    assert len(again) == 100
    assert again.find(chunk(42)).spans == (TextSpan(0, len(chunk(42)), (key(chunk(42)),)),)
    assert again.check() == []
    assert (tmp_path / "deep" / "anchors").stat().st_mode & 0o077 == 0


def test_two_handles_see_each_other(tmp_path: Path) -> None:
    one, two = AnchorIndex(tmp_path / "a"), AnchorIndex(tmp_path / "a")
    assert one.add([(chunk(1), key(1))]) == 1
    assert two.add([(chunk(1), key(1)), (chunk(2), key(2))]) == 1
    assert one.find(chunk(2)).spans[0].keys == (key(2),)
    two.clear()
    assert two.add((chunk(i), key(i)) for i in range(5, 9)) == 4
    assert len(one) == 4
    assert one.find(chunk(1)).spans == ()
    assert one.find(chunk(7)).spans[0].keys == (key(7),)


def test_a_deleted_file_is_made_anew(tmp_path: Path) -> None:
    index = filled([chunk(1)], tmp_path / "a")
    (tmp_path / "a").unlink()
    assert index.find(chunk(1)).spans == ()
    assert index.add([(chunk(2), key(2))]) == 1
    assert len(AnchorIndex(tmp_path / "a")) == 1


WRITER = """
import sys
sys.path[:0] = [{root!r}, {tests!r}]
from test_anchors import *
index = AnchorIndex(Path({path!r}))
print("ready", flush=True)
sys.stdin.readline()
for i in range({first}, {last}, {step}):
    index.add([(chunk(j), key(j)) for j in range(i, i + {step})])
"""


def writer(path: Path, first: int, last: int, step: int) -> subprocess.Popen[str]:
    tests = str(Path(__file__).parent)
    code = WRITER.format(root=str(ROOT), tests=tests, path=str(path), first=first, last=last, step=step)
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdin is not None
    return process


def go(*processes: subprocess.Popen[str]) -> None:
    for process in processes:
        assert process.stdout.readline() == "ready\n"  # type: ignore[union-attr]
    for process in processes:
        process.stdin.write("\n")  # type: ignore[union-attr]
        process.stdin.flush()  # type: ignore[union-attr]


def test_two_processes_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    writers = [writer(path, 0, 600, 1), writer(path, 0, 900, 1)]
    go(*writers)
    assert [w.communicate() and w.returncode for w in writers] == [0, 0]
    index = AnchorIndex(path)
    assert (len(index), index.check()) == (900, [])
    assert all(index.contains(chunk(i)) for i in range(0, 900, 37))


def test_a_killed_writer_leaves_a_good_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    index = AnchorIndex(path)
    for round_ in range(2):
        victim = writer(path, round_ * 10**6, (round_ + 1) * 10**6, 10)
        before = len(index)
        go(victim)
        while len(index) < before + 50:
            assert victim.poll() is None
        os.kill(victim.pid, signal.SIGKILL)
        victim.communicate()
        assert index.add([(chunk(-1 - round_), key("after"))]) == 1
    fresh = AnchorIndex(path)
    assert fresh.check() == []
    assert len(fresh) == len(index)
    assert all(fresh.contains(chunk(-1 - r)) and fresh.contains(chunk(r * 10**6)) for r in range(2))


@pytest.mark.parametrize("lost", [0, 1, 33, 63])
def test_every_truncated_length_opens_and_mends(tmp_path: Path, lost: int) -> None:
    path = tmp_path / "a"
    for whole in range(-1, 3):  # -1: the header itself is torn
        path.unlink(missing_ok=True)
        filled([chunk(1), chunk(2), chunk(3)], path).close()
        with path.open("r+b") as file:
            file.truncate(64 * (whole + 2) - lost)
        index = AnchorIndex(path)
        left = max(0, whole + (lost == 0))
        assert len(index) == left
        assert index.add([(chunk(9), key(9))]) == 1
        assert index.check() == []
        assert len(AnchorIndex(path)) == left + 1


def test_every_flipped_byte_is_seen_and_never_matches_wrongly(tmp_path: Path) -> None:
    path = tmp_path / "a"
    filled([chunk(1), chunk(2)], path).close()
    good, prompt = path.read_bytes(), f"{chunk(1)} {chunk(2)}"
    right = {TextSpan(s.start, s.end, s.keys) for s in AnchorIndex(path).find(prompt).spans}
    for at in range(len(good)):
        path.write_bytes(good[:at] + bytes([good[at] ^ (1 << at % 8)]) + good[at + 1 :])
        index = AnchorIndex(path)
        assert index.check(), at
        assert set(index.find(prompt).spans) < right
        assert index.check(fix=True)
        assert index.check() == []
        index.close()
        assert AnchorIndex(path).check() == []
        for aside in tmp_path.glob("*.bad*"):
            aside.unlink()


def test_check_tells_and_fix_mends(tmp_path: Path) -> None:
    path = tmp_path / "a"
    index = filled((chunk(i) for i in range(5)), path)
    with path.open("r+b") as file:
        file.seek(64 * 3 + 20)
        file.write(b"\xff")
        file.seek(0, os.SEEK_END)
        file.write(b"torn")
    assert [line.split(": ")[1] for line in index.check()] == [
        "4 bytes of a torn record at the end",
        "record 2 is malformed",
    ]
    assert len(index.check(fix=True)) == 2
    assert index.check() == []
    assert len(index) == 4
    assert [index.contains(chunk(i)) for i in range(5)] == [True, True, False, True, True]
    assert index.add([(chunk(2), key(2))]) == 1
    assert AnchorIndex(path).contains(chunk(2))


@pytest.mark.parametrize("content", [b"hello", b"x" * 1000, b"kvanchor" + b"\x07" * 200])
def test_a_foreign_file_is_left_alone_until_fix(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a"
    path.write_bytes(content)
    index = filled([chunk(1)], path)
    assert "left alone" in caplog.text
    assert index.contains(chunk(1))
    assert path.read_bytes() == content
    assert len(index.check()) == 1
    assert len(index.check(fix=True)) == 1
    assert (tmp_path / "a.bad").read_bytes() == content
    assert index.check() == []
    assert AnchorIndex(path).find(chunk(1)).spans[0].keys == (key(chunk(1)),)


def test_a_full_disk_is_a_skipped_write_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    index = filled([chunk(1)], tmp_path / "a")
    write = os.write

    def full(fd: int, data: bytes) -> int:
        write(fd, data[:10])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        assert index.add([(chunk(2), key(2))]) == 0
        assert index.add([(chunk(3), key(3))]) == 0
    assert caplog.text.count("No space left") == 1
    assert (len(index), index.check()) == (1, [])
    assert index.add([(chunk(2), key(2))]) == 1


def test_an_impossible_path_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot open"):
        AnchorIndex(tmp_path / "file" / "anchors")


# -- life ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_clear_and_close(tmp_path: Path, kind: str) -> None:
    index = filled([chunk(1)], tmp_path / "a" if kind == "file" else None)
    index.clear()
    assert len(index) == 0
    assert not index.contains(chunk(1))
    assert index.add([(chunk(1), key(1))]) == 1
    index.close()
    index.close()
    with pytest.raises(StoreError, match="closed"):
        index.find(chunk(1))


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_threads_add_and_find_at_once(tmp_path: Path, kind: str) -> None:
    index = AnchorIndex(tmp_path / "a" if kind == "file" else None)
    failures: list[str] = []

    def work(first: int) -> None:
        for i in range(first, first + 150):
            index.add([(chunk(i), key(i)), (chunk(i % 7), key(i % 7))])
            if index.find(f"- {chunk(i)}").spans != (TextSpan(2, 2 + len(chunk(i)), (key(i),)),):
                failures.append(chunk(i))

    threads = [threading.Thread(target=work, args=(1000 * n,)) for n in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(index) == 607
    assert index.check() == []


def test_a_forked_child_writes_under_its_own_lock(tmp_path: Path) -> None:
    index = filled([chunk(1)], tmp_path / "a")
    code = (
        "import os, sys; sys.path[:0] = sys.argv[2:]\n"
        "from test_anchors import *\n"
        "index = AnchorIndex(Path(sys.argv[1]))\n"
        "pid = os.fork()\n"
        "for i in range(100): index.add([(chunk(1000 * (pid == 0) + 10 + i), key(i))])\n"
        "if pid: os.waitpid(pid, 0)\n"
    )
    tests = str(Path(__file__).parent)
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "a"), str(ROOT), tests], check=True)
    assert (len(index), index.check()) == (201, [])

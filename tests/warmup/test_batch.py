from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvboost_rag.warmup.batch import MAX_WASTE, group

LENGTHS = st.lists(st.integers(1, 300), max_size=200)


@given(LENGTHS, st.integers(1, 4000))
def test_every_chunk_is_in_exactly_one_batch(lengths: list[int], batch_tokens: int) -> None:
    assert sorted(i for batch in group(lengths, batch_tokens) for i in batch) == list(range(len(lengths)))


@given(LENGTHS, st.integers(1, 4000))
def test_no_batch_exceeds_tokens_or_waste(lengths: list[int], batch_tokens: int) -> None:
    for batch in group(lengths, batch_tokens):
        sizes = [lengths[i] for i in batch]
        slots = len(sizes) * max(sizes)
        assert len(sizes) == 1 or slots <= batch_tokens
        assert slots - sum(sizes) <= MAX_WASTE * slots


def test_equal_lengths_fill_whole_batches() -> None:
    assert [len(batch) for batch in group([10] * 25, 100)] == [10, 10, 5]


def test_no_chunks_give_no_batches() -> None:
    assert group([], 100) == []


@given(LENGTHS, st.integers(1, 4000))
def test_packed_batches_have_a_bound_and_no_padding(lengths: list[int], batch_tokens: int) -> None:
    batches = group(lengths, batch_tokens, packed=True)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    sizes = [sum(lengths[i] for i in batch) for batch in batches]
    assert all(n <= batch_tokens or len(batch) == 1 for n, batch in zip(sizes, batches, strict=True))
    # Two neighbours never fit into one.
    assert all(a + lengths[b[0]] > batch_tokens for a, b in zip(sizes, batches[1:], strict=False))

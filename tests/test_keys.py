"""The key format is a contract: golden values, and no two computations with one key.

If a golden value changes, every store out there is emptied at once: then raise ``KEY_PREFIX`` and say so in the
changelog.
"""

from __future__ import annotations

import os
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from kvboost_rag.fingerprint import Fingerprint
from kvboost_rag.keys import KEY_PREFIX, block_key, context_digest, digest_fields, token_bytes

FIELDS = ("llama:64", "w0", "float32", "", '{"rope_type":"default"}', "", "t0")
IDS = st.lists(st.integers(0, 2**32 - 1), max_size=8)

GOLDEN = {
    "fields": "49a1af1b982d48d444434b4fdd5a935bad437b5e211cfd8c9f18b975e2cc1e31",
    "context": "f6c060478b3f2acd7718ce4c8b47495acd3f95e9b10532fd5adbad88bdc428af",
    "key": "kv1:0da434d101e7402b9da35739d604a53c15040bc84d1e091812582b7755267e2e",
    "salted": "kv1:6174f3423f9b2f80fe6afc6f46b20cd2218be590ebf8f91da547d5228683b5c9",
    "fingerprint": "fp1:210b7bb17512f104cff396d59ed45ef3d286211ec93db906bd902b4202597421",
}


def test_golden_values() -> None:
    assert token_bytes([1, 258, 2**32 - 1]).hex() == "0100000002010000ffffffff"
    assert digest_fields([]) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert digest_fields([b"a", b""]) == GOLDEN["fields"]
    assert context_digest([1, 2, 3]) == GOLDEN["context"]
    assert block_key("fp1:abc", "c0ffee", [5, 6, 7]) == GOLDEN["key"]
    assert block_key("fp1:abc", "c0ffee", [5, 6, 7], "tenant") == GOLDEN["salted"]
    assert Fingerprint(*FIELDS).digest == GOLDEN["fingerprint"]


def test_keys_are_tagged() -> None:
    key = block_key("f", "c", [1])
    assert key.startswith(KEY_PREFIX)
    assert len(key) == len(KEY_PREFIX) + 64


def test_keys_do_not_depend_on_the_process() -> None:
    code = "from kvboost_rag.keys import block_key; print(block_key('fp1:abc', 'c0ffee', [5, 6, 7]))"
    for seed in ("0", "1"):
        out = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True
        )
        assert out.stdout.strip() == GOLDEN["key"], out.stderr


@given(st.lists(st.binary(max_size=5), max_size=5), st.lists(st.binary(max_size=5), max_size=5))
def test_no_two_field_lists_share_an_encoding(a: list[bytes], b: list[bytes]) -> None:
    assert (digest_fields(a) == digest_fields(b)) == (a == b)


@given(st.tuples(st.text(max_size=4), st.text(max_size=4), IDS, st.text(max_size=4)), st.data())
def test_every_field_counts(fields: tuple[str, str, list[int], str], data: st.DataObject) -> None:
    other = data.draw(st.tuples(st.text(max_size=4), st.text(max_size=4), IDS, st.text(max_size=4)))
    assert (block_key(*fields) == block_key(*other)) == (fields == other)


def test_a_field_cannot_spill_into_its_neighbour() -> None:
    """Salt and id glued together without lengths let one tenant spell another's key."""
    assert block_key("ab", "c", [1]) != block_key("a", "bc", [1])
    assert block_key("a", "b", [], "c") != block_key("a", "bc", [])
    assert context_digest([1]) != digest_fields([token_bytes([1])])


def test_types_of_ids_do_not_matter() -> None:
    import numpy as np

    assert block_key("f", "c", (1, 2)) == block_key("f", "c", [1, 2]) == block_key("f", "c", np.array([1, 2]))

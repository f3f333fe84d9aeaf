"""Tokenizers built in process: byte-level, and SentencePiece-like. Both round-trip any text; no file, no network."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

BOS, EOS, PAD, UNK = "<s>", "</s>", "<pad>", "<unk>"
SPECIALS = [UNK, BOS, EOS, PAD, "<|im_start|>", "<|im_end|>"]
ADDED = ["<think>", "</think>"]  # in the vocabulary, parsed as one token, but not special

# ChatML. Like many real templates it writes the BOS itself, so that tokenising its output plainly would write it twice.
CHATML = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

WORDS = (
    "the of and to in is was that for on with as by from are this which were at an be it or his her not have has "
    "first question answer document text city river year world between people after called system user assistant"
).split()


def _merges(words: Iterable[str], space: str) -> list[tuple[str, str]]:
    """Merges that build each word, with and without a space in front, from left to right."""
    merges: dict[tuple[str, str], None] = {}
    for word in words:
        for spelled in (space + word, word):
            for i in range(1, len(spelled)):
                merges[(spelled[:i], spelled[i])] = None
    return list(merges)


def _vocabulary(alphabet: Iterable[str], merges: list[tuple[str, str]]) -> dict[str, int]:
    tokens = dict.fromkeys([*SPECIALS, *alphabet])
    tokens.update(dict.fromkeys(a + b for a, b in merges))
    return {token: i for i, token in enumerate(tokens)}


def _finish(tokenizer: Tokenizer, *, add_bos: bool, chat_template: str | None) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIALS])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in ADDED])
    if add_bos:
        bos = (BOS, tokenizer.token_to_id(BOS))
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[bos]
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=PAD, unk_token=UNK,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    fast.chat_template = chat_template
    return fast


def tiny_tokenizer(*, add_bos: bool = True, chat_template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """Byte-level BPE with a few words. ``add_bos``: plain calls put ``<s>`` in front, as Llama's tokenizer does."""
    merges = _merges(WORDS, "Ġ")
    vocabulary = _vocabulary(sorted(pre_tokenizers.ByteLevel.alphabet()), merges)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _finish(tokenizer, add_bos=add_bos, chat_template=chat_template)


def sentencepiece_like_tokenizer(
    *, add_bos: bool = True, chat_template: str | None = CHATML
) -> PreTrainedTokenizerFast:
    """BPE over characters with byte fallback, which puts a ``▁`` in front of every text it is given, as Llama 2 does.

    Encoding span by span therefore differs from encoding the whole text: a span that does not begin with a space gains
    one. Decoding drops one space at the start of the text.
    """
    merges = _merges(WORDS, "▁")
    printable = [chr(c) for c in range(0x21, 0x7F)]
    alphabet = [*(f"<0x{b:02X}>" for b in range(256)), "▁", *printable]
    tokenizer = Tokenizer(
        models.BPE(vocab=_vocabulary(alphabet, merges), merges=merges, unk_token=UNK, byte_fallback=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always", split=True)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _finish(tokenizer, add_bos=add_bos, chat_template=chat_template)

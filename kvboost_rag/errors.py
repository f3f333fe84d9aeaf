"""The errors of kvboost_rag.

::

    KVBoostError                      everything below; carries a ``hint`` (what to do about it)
    ├── UsageError(ValueError)        the caller asked for something that makes no sense
    │   ├── UnknownOptionError        an option, policy or name that does not exist
    │   ├── EmptyPromptError          nothing to answer
    │   └── ContextLengthError        prompt + max_new_tokens beyond the model's window
    ├── ModelError                    the model cannot be loaded or used
    │   ├── ModelNotFoundError        no such file, folder or hub id
    │   ├── UnsupportedModelError     chunk reuse is not proved for this architecture
    │   └── CheckpointError           the checkpoint is damaged, incomplete or of another format
    ├── TokenizerError                the tokenizer cannot round-trip text, or has no chat template
    ├── StoreError                    the store itself is unusable (a bad *block* is a miss, not an error)
    │   └── BlockFormatError          bytes that are not a block of ours (turned into a miss by every store)
    ├── MissingExtraError(ImportError)  an optional dependency is not installed; names the pip command
    └── CapacityError(MemoryError)    a budget (VRAM, host memory) is too small; names both numbers

World errors and programmer errors share one root, so that ``except KVBoostError`` is enough at a border.
"""

from __future__ import annotations


class KVBoostError(Exception):
    """Base of every error that kvboost_rag raises on purpose.

    ``hint`` says what to do about it; it is part of ``str(error)`` so that it survives logging.
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message

    def __reduce__(self) -> tuple[object, ...]:
        # Exception.__reduce__ drops keyword-only arguments; keep the hint across processes.
        return (_rebuild, (type(self), self.message, self.hint))


def _rebuild(cls: type[KVBoostError], message: str, hint: str) -> KVBoostError:
    return cls(message, hint=hint)


class UsageError(KVBoostError, ValueError):
    """The call itself is wrong: a bad type, a bad value, a contradiction."""


class UnknownOptionError(UsageError):
    """An option, policy or name that does not exist."""


class EmptyPromptError(UsageError):
    """The prompt renders to no tokens."""


class ContextLengthError(UsageError):
    """Prompt plus requested new tokens exceed the model's window."""


class ModelError(KVBoostError):
    """The model cannot be loaded or used."""


class ModelNotFoundError(ModelError):
    """No such file, folder or hub id."""


class UnsupportedModelError(ModelError):
    """Chunk reuse is not proved for this architecture; the message names the reason and the way out."""


class CheckpointError(ModelError):
    """The checkpoint is damaged, incomplete, or of a format that is not read here."""


class TokenizerError(KVBoostError):
    """The tokenizer cannot do what is needed (round trip, chat template)."""


class StoreError(KVBoostError):
    """The store as a whole is unusable. A single bad block is a miss with a reason, never this."""


class BlockFormatError(StoreError):
    """Bytes that are not a well-formed block. Stores turn it into a miss and set the bytes aside."""


class MissingExtraError(KVBoostError, ImportError):
    """An optional dependency is missing; the hint is the pip command that brings it."""


class CapacityError(KVBoostError, MemoryError):
    """A memory budget is too small; the message names what is needed and what there is."""

"""What verifications found, kept in the store's manifest for every engine over that store."""

from __future__ import annotations

import json
import threading
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime

from kvboost_rag.config import Repair
from kvboost_rag.engine.encode import ChunkEncoder
from kvboost_rag.keys import digest_fields


@dataclass(frozen=True, slots=True)
class Verdict:
    """One verification's result. ``kl`` is the mean KL(full prefill ‖ reuse) in nats, ``agreement`` a share."""

    policy: str  # the policy's label, for people
    ok: bool
    kl: float
    agreement: float
    changed: int  # answers that read differently
    questions: int
    max_kl: float
    min_agreement: float
    created_s: float  # seconds since 1970

    @property
    def figures(self) -> str:
        """The figures in a few words."""
        day = datetime.fromtimestamp(self.created_s, UTC).date().isoformat()
        noun = "question" if self.questions == 1 else "questions"
        return (
            f"mean KL {self.kl:.4f} (limit {self.max_kl:g}), agreement {self.agreement:.0%} (at least "
            f"{self.min_agreement:.0%}) on {self.questions} {noun}, {day}"
        )

    def to_bytes(self) -> bytes:
        """As the manifest keeps it."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, value: bytes) -> Verdict | None:
        """What :meth:`to_bytes` wrote; None for anything else (then nothing is known, and it is verified again)."""
        try:
            given = json.loads(value)
            verdict = cls(**{f.name: given[f.name] for f in fields(cls)})
            return verdict if isinstance(verdict.ok, bool) and verdict.figures else None
        except (ValueError, TypeError, KeyError, OverflowError, OSError):
            return None


class Verdicts:
    """Verdicts by what they hold for: model, canonical context, how the store compresses blocks, and what the repair
    policy does (not its name: a name may mean something else in another release). Thread-safe.

    Each is read from the store once: one that another process keeps later is seen by engines opened after it.
    """

    def __init__(self, encoder: ChunkEncoder) -> None:
        self._encoder = encoder
        self._lock = threading.Lock()
        self._known: dict[str, Verdict | None] = {}

    def get(self, repair: Repair) -> Verdict | None:
        """The last verdict on ``repair``, or None."""
        name = self._name(repair)
        with self._lock:
            if name not in self._known:
                value = self._encoder.store.get_meta(name)
                self._known[name] = None if value is None else Verdict.from_bytes(value)
            return self._known[name]

    def keep(self, repair: Repair, verdict: Verdict) -> bool:
        """Keep ``verdict`` in place of an earlier one; False if the store holds it in this process only."""
        name = self._name(repair)
        with self._lock:
            self._known[name] = verdict
            return self._encoder.store.set_meta(name, verdict.to_bytes())

    def _name(self, repair: Repair) -> str:
        encoder = self._encoder
        parts = (encoder.adapter.fingerprint.digest, encoder.context_digest(), encoder.store.compression, repair.recipe)
        return "verdict:" + digest_fields(part.encode() for part in parts)

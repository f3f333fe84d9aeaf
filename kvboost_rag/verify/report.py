"""What a verification found, item by item and in plain words."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from statistics import fmean, median

MAX_KL = 0.1  # nats, mean over the answers' tokens
MIN_AGREEMENT = 0.9
EXACT_KL = 1e-4  # rounding


@dataclass(frozen=True, slots=True)
class TokenCheck:
    """One token of full prefill's answer: KL there, and what reuse would have said (``other``, where it differs)."""

    text: str
    kl: float
    other: str = ""


@dataclass(frozen=True, slots=True)
class ItemCheck:
    """One question, answered twice. KL is KL(full prefill ‖ reuse) in nats, over full prefill's greedy answer."""

    question: str
    full_text: str
    reuse_text: str
    kl_first: float
    kl: float
    agreement: float  # share of answer tokens where both would choose the same
    prompt_tokens: int
    forwarded_tokens: float
    reused_tokens: int
    repaired_tokens: int
    full_ttft_s: float
    reuse_ttft_s: float
    tokens: tuple[TokenCheck, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def changed(self) -> bool:
        """Whether the answer's text differs."""
        return self.full_text != self.reuse_text

    @property
    def idle(self) -> bool:
        """Whether no chunk was reused: nothing was measured."""
        return not self.reused_tokens and not self.repaired_tokens


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """All items, the thresholds, and the verdict. Times are of this machine and this run."""

    model: str
    policy: str
    items: tuple[ItemCheck, ...]
    max_kl: float = MAX_KL
    min_agreement: float = MIN_AGREEMENT
    warmed_chunks: int = 0  # blocks that were missing and were computed first
    notes: tuple[str, ...] = field(default=())
    kept: bool = False  # the store keeps this verdict, for engines over it

    @property
    def kl(self) -> float:
        """Mean KL over answers."""
        return fmean(i.kl for i in self.items)

    @property
    def kl_first(self) -> float:
        """Mean KL of the first token."""
        return fmean(i.kl_first for i in self.items)

    @property
    def agreement(self) -> float:
        """Mean share of answer tokens on which both agree."""
        return fmean(i.agreement for i in self.items)

    @property
    def changed(self) -> list[ItemCheck]:
        """Items whose answer text differs."""
        return [i for i in self.items if i.changed]

    @property
    def forwarded_share(self) -> float:
        """Forwarded tokens over prompt tokens, all items together."""
        return sum(i.forwarded_tokens for i in self.items) / max(1, sum(i.prompt_tokens for i in self.items))

    @property
    def full_ttft_s(self) -> float:
        """Median seconds to the first token by full prefill."""
        return median(i.full_ttft_s for i in self.items)

    @property
    def reuse_ttft_s(self) -> float:
        """Median seconds to the first token with reuse."""
        return median(i.reuse_ttft_s for i in self.items)

    @property
    def ok(self) -> bool:
        """Whether both thresholds hold."""
        return self.kl <= self.max_kl and self.agreement >= self.min_agreement

    @property
    def verdict(self) -> str:
        """One or two sentences for people."""
        n, changed = len(self.items), len(self.changed)
        if all(i.idle for i in self.items):
            return "Nothing was measured: no prompt reused a chunk. Do their chunks stand verbatim in the prompts?"
        if self.kl <= EXACT_KL and not changed:
            first = f"Reuse answers exactly as full prefill does on {n} of {n} questions."
        else:
            first = (
                f"{'Reuse stays close to full prefill' if self.ok else 'Reuse is too far from full prefill'}: "
                f"{changed} of {n} answers read differently, {self.agreement:.0%} of answer tokens are the same "
                f"choice, mean KL {self.kl:.4f} (limit {self.max_kl:g})."
            )
        return first if self.ok else first + ' Try repair="faithful", larger chunks, or reuse="prefix" (exact).'

    def as_dict(self) -> dict[str, object]:
        """Plain JSON-able dict."""
        return {
            "model": self.model,
            "policy": self.policy,
            "ok": self.ok,
            "verdict": self.verdict,
            "kl": self.kl,
            "kl_first": self.kl_first,
            "agreement": self.agreement,
            "changed": len(self.changed),
            "questions": len(self.items),
            "forwarded_share": self.forwarded_share,
            "full_ttft_s": self.full_ttft_s,
            "reuse_ttft_s": self.reuse_ttft_s,
            "max_kl": self.max_kl,
            "min_agreement": self.min_agreement,
            "warmed_chunks": self.warmed_chunks,
            "notes": list(self.notes),
            "kept": self.kept,
            "items": [{**asdict(i), "changed": i.changed} for i in self.items],
        }

    def table(self) -> str:
        """A plain-text report: a line per question, the answers that changed side by side, the verdict."""
        lines = [f"{'KL first':>9} {'KL':>8} {'agree':>6} {'forwarded':>9} {'TTFT full':>9} {'reuse':>7}  question"]
        for i in self.items:
            share = i.forwarded_tokens / max(1, i.prompt_tokens)
            lines.append(
                f"{i.kl_first:9.4f} {i.kl:8.4f} {i.agreement:6.0%} {share:9.0%} {1e3 * i.full_ttft_s:7.0f}ms "
                f"{1e3 * i.reuse_ttft_s:5.0f}ms {'*' if i.changed else ' '}{_short(i.question, 60)}"
            )
        lines.append(
            f"{self.kl_first:9.4f} {self.kl:8.4f} {self.agreement:6.0%} {self.forwarded_share:9.0%} "
            f"{1e3 * self.full_ttft_s:7.0f}ms {1e3 * self.reuse_ttft_s:5.0f}ms  mean (TTFT: median)"
        )
        for i in self.changed:
            lines += ["", f"* {_short(i.question, 100)}", f"  full:  {i.full_text!r}", f"  reuse: {i.reuse_text!r}"]
        lines += [f"note: {n}" for n in self.notes]
        return "\n".join([*lines, "", f"{self.model}, repair={self.policy}: {self.verdict}"])

    def html(self) -> str:
        """The same as one self-contained page, each answer token coloured by its KL."""
        from kvboost_rag.verify.html import report_html

        return report_html(self)


def _short(text: str, length: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= length else line[: length - 1] + "…"

"""What an engine does about reuse that was not verified, or that failed its verification."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, get_args

from kvboost_rag.config import NAMED_REPAIRS, unknown_option
from kvboost_rag.engine.report import Report
from kvboost_rag.engine.request import Request
from kvboost_rag.engine.verdicts import Verdict, Verdicts
from kvboost_rag.once import Once

OnLowFidelity = Literal["warn", "repair", "full", "ignore"]
MODES: tuple[str, ...] = get_args(OnLowFidelity)


def check_mode(value: object) -> OnLowFidelity:
    """Validate a value of ``on_low_fidelity``.

    Raises:
        UnknownOptionError: there is no such mode.
    """
    if value not in MODES:
        raise unknown_option("on_low_fidelity", value, MODES)
    return value  # type: ignore[return-value]


class FidelityGuard:
    """Looks at the stored verdict on a request's policy, before and after the request was prepared.

    ``"warn"`` logs once that the policy failed; ``"repair"`` answers with ``faithful`` where that one passed, else by
    full prefill; ``"full"`` answers by full prefill. Each but ``"ignore"`` also logs, once per engine, that reuse is
    approximate and nobody verified it. An exact answer is never warned about.
    """

    def __init__(self, verdicts: Verdicts, mode: OnLowFidelity) -> None:
        self.verdicts = verdicts
        self.mode = mode
        self._once = Once()

    def admit(self, request: Request) -> tuple[Request, str]:
        """The request as it is to be answered, and what was changed and why ("" if nothing was)."""
        if self.mode not in ("repair", "full") or request.reuse != "chunks" or request.repair.everything:
            return request, ""
        verdict = self.verdicts.get(request.repair)
        if verdict is None or verdict.ok:
            return request, ""
        changed, instead = self._fallback(request)
        note = f"{_failure(request, verdict)}: answered {instead} instead (on_low_fidelity={self.mode!r})"
        self._once.warn(f"failed {request.repair.recipe}", note)
        return changed, note

    def _fallback(self, request: Request) -> tuple[Request, str]:
        faithful = NAMED_REPAIRS["faithful"]
        if self.mode == "repair" and request.repair.recipe != faithful.recipe:
            verdict = self.verdicts.get(faithful)
            if verdict is not None and verdict.ok:
                return replace(request, repair=faithful), "with repair=faithful, which passed,"
        return replace(request, reuse="prefix"), 'by full prefill (reuse="prefix")'

    def note(self, request: Request, report: Report) -> None:
        """Warn about the approximate reuse in ``report`` if there is cause to."""
        if self.mode == "ignore" or report.exact or request.reuse != "chunks":
            return
        verdict = self.verdicts.get(request.repair)
        if verdict is None:
            self._once.warn(
                "unverified",
                f"chunks are reused approximately, and nobody has verified repair={request.repair.label} for this "
                "model and store: run `kvboost-rag verify` on your own questions "
                '(on_low_fidelity="ignore" turns this warning off)',
            )
        elif not verdict.ok:
            message = f'{_failure(request, verdict)}; on_low_fidelity="repair" or "full" would answer otherwise'
            report.warnings.append(message)
            self._once.warn(f"failed {request.repair.recipe}", message)


def _failure(request: Request, verdict: Verdict) -> str:
    return f"repair={request.repair.label} failed its verification ({verdict.figures})"

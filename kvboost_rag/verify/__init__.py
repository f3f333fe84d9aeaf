"""Prove reuse on your own questions: every answer with reuse beside the answer of a full prefill."""

from kvboost_rag.verify.items import VerifyItem, read_items
from kvboost_rag.verify.report import ItemCheck, TokenCheck, VerifyReport
from kvboost_rag.verify.run import verify

__all__ = ["ItemCheck", "TokenCheck", "VerifyItem", "VerifyReport", "read_items", "verify"]

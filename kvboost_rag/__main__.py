"""``python -m kvboost_rag`` is the command line."""

from __future__ import annotations

from kvboost_rag.cli import main

if __name__ == "__main__":
    main(prog_name="kvboost-rag")

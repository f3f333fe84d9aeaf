"""The tables of docs/store.md, from ``results/store.json`` and ``results/compression_squad.json``; ``tables.py`` puts them
there."""

from __future__ import annotations

from typing import Any

from ttft_table import machine

SHAPES = {"SmolLM2-135M": "SmolLM2-135M (30 layers × 3 × 64)", "Llama-3.1-8B": "Llama-3.1-8B (32 × 8 × 128)"}
KINDS = ("none", "int8", "int4")


def sizes(result: dict[str, Any]) -> str:
    """Bytes per token of each shape: exact, and rounded."""
    lines = _header(["model", "float32", "bfloat16", "int8", "int4"])
    for name, title in SHAPES.items():
        exact, *rounded = (result["disk"][f"{name} {kind}"] for kind in KINDS)
        bf16 = exact["bytes_per_token"]
        cells = [f"{row['bytes_per_token']:,.0f} ({row['share_of_bf16']:.2f})" for row in rounded]
        lines.append(_row([title, f"{2 * bf16:,.0f}", f"{bf16:,.0f}", *cells]))
    return _block(lines)


def lossless(result: dict[str, Any]) -> str:
    """What zstd makes of the small model's own blocks."""
    lines = _header(["SmolLM2-135M's own blocks", "bytes per token", "of exact", "written GB/s", "layers GB/s"])
    for name, row in result["real"].items():
        cells = [f"{row['bytes_per_token']:,.0f}", f"{row['share']:.3f}", f"{row['encode_gb_s']:.2f}"]
        lines.append(_row([name.replace(" ", ", "), *cells, f"{row['layers_gb_s']:.2f}"]))
    return _block(lines)


def speed(result: dict[str, Any]) -> str:
    """A folder's reads and writes, and what comes between a disk of 1 GB/s and K and V."""
    head = ["512 tokens, bfloat16", "write GB/s", "read GB/s", "four at once GB/s", "layers GB/s"]
    head += ["back GB/s, 1 thread", "2 threads", "from 1 GB/s, ms", "first layer, all, cold ms"]
    lines = _header(head)
    for name in SHAPES:
        exact = result["disk"][f"{name} none"]["from_1_gb_s_ms"]
        for kind in KINDS:
            row = result["disk"][f"{name} {kind}"]
            back = [f"{row[f'back_{n}_gb_s']:.1f}" if f"back_{n}_gb_s" in row else "–" for n in (1, 2)]
            share = "" if kind == "none" else f" ({row['from_1_gb_s_ms'] / exact:.2f})"
            cells = [f"{row[c]:.2f}" for c in ("write_gb_s", "read_gb_s", "read_many_gb_s", "layers_gb_s")]
            cold = f"{row['cold_first_layer_ms']:.1f}, {row['cold_all_layers_ms']:.0f}"
            lines.append(_row([f"{name}, {kind}", *cells, *back, f"{row['from_1_gb_s_ms']:.1f}{share}", cold]))
    for name, row in result.get("redis", {}).items():
        cells = [f"{row['write_gb_s']:.2f}", "–", f"{row['read_gb_s']:.2f}"]
        lines.append(_row([f"Redis: {name.replace(' none', ', none').replace(' int', ', int')}", *cells, *["–"] * 5]))
    return _block(lines) + f"\n{machine(result)}; load {result['load']:.1f} when it began.\n"


def scale(result: dict[str, Any]) -> str:
    """Look-ups by number of blocks."""
    lines = _header(["blocks", "open", "10 hits", "10 misses", "one write", "index built again from the files"])
    for count, row in result["scale"].items():
        names = ("open_ms", "ten_hits_ms", "ten_misses_ms", "write_ms")
        lines.append(_row([count, *(f"{row[name]:.1f} ms" for name in names), f"{row['build_index_s']:.1f} s"]))
    return _block(lines)


def known(result: dict[str, Any]) -> str:
    """One sentence on what known texts take, from ``benchmarks/match.py``."""
    many = result["rows"][-1]
    return (
        f"Every known text takes {many['file_bytes_per_chunk']:.0f} bytes in `anchors.bin` and "
        f"{many['resident_bytes_per_chunk']:.0f} bytes of memory (among {many['known_chunks']:,}; "
        f"`benchmarks/match.py`).\n"
    )


def fidelity(result: dict[str, Any]) -> str:
    """What rounded blocks cost in answers, together with reuse and repair."""
    head = ["blocks, repair", "KL over the greedy answer", "KL over the gold answer", "same top token (greedy, gold)"]
    lines = _header([*head, "KL minus exact blocks' (greedy)"])
    for name, row in result["rows"].items():
        kind, policy = name.split("/")
        kls = ["{:.4f} [{:.4f}, {:.4f}]".format(*row[f"kl_{way}"]) for way in ("greedy", "gold")]
        same = ", ".join(f"{row[f'agreement_{way}'][0]:.3f}" for way in ("greedy", "gold"))
        more = "–" if kind == "none" else "{:+.4f} [{:+.4f}, {:+.4f}]".format(*row["kl_greedy_minus_exact"])
        lines.append(_row([f"{'exact' if kind == 'none' else kind}, {policy}", *kls, same, more]))
    return _block(lines)


def _header(cells: list[str]) -> list[str]:
    return [_row(cells), "|" + "---|" * len(cells)]


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _block(lines: list[str]) -> str:
    return "\n".join(lines) + "\n"

"""Tensors only: blocks, rotary tables, bytes on the wire. No disk, no model."""

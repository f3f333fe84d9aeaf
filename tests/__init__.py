"""Tests; a regular package, so that `from tests.tiny import …` means this folder and no other."""

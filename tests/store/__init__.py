"""Tests of the block stores and their format."""

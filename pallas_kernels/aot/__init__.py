"""Compiling for an H100 on a machine that has none, and reading what came out."""

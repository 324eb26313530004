"""Kernels: the bit layout, and the products that read it."""

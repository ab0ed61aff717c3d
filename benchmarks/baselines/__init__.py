"""Baselines for the kernels: HSTU attention in Triton and in plain torch."""

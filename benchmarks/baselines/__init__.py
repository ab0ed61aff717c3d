"""Baselines that the kernels are compared with: HSTU attention in Triton and in plain torch."""

"""Kernels and models measured on an NVIDIA GPU, and what is expected of them where there is
none.
"""

"""Triton kernels of joint relative position. Importing this package imports no Triton."""

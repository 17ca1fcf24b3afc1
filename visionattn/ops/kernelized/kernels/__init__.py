"""Triton kernels of kernelized attention. Importing this package imports no Triton."""

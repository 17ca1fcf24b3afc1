"""Triton kernels of TaylorShift. Importing this package imports no Triton."""

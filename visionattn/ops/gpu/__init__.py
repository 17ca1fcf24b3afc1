"""GPU kernels in Triton: one file per operation. Importing this package imports no Triton and asks
no device.

``launch.py`` holds what every launch has in common, ``why_not.py`` says for which inputs there are
kernels, and the modules of the operations, which import Triton, are imported by their operators
when they first run.

All of them count in one unit: sums of values and of weights are divided by the number of keys M, so
that what reaches a half-precision matrix product stays near the size of a single weight, whatever M
is. The mean does not notice.
"""

"""What GPU kernels in Triton share. Importing this package imports no Triton and asks no device.

``launch.py`` holds what every launch has in common, ``machine.py`` what all kernels want of machine
and inputs, ``language.py`` and ``sums.py`` what is written in Triton. The kernels are in the rooms
of their operations, ``*/kernels``, and each room's ``gpu.py`` says for which inputs, and imports
them when they first run.

All of them count in one unit: sums of values and of weights are divided by the number of keys M, so
that what reaches a half-precision matrix product stays near the size of a single weight, whatever M
is. The mean does not notice.
"""

"""Common code of the GPU kernels in Triton. Importing this package neither imports Triton nor
queries a device.

``launch.py`` launches kernels, ``gpu_requirements.py`` checks machine and inputs, and
``triton_helpers.py`` and ``partial_sums.py`` are written in Triton. The kernels are in the packages
of their operations, ``*/kernels``. The ``*_triton.py`` of a package lists the supported inputs, and
imports the kernels when they first run.

In all kernels, sums of values and of weights are divided by the number of keys M ("in units of M").
Operands of half-precision products then have about the size of a single weight for any M. The mean
is unchanged.
"""

"""Code that all GPU kernels in Triton share. Importing this package neither imports Triton nor
queries a device.

``launch.py`` launches kernels, ``gpu_requirements.py`` checks machine and inputs, and
``triton_helpers.py`` and ``partial_sums.py`` are written in Triton. The kernels are in the packages
of their operations, ``*/kernels``. Each package's ``*_triton.py`` lists the supported inputs, and
imports the kernels when they first run.

All kernels use one unit: sums of values and of weights are divided by the number of keys M. Inputs
of half-precision products then stay near the size of a single weight for any M. The mean is
unchanged.
"""

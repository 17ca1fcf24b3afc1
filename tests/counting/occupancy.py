"""How many programs a multiprocessor holds at once. It knows nothing of kernels."""

from dataclasses import dataclass

THREADS_PER_WARP = 32
REGISTERS = 65_536
"""Of a multiprocessor, of each capability here; a warp gets them in steps of 256."""
WARPS = 64
PROGRAMS = 32
RESERVED_BYTES = 1024
"""Of shared memory, for each program."""
SHARED_BYTES = {80: 164 * 1024, 90: 228 * 1024, 100: 228 * 1024}
"""Of a multiprocessor, by capability. Source: CUDA C++ Programming Guide, "Compute Capabilities",
table of technical specifications; the steps of allocation are those of the occupancy calculator of
Nsight Compute."""


@dataclass(frozen=True)
class Use:
    """What one program takes."""

    warps: int
    registers: int
    """Of each thread."""
    shared_bytes: int


def programs_per_multiprocessor(use: Use, capability: int) -> int:
    """Programs that fit at once; 0: not even one."""
    per_warp = -(-use.registers * THREADS_PER_WARP // 256) * 256
    # Registers lie in four parts, one for each scheduler, and a warp's are all in one.
    by_registers = 4 * (REGISTERS // 4 // per_warp) // use.warps
    shared = -(-(use.shared_bytes + RESERVED_BYTES) // 128) * 128
    return min(by_registers, SHARED_BYTES[capability] // shared, WARPS // use.warps, PROGRAMS)

"""What the compiler says of every kernel, for three generations of GPUs and without one."""

from dataclasses import dataclass

import pytest

from tests.helpers.kernel_launches import CAPABILITIES, SHARED_BYTES

pytest.importorskip("triton", reason="GPU kernels need Triton")


@dataclass(frozen=True)
class Expected:
    """What is to be said of the launches of one module of ``tests.helpers.launches``."""

    compilations: dict[str, int]
    """Of every kernel: how many serve all sizes."""
    warp_groups: tuple[str, ...] = ()
    """Cases whose products take a Hopper GPU's units for four warps together."""
    without_products: tuple[str, ...] = ()
    in_every_case: bool = True
    """Whether each case launches every kernel."""


def once(*kernels: str) -> dict[str, int]:
    """One compilation of each."""
    return dict.fromkeys(kernels, 1)


OF_TAYLOR = ("sums", "expand", "gradient")
EXPECTED = {
    "unit": Expected(once("_unit", "_unit_backward"), without_products=("_unit", "_unit_backward")),
    "kernelized": Expected(
        once(
            "_kernelized_state", "_sums_of_parts", "_kernelized_means", "_kernelized_keys_backward"
        )
        | {"_kernelized_queries_backward": 2},  # for content alone, and for content with position
        warp_groups=("d=64 e=64 bfloat16",),
        without_products=("_sums_of_parts",),
    ),
    "kernelized_joint": Expected(
        once("_kernelized_state_and_lines", "_kernelized_sum_and_remainders")
    ),
    "causal": Expected(
        once(
            "_kernelized_state",
            "_causal_means",
            "_causal_queries_backward",
            "_causal_keys_backward",
        )
        | {"_sums_of_parts": 2},  # to either side
        warp_groups=("bfloat16", "masked float16"),
        without_products=("_sums_of_parts",),
    ),
    "taylor_direct": Expected(
        once(
            "_taylor_direct_means",
            "_taylor_direct_terms",
            "_taylor_direct_queries_backward",
            "_taylor_direct_keys_backward",
        ),
        warp_groups=(
            "bfloat16",
            "d=32 e=32 bfloat16",
            "d=64 e=32 masked float16",
            "masked float16",
        ),
        without_products=("_taylor_direct_terms",),
    ),
    "taylor_efficient": Expected(
        {f"taylor_efficient_{name}": 2 for name in OF_TAYLOR} | once("taylor_efficient_state"),
        warp_groups=("d=64 e=128 bfloat16",),
        without_products=("taylor_efficient_state",),
        in_every_case=False,
    ),
    "joint": Expected(
        once(
            "_joint_shares",
            "_joint_means",
            "_joint_lines",
            "_joint_means_of_remainders",
            "_joint_scores",
            "_joint_queries_backward",
            "_joint_table_backward",
            "_joint_far_queries",
            "_joint_far_sums",
            "_joint_rows_below_backward",
            "_joint_values_backward",
        ),
        without_products=("_joint_far_sums",),
        in_every_case=False,
    ),
}
every_module = pytest.mark.parametrize("launches", EXPECTED)
every_capability = pytest.mark.parametrize("capability", CAPABILITIES)


@every_module
@every_capability
def test_nothing_spills_and_shared_memory_is_in_bounds(launches, capability, compiled):
    for case, found in compiled[launches]["compiled"].items():
        for kernel in found[str(capability)]:
            assert kernel["spilled_bytes"] == 0, (case, kernel)
            assert kernel["shared_bytes"] <= SHARED_BYTES[capability], (case, kernel)


@every_module
@every_capability
def test_kernels_are_those_expected_and_their_products_run_on_matrix_units(
    launches, capability, compiled
):
    expected, seen = EXPECTED[launches], set()
    for case, found in compiled[launches]["compiled"].items():
        names = {kernel["kernel"] for kernel in found[str(capability)]}
        assert not expected.in_every_case or names == expected.compilations.keys(), case
        seen |= names
        for kernel in found[str(capability)]:
            with_products = kernel["kernel"] not in expected.without_products
            assert bool(kernel["unit"]) == with_products, (case, kernel)
    assert seen == expected.compilations.keys()


@pytest.mark.parametrize("launches", [name for name in EXPECTED if EXPECTED[name].warp_groups])
def test_wide_heads_run_on_the_units_of_a_hopper_gpu(launches, compiled):
    expected = EXPECTED[launches]
    for case in expected.warp_groups:
        for kernel in compiled[launches]["compiled"][case]["90"]:
            wanted = "" if kernel["kernel"] in expected.without_products else "wgmma"
            assert kernel["unit"] == wanted, (case, kernel)


@every_module
def test_no_size_compiles_anything_anew(launches, compiled):
    keys = compiled[launches]["keys"]
    assert keys == dict.fromkeys(keys, EXPECTED[launches].compilations) and keys

from autotile.core.device import device_profile
from autotile.core.text import bandwidth_text, flops_text
from autotile.kernel.problem import Workrate


def test_rates():
    assert flops_text(28.7e12) == "28.7 TFLOP/s"
    assert flops_text(812e9) == "812 GFLOP/s"
    assert bandwidth_text(4.276e12) == "4,276 GB/s"
    assert bandwidth_text(42e9) == "42 GB/s"


class TestWorkrate:
    h200 = device_profile("h200")
    sgemm = Workrate(flops=2 * 4096**3, bytes=12 * 4096**2, dtype="float32")

    def test_matrix_multiplication_is_set_against_the_fp32_peak(self):
        assert self.sgemm.text(4790, self.h200) == "28.7 TFLOP/s (42.9 % of fp32 peak)"

    def test_what_tensor_cores_reach_is_not_called_a_share_of_a_limit(self):
        assert self.sgemm.text(1453, self.h200) == "94.6 TFLOP/s (141.4 % of the CUDA cores' fp32 peak)"

    def test_a_copy_is_set_against_the_bandwidth(self):
        copy = Workrate(flops=None, bytes=2**30, dtype="float32")
        assert copy.text(251.1, self.h200) == "4,276 GB/s (89.1 % of bandwidth)"

    def test_work_that_is_both_is_set_against_the_nearer_limit(self):
        scale = Workrate(flops=2**28, bytes=2**31, dtype="float32")
        assert scale.text(500, self.h200).endswith("of bandwidth)")

    def test_other_types_have_peaks_of_their_own(self):
        half = Workrate(flops=2 * 4096**3, bytes=6 * 4096**2, dtype="float16")
        assert half.text(200, self.h200) == "687 TFLOP/s"

    def test_tensor_cores_have_a_peak_for_each_type(self):
        half = Workrate(2 * 4096**3, 6 * 4096**2, "float16", "tensor_float16")
        assert half.text(200, self.h200) == "687 TFLOP/s (69.5 % of fp16 tensor peak)"
        emulated = Workrate(2 * 4096**3, 12 * 4096**2, "float32", "tensor_bfloat16", 6)
        assert emulated.text(1453, self.h200) == "94.6 TFLOP/s (57.4 % of bf16 tensor peak over 6 products)"
        assert Workrate(2**36, 2**26, "float32", "fma_float32").text(4790, self.h200).endswith("% of fp32 peak)")

    def test_a_unit_without_a_known_peak_is_no_reason_to_name_the_memory(self):
        g80 = device_profile("g80")
        assert Workrate(2 * 4096**3, 6 * 4096**2, "float16", "tensor_float16").text(20_000, g80) == "6.87 TFLOP/s"

    def test_nothing_known_is_nothing_said(self):
        assert Workrate(None, None, "float32").text(1.0, self.h200) == "-"
        assert self.sgemm.text(None, self.h200) == "-"
        assert self.sgemm.text(4790, None) == "28.7 TFLOP/s"

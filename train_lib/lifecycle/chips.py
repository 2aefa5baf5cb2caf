"""Published figures of the chips that training runs on or is compiled for."""

from typing import NamedTuple


class Chip(NamedTuple):
    """Published rates of one chip, or of a half where JAX has two devices for a chip."""

    name: str  # for a TPU, as in a topology such as `v5e:4x4`
    flops: float  # a second, of dense matrix products in bfloat16
    memory: float  # bytes, with a GB of 10^9 bytes
    # Bytes a second that a chip receives over all its links to other chips together. An exchange
    # along one axis of the mesh may use only half of the links or fewer.
    link_rate: float
    clock: float = 0  # cycles a second of a TPU; 0 if not public


# Sources: the pages "TPU v4", "TPU v5e", "TPU v5p", "TPU v6e" and "TPU7x (Ironwood)" of Google
# Cloud's documentation, cloud.google.com/tpu/docs; for the links and the clock of v4 Jouppi et al.,
# "TPU v4: An Optically Reconfigurable Supercomputer" (2023), table 4. They give the rate of links
# in gigabits for one direction (v5e: 1,600, v6e: 3,200) or in gigabytes for both directions
# together (v5e: 400, v5p and TPU7x: 1,200); this table gives one direction. A TPU7x of 2,307
# TFLOP/s in bfloat16 and 192 GB consists of two chiplets, each a device of JAX; they share its
# links. The clocks of v5e and v5p follow from the peak rate and the number of multipliers, four
# units of 128 x 128 in each core (for v4 this gives 1.05 GHz, as published); the clocks of v6e and
# TPU7x are not public. For GPUs: NVIDIA's data sheets "H100 Tensor Core GPU" and "H200 Tensor Core
# GPU", columns SXM. Dense matrices reach half of the 1,979 TFLOP/s "with sparsity", and NVLink has
# 900 GB/s in both directions together.
#
# By `device_kind` as JAX gives it.
CHIPS = {
    'TPU v4': Chip('v4', 275e12, 32e9, 300e9, 1.05e9),
    'TPU v5 lite': Chip('v5e', 197e12, 16e9, 200e9, 1.503e9),
    'TPU v5': Chip('v5p', 459e12, 95e9, 600e9, 1.751e9),
    'TPU v6 lite': Chip('v6e', 918e12, 32e9, 400e9),
    'TPU7x': Chip('tpu7x', 2307e12 / 2, 192e9 / 2, 600e9 / 2),
    'NVIDIA H100 80GB HBM3': Chip('H100 SXM', 989e12, 80e9, 450e9),
    'NVIDIA H200': Chip('H200 SXM', 989e12, 141e9, 450e9),
}

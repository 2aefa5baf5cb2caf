"""Published figures of the chips that training runs on or can be compiled for.

    chip = chips.CHIPS[jax.devices()[0].device_kind]

Sources: the pages "TPU v4", "TPU v5e", "TPU v5p" and "TPU v6e" of Google Cloud's documentation,
cloud.google.com/tpu/docs; for the links of v4 Jouppi et al., "TPU v4: An Optically Reconfigurable
Supercomputer" (2023), table 4. They give links in gigabits, in one direction (v5e: 1,600, v6e:
3,200) or in gigabytes, both directions together (v5e: 400, v5p: 1,200); here one direction counts.
For GPUs NVIDIA's data sheets "H100 Tensor Core GPU" and "H200 Tensor Core GPU", columns SXM: 1,979
TFLOP/s "with sparsity" are half of that with dense matrices, NVLink has 900 GB/s, both directions.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Chip:
    """Published rates of one chip.

    Attributes:
        name: of a TPU as in the name of a topology, `v5e:4x4`.
        flops: of matrix products in bfloat16, a second.
        memory: bytes, taking a GB for 10^9.
        memory_rate: bytes a second to and from it.
        link_rate: bytes a second that come in over all its links to other chips together. What
            moves along one axis of the mesh may find half of them or fewer on its way.
    """

    name: str
    flops: float
    memory: float
    memory_rate: float
    link_rate: float


# By `device_kind` as JAX gives it.
CHIPS = {
    'TPU v4': Chip('v4', 275e12, 32e9, 1_200e9, 300e9),
    'TPU v5 lite': Chip('v5e', 197e12, 16e9, 819e9, 200e9),
    'TPU v5': Chip('v5p', 459e12, 95e9, 2_765e9, 600e9),
    'TPU v6 lite': Chip('v6e', 918e12, 32e9, 1_600e9, 400e9),
    'NVIDIA H100 80GB HBM3': Chip('H100 SXM', 989e12, 80e9, 3_350e9, 450e9),
    'NVIDIA H200': Chip('H200 SXM', 989e12, 141e9, 4_800e9, 450e9),
}

"""What GPUs can do, by NVIDIA's data sheets. FLOPs a second are dense, in bfloat16: the sheets print twice as much,
with sparsity."""

from dataclasses import dataclass

GIB = 2**30
A100, HOPPER, BLACKWELL = 312e12, 989.5e12, 2250e12


@dataclass(frozen=True)
class Gpu:
    """GiB of memory; FLOPs a second in bfloat16, dense; bytes a second of its memory, of its link to other GPUs of its
    node in one direction, to the host, and of its share of the node's network. From NVIDIA's data sheets; the network
    of cards without NVLink is assumed: 100 Gbit/s for eight."""

    name: str
    gib: int
    flops: float
    memory: float
    link: float
    host: float
    network: float


GPUS = {  # by the word behind --gpu
    "rtx4080": Gpu("RTX 4080", 16, 97.5e12, 717e9, 32e9, 32e9, 12.5e9 / 8),
    "rtx4090": Gpu("RTX 4090", 24, 165.2e12, 1008e9, 32e9, 32e9, 12.5e9 / 8),
    "a100_40gb": Gpu("A100 40GB", 40, A100, 1555e9, 300e9, 32e9, 25e9),
    "a100_80gb": Gpu("A100 80GB", 80, A100, 2039e9, 300e9, 32e9, 25e9),
    "l40s": Gpu("L40S", 48, 362e12, 864e9, 32e9, 32e9, 12.5e9 / 8),
    "h100": Gpu("H100 SXM", 80, HOPPER, 3350e9, 450e9, 64e9, 50e9),
    "h200": Gpu("H200 SXM", 141, HOPPER, 4800e9, 450e9, 64e9, 50e9),
}

# FLOPs a second, by torch.cuda.get_device_name; a part of a GPU (MIG) has another name
PEAK_FLOPS = {
    "NVIDIA A100-SXM4-40GB": A100,
    "NVIDIA A100-SXM4-80GB": A100,
    "NVIDIA A100-PCIE-40GB": A100,
    "NVIDIA A100 80GB PCIe": A100,
    "NVIDIA H100 80GB HBM3": HOPPER,
    "NVIDIA H200": HOPPER,
    "NVIDIA GH200 480GB": HOPPER,
    "NVIDIA H100 PCIe": 756.5e12,
    "NVIDIA H100 NVL": 835.5e12,
    "NVIDIA H200 NVL": 835.5e12,
    "NVIDIA B200": BLACKWELL,
    "NVIDIA B300": BLACKWELL,
    "NVIDIA GB200": 2500e12,
}

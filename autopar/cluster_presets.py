"""The figures of known hardware, and where each comes from.

A data sheet says what a part can do at most; a plan wants what programs reach.  So every preset is

    data sheet figure × share that is reached

with one share per kind of figure, the same for all vendors (the constants below).  They are assumptions, not
measurements: a plan depends on the *ratios* of compute, memory and links, which the data sheets give.  Data sheets
count both directions of a link; ``Link.bytes_per_second`` is one direction, so they are halved first.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace

from autopar.cluster import Cluster, DeviceKind, Link, Platform
from autopar.errors import ClusterError
from autopar.wiring import Wiring

TERA = 1e12
GIGA = 1e9
GIB = 1 << 30
GIGABIT = 1e9 / 8

MATMUL_REACHED = 0.75
"""Share of the peak FLOP/s that large matrix products reach."""
MEMORY_BANDWIDTH_REACHED = 0.9
"""Share of the peak memory bandwidth that elementwise operators reach."""
MEMORY_USABLE = 0.9
"""Share of the memory that a program may use; the rest is the driver, communication buffers and fragmentation."""
LINK_REACHED = 0.8
"""Share of one direction's bandwidth that a ring reaches on NVLink and on a network card."""
ICI_REACHED = 0.9
"""The same for the links between TPU chips, which carry no protocol of a network."""

NVLINK_LATENCY_SECONDS = 3.4e-6
RDMA_LATENCY_SECONDS = 14e-6
TCP_LATENCY_SECONDS = 50e-6
ICI_LATENCY_SECONDS = 1e-6
PCIE_LATENCY_SECONDS = 10e-6
"""Assumed: what starting a copy between a device and its host takes."""

_NCCL = "latency: NCCL src/graph/tuning.cc, hwLat, ring, protocol Simple"


def _device(
    name: str,
    platform: Platform,
    tera_flops: dict[str, float],
    memory: tuple[float, float],
    source: str,
    vector_tera_flops: float | None = None,
) -> DeviceKind:
    """A device from its data sheet: peak TFLOP/s per dtype, (GiB, GB/s) of memory, TFLOP/s of float32 beside matrix units."""
    gibibytes, gigabytes_per_second = memory
    return DeviceKind(
        name=name,
        platform=platform,
        flops_per_second={dtype: rate * TERA * MATMUL_REACHED for dtype, rate in tera_flops.items()},
        memory_bytes=int(gibibytes * GIB * MEMORY_USABLE),
        memory_bytes_per_second=gigabytes_per_second * GIGA * MEMORY_BANDWIDTH_REACHED,
        source=source,
        vector_flops_per_second=None if vector_tera_flops is None else vector_tera_flops * TERA,
    )


def _hiding(device: DeviceKind) -> DeviceKind:
    """A device for which XLA puts kernels beside collectives: seen of its compiler, and of no other's here.

    For A100s XLA:GPU has no estimate of what collectives take, and hid 5 to 19 % of them where for H100s it hid 43 to 49 %; the
    V100s are those of a paper whose XLA hid none; of TPUs nothing was read.
    """
    return replace(device, hides_collectives=True)


def _nvlink(gigabytes_per_second: float, source: str) -> Link:
    """NVLink from the data sheet's figure, which counts both directions."""
    rate = gigabytes_per_second / 2 * GIGA * LINK_REACHED
    return Link(NVLINK_LATENCY_SECONDS, rate, source=f"{source}; {_NCCL}, NVLink")


def _pcie(gigabytes_per_second: float, source: str) -> Link:
    """PCIe from the data sheet's figure, which counts both directions; two devices share a switch, and its lanes to the host."""
    rate = gigabytes_per_second / 2 * GIGA * LINK_REACHED
    return Link(
        PCIE_LATENCY_SECONDS, rate, 2, f"{source}; two devices behind a switch, as in NVIDIA's DGX; latency assumed"
    )


def _cards(gigabits_per_second: float, shared_by: int, latency_seconds: float, source: str) -> Link:
    """Network cards of the given rate each, every one shared by ``shared_by`` devices."""
    return Link(latency_seconds, gigabits_per_second * GIGABIT * LINK_REACHED, shared_by, source)


def _ici(gigabytes_per_second: float, links: int, source: str) -> Link:
    """A ring along one axis of the torus uses two of the chip's ``links``, one direction of each at a time."""
    both_directions_of_one_link = gigabytes_per_second / links * GIGA
    rate = 2 * both_directions_of_one_link / 2 * ICI_REACHED
    return Link(ICI_LATENCY_SECONDS, rate, source=source)


# The dtypes are those of JAX programs at default precision: XLA runs float32 products as TF32 on Ampere and later and
# as one bfloat16 pass on TPUs.  Volta has no bfloat16 units.
V100_16 = _device(
    "V100-SXM2-16GB",
    Platform.CUDA,
    {"float64": 7.8, "float32": 15.7, "bfloat16": 15.7, "float16": 125},
    (16, 900),
    "NVIDIA V100 data sheet, Specifications, V100 SXM2; bfloat16 runs as float32",
    15.7,
)
V100_32 = replace(
    V100_16,
    name="V100-SXM2-32GB",
    memory_bytes=int(32 * GIB * MEMORY_USABLE),
    source="NVIDIA V100 data sheet, Specifications, V100 SXM2; bfloat16 runs as float32",
)
_A100_TERA_FLOPS = {"float64": 19.5, "float32": 156, "bfloat16": 312, "float16": 312, "int8": 624}
_A100_SOURCE = "NVIDIA A100 data sheet, table of specifications, {} SXM, dense (no sparsity); float32 as TF32"
A100_40 = _device("A100-SXM4-40GB", Platform.CUDA, _A100_TERA_FLOPS, (40, 1555), _A100_SOURCE.format("A100 40GB"), 19.5)
A100_80 = _device("A100-SXM4-80GB", Platform.CUDA, _A100_TERA_FLOPS, (80, 2039), _A100_SOURCE.format("A100 80GB"), 19.5)
_HOPPER_TERA_FLOPS = {
    "float64": 67,
    "float32": 494.7,
    "bfloat16": 989.4,
    "float16": 989.4,
    "float8_e4m3fn": 1978.9,
    "float8_e5m2": 1978.9,
    "int8": 1978.9,
}
_HOPPER_SOURCE = (
    "NVIDIA {} data sheet, Technical Specifications, {} SXM, halved where given with sparsity; float32 as TF32"
)
H100_80 = _hiding(
    _device("H100-SXM5-80GB", Platform.CUDA, _HOPPER_TERA_FLOPS, (80, 3350), _HOPPER_SOURCE.format("H100", "H100"), 67)
)
H200_141 = _hiding(
    _device("H200-SXM-141GB", Platform.CUDA, _HOPPER_TERA_FLOPS, (141, 4800), _HOPPER_SOURCE.format("H200", "H200"), 67)
)
TPU_V5E = _device(
    "TPU v5e",
    Platform.TPU,
    {"bfloat16": 197, "float32": 197, "int8": 393},
    (16, 819),
    "Google Cloud TPU documentation, TPU v5e, System architecture; float32 as one bfloat16 pass",
)
TPU_V5P = _device(
    "TPU v5p",
    Platform.TPU,
    {"bfloat16": 459, "float32": 459},
    (95, 2765),
    "Google Cloud TPU documentation, TPU v5p, System architecture; float32 as one bfloat16 pass",
)

_V100_PCIE = _pcie(32, "NVIDIA V100 data sheet, Interconnect Bandwidth, PCIe 32 GB/s")
_A100_PCIE = _pcie(64, "NVIDIA A100 data sheet, Interconnect, PCIe Gen4 64 GB/s")
_H100_PCIE = _pcie(128, "NVIDIA H100 data sheet, Interconnect, PCIe Gen5 128 GB/s")
_H200_PCIE = _pcie(128, "NVIDIA H200 data sheet, Interconnect, PCIe Gen5 128 GB/s")


_CUBE_MESH = Wiring(
    (
        (0, 1, 1, 2, 2, 0, 0, 0),
        (1, 0, 2, 1, 0, 2, 0, 0),
        (1, 2, 0, 2, 0, 0, 1, 0),
        (2, 1, 2, 0, 0, 0, 0, 1),
        (2, 0, 0, 0, 0, 1, 1, 2),
        (0, 2, 0, 0, 1, 0, 2, 1),
        (0, 0, 1, 0, 1, 2, 0, 2),
        (0, 0, 0, 1, 2, 1, 2, 0),
    ),
    6,
    "hybrid cube mesh of eight V100s: NVIDIA DGX-1 with Tesla V100 System Architecture, NVLink network topology; "
    "the pairs with two wires: Li et al., Evaluating Modern GPU Interconnect, TPDS 2020, section 3",
)


@dataclass(frozen=True)
class Preset:
    """One host of known hardware, what ``jax.Device.device_kind`` calls its devices, and how far it scales."""

    cluster: Cluster
    device_kinds: tuple[str, ...] = ()
    max_hosts: int | None = None


def _preset(
    name: str,
    device: DeviceKind,
    links: tuple[Link, Link, Link],
    device_kinds: tuple[str, ...] = (),
    notes: str = "",
    wiring: Wiring | None = None,
) -> Preset:
    """A preset of eight devices a host with (local, network, host memory) links."""
    local, network, memory = links
    cluster = Cluster(name, 1, 8, device, local, network, notes=notes, host_memory_link=memory, local_wiring=wiring)
    return Preset(cluster, device_kinds)


def _tpu_preset(name: str, device: DeviceKind, ici: Link, device_kinds: tuple[str, ...], chips: int) -> Preset:
    """A slice of a TPU pod: hosts of four chips, one ICI torus within and between hosts."""
    notes = (
        "One slice. Within and between hosts the link is the ICI; the torus is not modelled beyond that each logical "
        "axis gets one of its axes, so a group laid over several torus axes is priced too high."
    )
    cluster = Cluster(name, 1, 4, device, ici, ici, notes=notes)
    return Preset(cluster, device_kinds, max_hosts=chips // 4)


PRESETS: tuple[Preset, ...] = (
    _preset(
        "p3.16xlarge",
        V100_16,
        (
            _nvlink(300, "NVIDIA V100 data sheet, Interconnect Bandwidth, 300 GB/s"),
            _cards(
                25,
                8,
                TCP_LATENCY_SECONDS,
                "Amazon EC2 P3 instances, p3.16xlarge, Network Bandwidth 25 Gbps; latency assumed for TCP",
            ),
            _V100_PCIE,
        ),
        ("Tesla V100-SXM2-16GB",),
        "A pair of devices has one or two of the six NVLinks of each, or none; a ring of eight has all.",
        _CUBE_MESH,
    ),
    _preset(
        "p3dn.24xlarge",
        V100_32,
        (
            _nvlink(300, "NVIDIA V100 data sheet, Interconnect Bandwidth, 300 GB/s"),
            _cards(
                100,
                8,
                RDMA_LATENCY_SECONDS,
                f"Amazon EC2 P3 instances, p3dn.24xlarge, Network Bandwidth 100 Gbps; {_NCCL}, network",
            ),
            _V100_PCIE,
        ),
        ("Tesla V100-SXM2-32GB",),
        "A pair of devices has one or two of the six NVLinks of each, or none; a ring of eight has all.",
        _CUBE_MESH,
    ),
    _preset(
        "p4d.24xlarge",
        A100_40,
        (
            _nvlink(600, "NVIDIA A100 data sheet, Interconnect, NVLink 600 GB/s, through NVSwitch"),
            _cards(
                100,
                2,
                RDMA_LATENCY_SECONDS,
                f"Amazon EC2 P4 instances, p4d.24xlarge, 400 Gbps EFA as four cards; {_NCCL}, network",
            ),
            _A100_PCIE,
        ),
        ("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB"),
    ),
    _preset(
        "p4de.24xlarge",
        A100_80,
        (
            _nvlink(600, "NVIDIA A100 data sheet, Interconnect, NVLink 600 GB/s, through NVSwitch"),
            _cards(
                100,
                2,
                RDMA_LATENCY_SECONDS,
                f"Amazon EC2 P4 instances, p4de.24xlarge, 400 Gbps EFA as four cards; {_NCCL}, network",
            ),
            _A100_PCIE,
        ),
        ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
    ),
    _preset(
        "p5.48xlarge",
        H100_80,
        (
            _nvlink(900, "NVIDIA H100 data sheet, Interconnect, NVLink 900 GB/s, through NVSwitch"),
            _cards(
                400,
                1,
                RDMA_LATENCY_SECONDS,
                f"Amazon EC2 P5 instances, p5.48xlarge, 3200 Gbps EFA, an eighth for each device; {_NCCL}, network",
            ),
            _H100_PCIE,
        ),
        ("NVIDIA H100 80GB HBM3",),
    ),
    _preset(
        "h200",
        H200_141,
        (
            _nvlink(900, "NVIDIA H200 data sheet, Interconnect, NVLink 900 GB/s, through NVSwitch"),
            _cards(
                400,
                1,
                RDMA_LATENCY_SECONDS,
                f"NVIDIA DGX H200 data sheet, Networking, eight ConnectX-7 of 400 Gb/s for compute; {_NCCL}, network",
            ),
            _H200_PCIE,
        ),
        ("NVIDIA H200",),
    ),
    _tpu_preset(
        "tpu-v5e",
        TPU_V5E,
        _ici(
            400,
            4,
            "Google Cloud TPU documentation, TPU v5e, bidirectional ICI 400 GBps per chip, 2D torus; latency assumed",
        ),
        ("TPU v5 lite", "TPU v5e"),
        256,
    ),
    _tpu_preset(
        "tpu-v5p",
        TPU_V5P,
        _ici(
            1200,
            6,
            "Google Cloud TPU documentation, TPU v5p, bidirectional ICI 1200 GBps per chip, 3D torus; latency assumed",
        ),
        ("TPU v5", "TPU v5p"),
        6144,
    ),
)


def preset_cluster(name: str, hosts: int) -> Cluster:
    """The preset with that many hosts; raises ``ClusterError`` for an unknown name or too many hosts."""
    found = {preset.cluster.name: preset for preset in PRESETS}
    if name not in found:
        near = difflib.get_close_matches(str(name).lower(), found, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ClusterError(f"no preset {name!r}: {hint}There are {', '.join(found)}; others go into Cluster.from_file")
    preset = found[name]
    if preset.max_hosts is not None and hosts > preset.max_hosts:
        raise ClusterError(
            f"preset {name!r} is one slice of at most {preset.max_hosts} hosts, not {hosts}; for several slices "
            "describe the data center network: Cluster.preset(…).replace(hosts=…, devices_per_host=…, network_link=…)"
        )
    return preset.cluster.replace(hosts=hosts)

"""Cluster descriptions: validation, derived figures, mesh shapes, presets, local devices, files."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
from pathlib import Path
from typing import Any

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar import cluster_here
from autopar.cluster import Cluster, DeviceKind, Link, Mesh, Platform
from autopar.cluster_here import machine_memory_bytes
from autopar.cluster_presets import PRESETS
from autopar.cores import usable_cores
from autopar.errors import ClusterError
from autopar.ray_hosts import RayHosts, RayNode

DEVICE = DeviceKind("toy", Platform.CUDA, {"float32": 1e12, "bfloat16": 4e12}, 1 << 30, 1e11, "made up")
TOY = Cluster("toy", 2, 4, DEVICE, Link(1e-6, 1e11), Link(1e-5, 1e9, 4, "card"), 2, "notes")
LINK = {"latency_seconds": 1e-5, "bytes_per_second": 1e9, "shared_by": 4}
NAMES = [preset.cluster.name for preset in PRESETS]


# -------------------------------------------------------------------------------------------- validation and figures


@pytest.mark.parametrize("bad", [0, -1, 1.0, True, "2", None])
@pytest.mark.parametrize("field", ["hosts", "devices_per_host", "compute_shared_by"])
def test_counts_are_checked(field: str, bad: object) -> None:
    with pytest.raises(ClusterError, match=f"{field} of cluster 'toy' is .* integer of 1 or more"):
        TOY.replace(**{field: bad})


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf, "1", None, True])
def test_rates_are_checked(bad: Any) -> None:
    with pytest.raises(ClusterError, match="bytes_per_second of a link"):
        Link(0.0, bad)
    with pytest.raises(ClusterError, match="memory_bytes_per_second of device 'toy'"):
        dataclasses.replace(DEVICE, memory_bytes_per_second=bad)
    with pytest.raises(ClusterError, match="flops_per_second\\['float32'\\] of device 'toy'"):
        dataclasses.replace(DEVICE, flops_per_second={"float32": bad})


@pytest.mark.parametrize("bad", [-1e-9, math.nan, math.inf, "0"])
def test_latency_is_checked(bad: Any) -> None:
    with pytest.raises(ClusterError, match="latency_seconds of a link"):
        Link(bad, 1.0)
    assert Link(0, 1.0).latency_seconds == 0


def test_other_fields_are_checked() -> None:
    with pytest.raises(ClusterError, match="shared_by of a link"):
        Link(0.0, 1.0, 0)
    with pytest.raises(ClusterError, match="at least one dtype"):
        dataclasses.replace(DEVICE, flops_per_second={})
    with pytest.raises(ClusterError, match="memory_bytes of device"):
        dataclasses.replace(DEVICE, memory_bytes=16e9)
    with pytest.raises(ClusterError, match="platform of device 'toy' is 'cuda'"):
        dataclasses.replace(DEVICE, platform="cuda")
    with pytest.raises(ClusterError, match=r"network_link of cluster 'toy' .* give a Link"):
        TOY.replace(network_link=1e9)


@pytest.mark.parametrize(
    ("links", "message"),
    [
        ([((0, 1), Link(0.0, 1.0, 4))], r"host_links of cluster 'toy' is \[.*; give links by pairs of hosts"),
        ({0: Link(0.0, 1.0, 4)}, r"names 0; give pairs of two hosts, of 0 to 1"),
        ({(0, 0): Link(0.0, 1.0, 4)}, r"names \(0, 0\)"),
        ({(0, 2): Link(0.0, 1.0, 4)}, r"names \(0, 2\)"),
        ({(0, 1): 1e9}, r"is 1000000000.0 for \(0, 1\); give a Link"),
        ({(0, 1): Link(0.0, 1.0)}, r"shared_by=1 for \(0, 1\), and network_link 4"),
        ({(0, 1): Link(0.0, 1.0, 4), (1, 0): Link(0.0, 2.0, 4)}, r"names \(1, 0\) and \(0, 1\); a link goes both ways"),
    ],
)
def test_links_between_hosts_are_checked(links: Any, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        TOY.replace(host_links=links)


def test_links_between_hosts(tmp_path: Path) -> None:
    slow, slower = Link(1e-4, 1e8, 4, "long cable"), Link(1e-3, 1e7, 4)
    cluster = TOY.replace(hosts=4, host_links={(2, 0): slow, (1, 2): slower, (0, 1): TOY.network_link})
    assert list(cluster.host_links) == [(0, 2), (1, 2)]  # what is network_link itself is not kept
    assert cluster.link_between(2, 0) == cluster.link_between(0, 2) == slow
    assert cluster.link_between(0, 3) == TOY.network_link
    assert cluster.slowest_link((0, 1, 3)) == TOY.network_link and cluster.slowest_link((0, 1, 2)) == slower
    assert cluster.slowest_link((2,)) == TOY.network_link
    assert cluster.card_bytes_per_second(2) == 1e9  # of the link to host 3
    assert cluster.of_hosts((0, 1, 2)).card_bytes_per_second(2) == 1e8
    turned = cluster.of_hosts((2, 3, 0, 1))
    assert dict(turned.host_links) == {(0, 2): slow, (0, 3): slower}
    assert turned.of_hosts((2, 3, 0, 1)) == cluster
    assert dict(cluster.part(range(4, 12)).host_links) == {(0, 1): slower}
    assert cluster.part((0, 1, 8, 9)).link_between(0, 1) == slow
    cluster.to_file(tmp_path / "cluster.json")
    assert Cluster.from_file(tmp_path / "cluster.json") == cluster
    assert hash(pickle.loads(pickle.dumps(cluster))) == hash(cluster)


FAST = dataclasses.replace(DEVICE, name="fast", flops_per_second={"float32": 3e12}, memory_bytes=1 << 29)


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        ([FAST], r"host_devices of cluster 'toy' is \[.*; give kinds by host"),
        ({2: FAST}, r"names host 2; give numbers of 0 to 1"),
        ({0: "fast"}, r"is 'fast' for host 0; give a DeviceKind"),
        ({0: dataclasses.replace(FAST, platform=Platform.TPU)}, r"host 0 has devices of tpu, and device is of cuda"),
    ],
)
def test_kinds_of_hosts_are_checked(kinds: Any, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        TOY.replace(host_devices=kinds)


def test_two_kinds_of_devices(tmp_path: Path) -> None:
    cluster = TOY.replace(hosts=3, host_devices={2: FAST, 1: DEVICE})
    assert dict(cluster.host_devices) == {2: FAST} and cluster.kinds == (DEVICE, FAST)
    assert [cluster.kind_of(host) for host in range(3)] == [DEVICE, DEVICE, FAST]
    # Of each figure the least: all devices of a program wait for each other.
    assert cluster.per_device_flops_per_second("float32") == 5e11
    assert cluster.per_device_flops_per_second("bfloat16") == 3e12 / 2
    assert cluster.per_device_memory_bytes == 1 << 28
    assert cluster.part(range(8, 12)) == TOY.replace(hosts=1, device=FAST)
    assert cluster.part((0, 1)).device == DEVICE and not cluster.part((0, 1)).host_devices
    assert [cluster.of_hosts((2, 0, 1)).kind_of(host) for host in range(3)] == [FAST, DEVICE, DEVICE]
    assert TOY.replace(host_devices={0: FAST, 1: FAST}) == TOY.replace(device=FAST)
    small = cluster.replace(memory_bytes=1000)
    assert {kind.memory_bytes for kind in small.kinds} == {1000}
    cluster.to_file(tmp_path / "cluster.json")
    assert Cluster.from_file(tmp_path / "cluster.json") == cluster


def test_nodes_of_a_ray_cluster_with_gpus_of_two_kinds() -> None:
    nodes = tuple(RayNode(str(k), f"10.0.0.{k}", 96.0, 8, name) for k, name in enumerate(("A100", "V100", "A100")))
    cluster = cluster_here.ray_cluster(RayHosts("10.0.0.1:6379", nodes, 8))
    assert [cluster.kind_of(host).name.split("-")[0] for host in range(3)] == ["A100", "V100", "A100"]
    assert cluster.network_link.shared_by == 8 and cluster.local_link == Cluster.preset("p3dn.24xlarge").local_link
    alike = cluster_here.ray_cluster(RayHosts("10.0.0.1:6379", nodes[::2], 8))
    assert cluster.runs_on is not None
    assert cluster.runs_on.numbers_of(RayHosts("10.0.0.1:6379", nodes[1:], 8)) == (1, 2)
    assert not alike.host_devices and alike.device == cluster.kind_of(0)


def test_files_of_the_versions_before_are_read(tmp_path: Path) -> None:
    path, content = stored(tmp_path)
    del content["cluster"]["device"]["vector_flops_per_second"]
    path.write_text(json.dumps(content | {"version": 4}))
    assert Cluster.from_file(path) == TOY
    del content["cluster"]["device"]["hides_collectives"]
    path.write_text(json.dumps(content | {"version": 3}))
    assert Cluster.from_file(path) == TOY
    del content["cluster"]["host_memory_link"]
    path.write_text(json.dumps(content | {"version": 2}))
    assert Cluster.from_file(path) == TOY
    del content["cluster"]["host_links"], content["cluster"]["host_devices"]
    path.write_text(json.dumps(content | {"version": 1}))
    assert Cluster.from_file(path) == TOY


def test_the_link_to_the_memory_of_the_host(tmp_path: Path) -> None:
    cluster = TOY.replace(host_memory_link=Link(1e-5, 1.6e10, shared_by=2, source="PCIe"))
    cluster.to_file(tmp_path / "cluster.json")
    assert Cluster.from_file(tmp_path / "cluster.json") == cluster != TOY
    assert cluster.part((0, 1)).host_memory_link == cluster.host_memory_link
    with pytest.raises(ClusterError, match="host_memory_link of cluster 'toy' is 'PCIe'; give a Link, or None"):
        TOY.replace(host_memory_link="PCIe")
    generations = [Cluster.preset(name).host_memory_link for name in ("p3.16xlarge", "p4d.24xlarge", "p5.48xlarge")]
    rates = [link.bytes_per_second for link in generations if link is not None]
    assert rates == [1.28e10, 2.56e10, 5.12e10]  # 0.8 of one direction of Gen3, Gen4, Gen5, sixteen lanes
    assert Cluster.preset("tpu-v5e").host_memory_link is None


def test_per_device_figures_are_shared() -> None:
    assert TOY.num_devices == 8
    assert TOY.per_device_flops_per_second("bfloat16") == 2e12
    assert TOY.per_device_flops_per_second("int32") == 5e11
    assert TOY.per_device_memory_bytes == 1 << 29
    assert TOY.per_device_memory_bytes_per_second == 5e10


def test_replace() -> None:
    slow = Link(1.0, 1.0)
    other = TOY.replace(hosts=3, network_link=slow, memory_bytes=123)
    assert (other.hosts, other.network_link, other.device.memory_bytes) == (3, slow, 123)
    assert other.replace(hosts=2, network_link=TOY.network_link, memory_bytes=1 << 30) == TOY
    with pytest.raises(ClusterError, match="no field host; there are name, hosts"):
        TOY.replace(host=3)


def test_clusters_are_keys() -> None:
    """Equal clusters hash alike, also after a pickle; the caller's mapping is copied."""
    flops = {"bfloat16": 4e12, "float32": 1e12}
    twin = TOY.replace(device=dataclasses.replace(DEVICE, flops_per_second=flops), notes="other notes")
    assert twin == TOY
    assert hash(twin) == hash(TOY)
    assert {TOY: 1}[pickle.loads(pickle.dumps(twin))] == 1
    assert hash(twin.device) == hash(TOY.device)
    flops["float32"] = 1.0
    assert twin == TOY
    assert twin.device.flops_per_second == {"float32": 1e12, "bfloat16": 4e12}
    assert TOY.replace(compute_shared_by=1) != TOY


# --------------------------------------------------------------------------------------------------------------- meshes


def test_mesh() -> None:
    mesh = Mesh(("a", "b", "c"), (2, 3, 4))
    assert (mesh.size, mesh.axis_size("a", "c"), mesh.axis_size(), mesh.stride("a"), mesh.stride("c")) == (
        24,
        8,
        1,
        12,
        1,
    )
    assert str(mesh) == "a=2 × b=3 × c=4"
    with pytest.raises(ClusterError, match="no axis 'z' in mesh a=2"):
        mesh.axis_size("z")


@pytest.mark.parametrize(("names", "sizes"), [(("a",), (2, 2)), (("a", "a"), (2, 2)), (("a",), (0,)), (("a",), (2.0,))])
def test_bad_meshes_are_refused(names: Any, sizes: Any) -> None:
    with pytest.raises(ClusterError, match="mesh ax"):
        Mesh(names, sizes)


def test_logical_shapes_of_eight_and_twelve() -> None:
    assert [mesh.axis_sizes for mesh in TOY.logical_mesh_shapes()] == [(8,), (2, 4), (4, 2), (2, 2, 2)]
    assert [mesh.axis_names for mesh in TOY.logical_mesh_shapes()][-1] == ("data", "model", "extra")
    twelve = TOY.replace(hosts=3)
    assert [mesh.axis_sizes for mesh in twelve.logical_mesh_shapes(2)] == [(12,), (2, 6), (3, 4), (4, 3), (6, 2)]
    assert {(2, 2, 3), (2, 3, 2), (3, 2, 2)} == {
        mesh.axis_sizes for mesh in twelve.logical_mesh_shapes() if len(mesh.axis_sizes) == 3
    }


def test_logical_shapes_at_the_edges() -> None:
    assert TOY.replace(hosts=1, devices_per_host=1).logical_mesh_shapes() == [Mesh(("data",), (1,))]
    assert [mesh.axis_sizes for mesh in TOY.replace(hosts=7, devices_per_host=1).logical_mesh_shapes()] == [(7,)]
    for bad in (0, 4):
        with pytest.raises(ClusterError, match="max_axes"):
            TOY.logical_mesh_shapes(bad)


@settings(derandomize=True, deadline=None)
@given(st.integers(2, 200), st.integers(1, 3))
def test_logical_shapes_are_all_factorizations(devices: int, max_axes: int) -> None:
    """Counted another way: by trying every tuple of divisors."""
    shapes = [mesh.axis_sizes for mesh in TOY.replace(hosts=1, devices_per_host=devices).logical_mesh_shapes(max_axes)]
    divisors = [size for size in range(2, devices + 1) if devices % size == 0]
    expected = {(devices,)}
    if max_axes >= 2:
        expected |= {(a, devices // a) for a in divisors if a < devices}
    if max_axes >= 3:
        expected |= {
            (a, b, devices // a // b) for a in divisors for b in divisors if devices % (a * b) == 0 and a * b < devices
        }
    assert len(shapes) == len(set(shapes))
    assert set(shapes) == expected


# -------------------------------------------------------------------------------------------------------------- presets


@pytest.mark.parametrize("name", NAMES)
def test_presets_are_sourced_and_ordered(name: str) -> None:
    cluster = Cluster.preset(name, hosts=2)
    assert (cluster.name, cluster.hosts, cluster.compute_shared_by) == (name, 2, 1)
    assert all(source for source in (cluster.device.source, cluster.local_link.source, cluster.network_link.source))
    rates = cluster.device.flops_per_second
    assert rates["bfloat16"] >= rates["float32"]
    assert (
        cluster.device.memory_bytes_per_second
        > cluster.local_link.bytes_per_second
        >= cluster.network_link.bytes_per_second
    )
    assert cluster.local_link.latency_seconds <= cluster.network_link.latency_seconds


@pytest.mark.parametrize(
    ("name", "dtype", "peak_flops", "gibibytes", "memory_rate", "link_rate", "host_network_rate"),
    [
        ("p3.16xlarge", "float16", 125e12, 16, 900e9, 150e9, 25e9 / 8),
        ("p4d.24xlarge", "bfloat16", 312e12, 40, 1555e9, 300e9, 400e9 / 8),
        ("p5.48xlarge", "bfloat16", 989e12, 80, 3350e9, 450e9, 3200e9 / 8),
        ("h200", "bfloat16", 989e12, 141, 4800e9, 450e9, 3200e9 / 8),
        ("tpu-v5e", "bfloat16", 197e12, 16, 819e9, 100e9, 400e9),
        ("tpu-v5p", "bfloat16", 459e12, 95, 2765e9, 200e9, 800e9),
    ],
)
def test_presets_stay_near_their_data_sheets(
    name: str,
    dtype: str,
    peak_flops: float,
    gibibytes: int,
    memory_rate: float,
    link_rate: float,
    host_network_rate: float,
) -> None:
    """Reached figures are 70 to 100 % of the data sheet's, in one direction of a link, per host for the network."""
    cluster = Cluster.preset(name)
    cards = cluster.devices_per_host / cluster.network_link.shared_by
    for reached, peak in (
        (cluster.device.flops_per_second[dtype], peak_flops),
        (cluster.device.memory_bytes, gibibytes * 2**30),
        (cluster.device.memory_bytes_per_second, memory_rate),
        (cluster.local_link.bytes_per_second / cluster.local_link.shared_by, link_rate),
        (cluster.network_link.bytes_per_second * cards, host_network_rate),
    ):
        assert 0.7 <= reached / peak <= 1.0


def test_unknown_preset_suggests() -> None:
    with pytest.raises(ClusterError, match=r"no preset 'p4d\.24xlage': did you mean 'p4d\.24xlarge'\? .*tpu-v5p"):
        Cluster.preset("p4d.24xlage")
    with pytest.raises(ClusterError, match="did you mean 'h200'"):
        Cluster.preset("H200")
    with pytest.raises(ClusterError, match=r"no preset 'cray': There are p3\.16xlarge"):
        Cluster.preset("cray")


def test_too_many_or_too_few_hosts() -> None:
    assert Cluster.preset("tpu-v5e", hosts=64).num_devices == 256
    with pytest.raises(ClusterError, match="at most 64 hosts, not 65"):
        Cluster.preset("tpu-v5e", hosts=65)
    with pytest.raises(ClusterError, match="hosts of cluster"):
        Cluster.preset("h200", hosts=0)


# ---------------------------------------------------------------------------------------------------------------- local


@dataclasses.dataclass
class FakeDevice:
    id: int
    process_index: int = 0
    platform: str = "gpu"
    device_kind: str = "NVIDIA H200"
    bytes_limit: int | None = None

    def memory_stats(self) -> dict[str, int] | None:
        if self.process_index != 0:
            raise RuntimeError("not addressable")
        return None if self.bytes_limit is None else {"bytes_limit": self.bytes_limit}


def test_local_cpu_shares_the_machine() -> None:
    cluster = Cluster.local()
    devices = len(jax.devices())
    assert (cluster.hosts, cluster.devices_per_host, cluster.compute_shared_by) == (1, devices, devices)
    assert cluster.local_link.shared_by == devices
    assert cluster.device.platform is Platform.CPU
    assert cluster.device.memory_bytes == machine_memory_bytes()
    assert cluster.per_device_memory_bytes == machine_memory_bytes() // devices
    rate = cluster_here.CPU_FLOPS_PER_SECOND_PER_CORE["float32"] * usable_cores()
    assert cluster.per_device_flops_per_second("float32") == pytest.approx(rate / devices)
    assert Cluster.local(jax.devices()[:1]).compute_shared_by == 1


def test_memory_of_a_container(monkeypatch: pytest.MonkeyPatch) -> None:
    physical = machine_memory_bytes()
    for text, expected in (("max\n", physical), ("123456\n", 123456), (f"{1 << 62}\n", physical)):
        monkeypatch.setattr(Path, "read_text", lambda self, text=text: text)
        assert machine_memory_bytes() == expected


def test_local_accelerators_match_a_preset() -> None:
    cluster = Cluster.local([FakeDevice(i, i // 4, bytes_limit=100 - i) for i in range(8)])
    preset = Cluster.preset("h200")
    assert (cluster.hosts, cluster.devices_per_host, cluster.compute_shared_by) == (2, 4, 1)
    assert (cluster.local_link, cluster.network_link) == (preset.local_link, preset.network_link)
    assert cluster.device == dataclasses.replace(preset.device, memory_bytes=97)
    unlimited = Cluster.local([FakeDevice(0, platform="tpu", device_kind="TPU v5 lite")])
    assert unlimited.device == Cluster.preset("tpu-v5e").device


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ([], "no devices given"),
        (4, r"devices=4\): give a sequence of jax.Devices, say jax.devices\(\)\[:4\]"),
        ([0, 1], r"devices=\[0, 1\]\): give a sequence"),
        ([FakeDevice(0), FakeDevice(1, device_kind="NVIDIA H100 80GB HBM3")], "several kinds"),
        ([FakeDevice(0), FakeDevice(1), FakeDevice(2, 1)], r"\[1, 2\] of the devices"),
        ([FakeDevice(0), FakeDevice(1, 1), FakeDevice(2), FakeDevice(3, 1)], "alternate"),
        ([FakeDevice(0, device_kind="Abacus")], "no figures for devices of kind 'Abacus'.*Cluster.from_file"),
    ],
)
def test_local_refuses(devices: Any, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        Cluster.local(devices)


def test_device_kinds_are_named_once() -> None:
    kinds = [kind.lower() for preset in PRESETS for kind in preset.device_kinds]
    assert len(set(kinds)) == len(kinds)
    assert len(set(NAMES)) == len(NAMES)


# ---------------------------------------------------------------------------------------------------------------- files


def stored(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    path = tmp_path / "cluster.json"
    TOY.to_file(path)
    return path, json.loads(path.read_text())


def refused(path: Path, content: object, message: str) -> None:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ClusterError, match=message) as caught:
        Cluster.from_file(path)
    assert "cluster.json" in str(caught.value)


@pytest.mark.parametrize("cluster", [TOY, *(preset.cluster for preset in PRESETS)], ids=lambda cluster: cluster.name)
def test_round_trip(cluster: Cluster, tmp_path: Path) -> None:
    cluster.to_file(tmp_path / "cluster.json")
    back = Cluster.from_file(str(tmp_path / "cluster.json"))
    assert back == cluster
    assert back.notes == cluster.notes
    assert hash(back) == hash(cluster)


numbers = st.floats(min_value=1e-300, max_value=1e300)
links = st.builds(Link, st.floats(0, 1e300), numbers, st.integers(1, 1 << 40), st.text())
kinds = st.builds(
    DeviceKind,
    st.text(),
    st.sampled_from(Platform),
    st.dictionaries(st.text(), numbers, min_size=1),
    st.integers(1, 1 << 62),
    numbers,
    st.text(),
    st.booleans(),
)
counts = st.integers(1, 1 << 40)


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.builds(Cluster, st.text(), counts, counts, kinds, links, links, counts, st.text()))
def test_round_trip_is_exact(tmp_path_factory: pytest.TempPathFactory, cluster: Cluster) -> None:
    path = tmp_path_factory.getbasetemp() / "cluster.json"
    cluster.to_file(path)
    assert Cluster.from_file(path) == cluster


def test_optional_fields_may_be_left_out(tmp_path: Path) -> None:
    path, content = stored(tmp_path)
    for field in ("compute_shared_by", "notes"):
        del content["cluster"][field]
    del content["cluster"]["local_link"]["shared_by"]
    path.write_text(json.dumps(content))
    assert Cluster.from_file(path) == TOY.replace(compute_shared_by=1)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    path, _ = stored(tmp_path)
    text = path.read_text().rstrip()
    for length in range(0, len(text), 7):
        refused(path, text[:length], "cluster.json")
    path.write_bytes(text.encode()[:-30] + b"\xff\xfe")
    with pytest.raises(ClusterError, match="not complete JSON"):
        Cluster.from_file(path)


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_none(literal: str, tmp_path: Path) -> None:
    path, _ = stored(tmp_path)
    text = path.read_text()
    assert text.count("1000000000.0") == 1
    refused(
        path, text.replace("1000000000.0", literal), r"NaN and infinity have no place|network_link\.bytes_per_second"
    )


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("cluster", "host"), 2, r"unknown field `host`.*\$\.cluster"),
        (("cluster", "local_link", "speed"), 2, r"unknown field `speed`.*\$\.cluster\.local_link"),
        (("cluster", "device", "watts"), 2, r"unknown field `watts`.*\$\.cluster\.device"),
        (("comment",), "hi", "unknown field `comment`"),
        (("cluster", "hosts"), "2", r"Expected `int`, got `str` - at `\$\.cluster\.hosts`"),
        (("cluster", "hosts"), True, r"\$\.cluster\.hosts"),
        (("cluster", "hosts"), 0, r"\$\.cluster: hosts of cluster 'toy' is 0"),
        (
            ("cluster", "network_link", "bytes_per_second"),
            -1.0,
            r"\$\.cluster\.network_link: bytes_per_second of a link is -1\.0",
        ),
        (("cluster", "local_link", "latency_seconds"), None, r"\$\.cluster\.local_link\.latency_seconds"),
        (("cluster", "device", "platform"), "abacus", r"'abacus' - at `\$\.cluster\.device\.platform`"),
        (("cluster", "device", "flops_per_second"), {}, r"\$\.cluster\.device: .*at least one dtype"),
        (("cluster", "device", "memory_bytes"), 0, r"\$\.cluster\.device: memory_bytes"),
        (("format",), "alpa", r"\$\.format is 'alpa'.*not a cluster file"),
        (("version",), 6, r"\$\.version is 6, .*reads 1 to 5"),
        (
            ("cluster", "host_memory_link"),
            LINK | {"shared_by": 0},
            r"\$\.cluster\.host_memory_link: shared_by of a link is 0",
        ),
        (("cluster", "host_links"), [{"hosts": [0], "link": None}], r"\$\.cluster\.host_links\[0\]\.hosts"),
        (
            ("cluster", "host_links"),
            [{"hosts": [0, 2], "link": LINK}],
            r"\$\.cluster: host_links of cluster 'toy' names \(0, 2\)",
        ),
        (
            ("cluster", "host_links"),
            [{"hosts": [0, 1], "link": LINK}] * 2,
            r"host_links\[1\]: the hosts \[0, 1\] stand there twice",
        ),
        (("cluster", "host_devices"), [{"host": 0}], r"missing required field `device`.*host_devices\[0\]"),
        (
            ("cluster", "host_links"),
            [{"hosts": [0, 1], "link": LINK | {"bytes_per_second": 0.0}}],
            r"\$\.cluster\.host_links\[0\]\.link: bytes_per_second",
        ),
    ],
)
def test_fields_are_checked(place: tuple[str, ...], value: object, message: str, tmp_path: Path) -> None:
    path, content = stored(tmp_path)
    inner = content
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    refused(path, content, message)


@pytest.mark.parametrize(
    "place",
    [("format",), ("version",), ("cluster",), ("cluster", "hosts"), ("cluster", "network_link", "bytes_per_second")],
)
def test_required_fields(place: tuple[str, ...], tmp_path: Path) -> None:
    path, content = stored(tmp_path)
    inner = content
    for key in place[:-1]:
        inner = inner[key]
    del inner[place[-1]]
    refused(path, content, f"missing required field `{place[-1]}`")


def test_paths_that_do_not_work(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"cannot read cluster file .*missing\.json"):
        Cluster.from_file(tmp_path / "missing.json")
    with pytest.raises(ClusterError, match="cannot write cluster file"):
        TOY.to_file(tmp_path / "no" / "directory.json")


def test_the_file_in_the_documentation_is_one(tmp_path: Path) -> None:
    page = (Path(__file__).parent.parent / "docs" / "reference" / "cluster.md").read_text()
    (tmp_path / "lab.json").write_text(page.split("```json\n")[1].split("```")[0])
    assert Cluster.from_file(tmp_path / "lab.json").num_devices == 8
    assert all(f"`{name}`" in page for name in NAMES)

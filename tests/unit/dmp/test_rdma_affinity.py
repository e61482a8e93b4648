from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tierkv.dmp.transport.verbs.rails import (
    NumaPlace,
    device_place,
    distance,
    memory_place,
    pci_place,
)


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """Two root complexes; a GPU and a device share a switch on the first."""

    def device(path: str, numa: int) -> Path:
        folder = tmp_path / "devices" / path
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{numa}\n")
        return folder

    near = device("pci0000:00/0000:00:01.0/0000:02:00.0", 0)
    gpu = device("pci0000:00/0000:00:01.0/0000:03:00.0", 0)
    side = device("pci0000:00/0000:00:05.0/0000:07:00.0", 0)
    far = device("pci0000:80/0000:80:01.0/0000:82:00.0", 1)
    (tmp_path / "bus/pci/devices").mkdir(parents=True)
    (tmp_path / "bus/pci/devices/0000:03:00.0").symlink_to(gpu)
    for name, target in (("mlx5_0", near), ("mlx5_1", side), ("mlx5_2", far)):
        (tmp_path / "class/infiniband" / name).mkdir(parents=True)
        (tmp_path / "class/infiniband" / name / "device").symlink_to(target)
    (tmp_path / "class/infiniband/rxe0").mkdir()
    return tmp_path


def test_the_device_on_the_gpus_switch_is_nearest(sysfs: Path) -> None:
    gpu = pci_place("0000:03:00.0", sysfs)
    far = [distance(device_place(f"mlx5_{i}", sysfs), gpu) for i in range(3)]
    assert far == sorted(set(far)) and far[0] == 2


def test_memory_prefers_devices_of_its_node(sysfs: Path) -> None:
    places = [device_place(f"mlx5_{i}", sysfs) for i in range(3)]
    assert [distance(place, NumaPlace(0)) for place in places] == [0, 0, 1]
    assert [distance(place, NumaPlace(1)) for place in places] == [1, 1, 0]


def test_what_is_unknown_is_as_near_as_anything(sysfs: Path) -> None:
    assert device_place("rxe0", sysfs) == NumaPlace()
    assert pci_place("0000:ff:00.0", sysfs) == NumaPlace()
    assert distance(NumaPlace(), NumaPlace(1)) == 0
    assert distance(device_place("mlx5_2", sysfs), NumaPlace()) == 0


def test_memory_has_no_place_on_a_machine_with_one_node(tmp_path: Path) -> None:
    (tmp_path / "devices/system/node/node0").mkdir(parents=True)
    assert memory_place(0, tmp_path) == NumaPlace()


def test_the_kernel_tells_the_node_of_a_page(tmp_path: Path) -> None:
    for i in range(2):
        (tmp_path / f"devices/system/node/node{i}").mkdir(parents=True)
    page = np.ones(4096, np.uint8)
    address = page.__array_interface__["data"][0]
    assert memory_place(address, tmp_path).numa_node in (0, None, *range(1, 64))
    assert memory_place(1, tmp_path) == NumaPlace()

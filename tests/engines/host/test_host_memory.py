"""Tensors in huge pages where the kernel gives them: the KV store from the start, weights once
they are there.
"""

from __future__ import annotations

import pytest
import torch
from memory_mappings import mapping_field

from worker.engines.embedded.host import memory
from worker.engines.embedded.host.memory import _resident_mappings, collapse_resident, like, zeros
from worker.engines.embedded.transfer.layout import merged
from worker.models.huge_pages import HUGE_PAGE_BYTES

CPU = torch.device("cpu")

SMAPS = """\
00400000-00c00000 rw-p 00000000 00:00 0                                  [heap]
Size:               8192 kB
Rss:                8000 kB
VmFlags: rd wr mr mw me ac
7f0000000000-7f0001000000 rw-p 00000000 00:00 0
Size:              16384 kB
Rss:               16384 kB
7f0002000000-7f0003000000 rw-p 00000000 00:00 0
Size:              16384 kB
Rss:                 128 kB
7f0004000000-7f0005000000 r--p 00000000 00:00 0
Rss:               16384 kB
7f0006000000-7f0007000000 rw-p 00000000 fe:00 1234                       /usr/lib/libfile.so
Rss:               16384 kB
7f0008000000-7f0008010000 rw-p 00000000 00:00 0
Rss:                  64 kB
7ffd00000000-7ffd01000000 rw-p 00000000 00:00 0                          [stack]
Rss:               16384 kB
"""


def advised(address: int) -> bool:
    """Whether the kernel was asked for huge pages at `address`."""
    return "hg" in mapping_field(address, "VmFlags").split()


@pytest.mark.parametrize("shape", [(64, 2, 64, 64), (3, 5, 7, 1001)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_ones_lie_in_one_block_that_asks_for_huge_pages(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensors = zeros(12, shape, dtype, CPU)
    assert len(tensors) == 12
    for number, tensor in enumerate(tensors):
        assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype)
        assert tensor.is_contiguous()
        assert not tensor.any()
        assert tensor.data_ptr() % 64 == 0
        tensor.fill_(number + 1)
    assert [tensor.unique().tolist() for tensor in tensors] == [[number + 1.0] for number in range(12)]
    assert tensors[0].data_ptr() % HUGE_PAGE_BYTES == 0
    ends = [tensor.data_ptr() + tensor.nbytes for tensor in tensors[:-1]]
    assert all(0 <= tensor.data_ptr() - end < 64 for end, tensor in zip(ends, tensors[1:], strict=True))
    assert advised(tensors[0].data_ptr())


def test_tensors_of_many_shapes_share_such_a_block() -> None:
    kinds = [((3, 5), torch.int8), ((700, 1001), torch.float32), ((1,), torch.float16), ((9, 2, 11), torch.bfloat16)]
    tensors = like(torch.ones(shape, dtype=dtype) for shape, dtype in kinds)
    for number, tensor in enumerate(tensors):
        assert (tuple(tensor.shape), tensor.dtype) == kinds[number]
        assert tensor.is_contiguous()
        assert not tensor.any()
        assert tensor.data_ptr() % 64 == 0
        tensor.fill_(number + 1)
    assert [tensor.unique().tolist() for tensor in tensors] == [[number + 1.0] for number in range(4)]
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
    assert tensors[0].data_ptr() % HUGE_PAGE_BYTES == 0
    assert advised(tensors[0].data_ptr())
    assert like([]) == []


def test_small_ones_are_torchs_own() -> None:
    tensors = zeros(4, (2, 3), torch.int64, CPU)
    assert [tensor.tolist() for tensor in tensors] == [[[0, 0, 0]] * 2] * 4
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 4


def test_other_devices_are_torchs_own() -> None:
    tensors = zeros(2, (1024, 1024, 4), torch.float32, torch.device("meta"))
    assert [tensor.device.type for tensor in tensors] == ["meta", "meta"]


def test_memory_that_is_not_there() -> None:
    with pytest.raises(RuntimeError, match="memory"):
        zeros(2, (2**40, 2**10), torch.float32, CPU)


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([], []),
        ([(0, 4), (4, 4), (8, 2)], [(0, 10)]),
        ([(20, 5), (0, 10), (10, 9), (25, 5)], [(0, 19), (20, 10)]),
    ],
)
def test_neighbours_are_registered_as_one(spans: list[tuple[int, int]], expected: list[tuple[int, int]]) -> None:
    assert merged(spans) == expected


def test_large_memory_of_the_process_itself_that_is_in_use() -> None:
    assert list(_resident_mappings(SMAPS)) == [(0x400000, 0xC00000), (0x7F0000000000, 0x7F0001000000)]


def test_what_tensors_hold_stays() -> None:
    before = torch.arange(4 * 2**20)
    (store,) = zeros(1, before.shape, before.dtype, CPU)
    store.copy_(before)
    collapse_resident()
    assert torch.equal(store, before)
    assert torch.equal(before, torch.arange(4 * 2**20))


def sizes_of(tensors: list[torch.Tensor]) -> list[int]:
    """Bytes of memory that tensors have."""
    return [tensor.untyped_storage().nbytes() for tensor in tensors]


def on_another_device() -> list[torch.Tensor]:
    return [torch.zeros(3, 2, 4, 8, device="meta") for _ in range(3)]


def test_other_devices_get_all_of_it_back_until_it_is_taken() -> None:
    tensors = on_another_device()
    views = [tensor.view(torch.int64).transpose(1, 2) for tensor in tensors]
    for _ in range(2):
        memory.give_back(tensors)
        assert sizes_of([*tensors, *views]) == [0] * 6
        memory.take_back(tensors)
        assert sizes_of([*tensors, *views]) == [768] * 6
    memory.take_back(tensors)
    assert sizes_of(tensors) == [768] * 3


def test_what_cannot_be_taken_back_whole_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, resize, taken = on_another_device(), torch.UntypedStorage.resize_, []

    def limited(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        if size:
            taken.append(size)
        if size and len(taken) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return resize(storage, size)

    memory.give_back(tensors)
    with monkeypatch.context() as patch:
        patch.setattr(torch.UntypedStorage, "resize_", limited)
        with pytest.raises(RuntimeError, match="out of memory"):
            memory.take_back(tensors)
    assert sizes_of(tensors) == [0] * 3
    memory.take_back(tensors)
    assert sizes_of(tensors) == [768] * 3


def test_a_cpu_has_nothing_to_take_back() -> None:
    (tensor,) = memory.zeros(1, (4,), torch.float32, torch.device("cpu"))
    tensor.fill_(3)
    memory.take_back([tensor])
    assert tensor.tolist() == [3.0] * 4

"""Memory moves into huge pages as it is; where nothing can be moved, nothing happens."""

from __future__ import annotations

import torch

from worker.engines.embedded import host_memory

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


def test_large_memory_of_the_process_itself_that_is_in_use() -> None:
    assert list(host_memory._resident_mappings(SMAPS)) == [(0x400000, 0xC00000), (0x7F0000000000, 0x7F0001000000)]


def test_what_tensors_hold_stays() -> None:
    before = torch.arange(4 * 2**20)
    advised = torch.empty_like(before)
    host_memory.advise(advised)
    advised.copy_(before)
    host_memory.collapse_resident()
    assert torch.equal(advised, before)
    assert torch.equal(before, torch.arange(4 * 2**20))

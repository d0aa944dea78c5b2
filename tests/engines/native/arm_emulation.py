"""Programs for 64-bit Arm: compiled on any machine, and run in an emulation of the processor.

The compiler is Zig's clang with musl. The emulation is QEMU's in Unicorn, which knows instructions
and no system: the few system calls of a static program of one thread are answered here.
"""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from typing import Any

import unicorn
from unicorn import UC_ARCH_ARM64, UC_HOOK_INTR, UC_MODE_ARM, arm64_const

PROCESSORS = {"max": arm64_const.UC_CPU_ARM64_MAX, "cortex-a72": arm64_const.UC_CPU_ARM64_A72}
"""The second one has no SDOT."""

_HWCAPS = {"max": 0x100003, "cortex-a72": 0x3}
"""Linux's bits of what a processor has: floating point, vectors, and SDOT."""

_ONE_THREAD = Path(__file__).with_name("one_thread")
_PAGE, _STACK, _STACK_TOP, _MAPPINGS = 0x1000, 16 << 20, 0x10000000000, 0x20000000000
_AUXILIARY = {"AT_PHDR": 3, "AT_PHENT": 4, "AT_PHNUM": 5, "AT_PAGESZ": 6, "AT_HWCAP": 16, "AT_RANDOM": 25}
_SUPERVISOR_CALL = 2  # QEMU's number of the exception
_WRITEV, _EXIT_GROUP, _SET_TID_ADDRESS, _BRK, _MUNMAP, _MMAP = 66, 94, 96, 214, 215, 222
_NOT_THERE = -38  # ENOSYS


def compiler() -> list[str]:
    """The command that compiles a static program of one thread."""
    target = ("-target", "aarch64-linux-musl", "-static", "-fno-sanitize=all", f"-I{_ONE_THREAD}")
    return [sys.executable, "-m", "ziglang", "cc", *target]


def emulate(program: Path, *arguments: object, processor: str) -> str:
    """What the program writes, run on one of `PROCESSORS`.

    Raises:
        AssertionError: it ended with another status than 0, or by an instruction that the
            processor lacks.
    """
    return _Process(program.read_bytes(), [program.name, *map(str, arguments)], processor).run()


class _Process:
    """A process of Linux, as far as such a program asks for one."""

    def __init__(self, image: bytes, arguments: list[str], processor: str) -> None:
        self._machine = machine = _machine()
        machine.ctl_set_cpu_model(PROCESSORS[processor])
        self._written = bytearray()
        self._status: object = None
        self._entry, headers, size, count = _elf(image)
        end = first = 0
        for at in range(headers, headers + size * count, size):
            kind, _, offset, address, _, stored, held, _ = struct.unpack_from("<IIQQQQQQ", image, at)
            if kind != 1:  # PT_LOAD
                continue
            start = max(address & -_PAGE, end)  # a page of two segments
            end = _whole_pages(address + held)
            machine.mem_map(start, end - start)
            machine.mem_write(address, image[offset : offset + stored])
            first = first or address - offset
        self._break = self._broken = end
        self._next_mapping = _MAPPINGS
        self._fill_stack(arguments, headers=(first + headers, size, count), hwcap=_HWCAPS[processor])
        enabled = machine.reg_read(arm64_const.UC_ARM64_REG_CPACR_EL1) | 3 << 20
        machine.reg_write(arm64_const.UC_ARM64_REG_CPACR_EL1, enabled)
        machine.hook_add(UC_HOOK_INTR, self._exception)

    def run(self) -> str:
        self._machine.emu_start(self._entry, 0)
        assert self._status == 0, (self._status, self._written[-3000:])
        return self._written.decode().strip()

    def _fill_stack(self, arguments: list[str], headers: tuple[int, int, int], hwcap: int) -> None:
        """Writes `argc`, `argv`, no environment and the auxiliary vector, as Linux does."""
        self._machine.mem_map(_STACK_TOP - _STACK, _STACK)
        texts = [bytes(16), *(argument.encode() + b"\0" for argument in arguments)]
        at, places = _STACK_TOP, []
        for text in texts:
            at -= len(text)
            places.append(at)
            self._machine.mem_write(at, text)
        random, *argv = places
        values = (*headers, _PAGE, hwcap, random)
        auxiliary = [each for pair in zip(_AUXILIARY.values(), values, strict=True) for each in pair]
        words = [len(argv), *argv, 0, 0, *auxiliary, 0, 0]
        at = (at - 8 * len(words)) & -16
        self._machine.mem_write(at, struct.pack(f"<{len(words)}Q", *words))
        self._machine.reg_write(arm64_const.UC_ARM64_REG_SP, at)

    def _exception(self, machine: Any, number: int, _: object) -> None:
        if number != _SUPERVISOR_CALL:
            self._stop(f"exception {number} at {machine.reg_read(arm64_const.UC_ARM64_REG_PC):#x}")
            return
        call = machine.reg_read(arm64_const.UC_ARM64_REG_X8)
        arguments = [machine.reg_read(arm64_const.UC_ARM64_REG_X0 + number) for number in range(3)]
        machine.reg_write(arm64_const.UC_ARM64_REG_X0, self._answer(call, *arguments) & (1 << 64) - 1)

    def _answer(self, call: int, first: int, second: int, third: int) -> int:
        if call == _EXIT_GROUP:
            self._stop(first)
        elif call == _SET_TID_ADDRESS:
            return 1
        elif call == _WRITEV:
            before = len(self._written)
            for address, length in struct.iter_unpack("<QQ", self._machine.mem_read(second, 16 * third)):
                self._written += self._machine.mem_read(address, length)
            return len(self._written) - before
        elif call == _BRK:
            if _whole_pages(first) > self._broken:
                self._machine.mem_map(self._broken, _whole_pages(first) - self._broken)
                self._broken = _whole_pages(first)
            self._break = max(self._break, first)
            return self._break
        elif call == _MMAP:
            at = self._next_mapping
            self._next_mapping += _whole_pages(second) + _PAGE
            self._machine.mem_map(at, _whole_pages(second))
            return at
        elif call == _MUNMAP:
            self._machine.mem_unmap(first, _whole_pages(second))
        else:
            return _NOT_THERE
        return 0

    def _stop(self, status: object) -> None:
        self._status = status
        self._machine.emu_stop()


def _machine() -> Any:
    library: Any = unicorn  # which has no types
    return library.Uc(UC_ARCH_ARM64, UC_MODE_ARM)


def _elf(image: bytes) -> tuple[int, int, int, int]:
    """The entry, and the offset, size and number of the program headers."""
    entry, headers = struct.unpack_from("<QQ", image, 24)
    return (entry, headers, *struct.unpack_from("<HH", image, 54))


def _whole_pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE

"""The architectures that artifacts are built for, and which devices each one serves."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ARCHS", "Arch", "ProvisionalArch", "Rates", "arch", "archs_for_capability", "provisional_arch"]

KIB = 1024


@dataclass(frozen=True)
class Rates:
    """What a device of an arch does in a second, for floors (`kda_tl.specs.floors`).

    Attributes:
        device: whose rates these are.
        bytes: of memory traffic, read and written.
        tensor_flops: of dense products with 16-bit operands and float32 sums.
        float32_flops: outside of the tensor cores.
        exponentials: exp2, log2, reciprocals and their like: 16 per multiprocessor and clock.
        measured: `bytes` and `tensor_flops` are of a copy of 4 GiB and a product of 8192 x 8192 matrices on such a device; else
            from its data sheet. The other two are clocks times units everywhere.
    """

    device: str
    bytes: float
    tensor_flops: float
    float32_flops: float
    exponentials: float
    measured: bool


@dataclass(frozen=True)
class Arch:
    """One row of the table.

    Attributes:
        name: what users write, `kda-tl build --arch NAME`.
        compiler_arch: what the compiler gets. sm_90 is compiled as sm_90a: plain sm_90 has no wgmma, TMA or setmaxnreg.
        shared_memory: bytes that one block may use.
        multiprocessor_shared_memory, multiprocessor_threads: bytes and threads of all blocks of a multiprocessor together.
        exact: True where the code runs on that compute capability only; False where the artifact carries PTX for newer GPUs.
        capability: the lowest compute capability that the artifact runs on; None for the cpu.
        min_driver: the lowest NVIDIA driver (major version) that loads what nvcc 13 makes.
        measured: False where the code compiles and nothing more is known: no such device has run it, and no schedule was timed.
        rates: of the usual device; None where nobody has looked them up.
    """

    name: str
    compiler_arch: str
    shared_memory: int
    exact: bool
    capability: tuple[int, int] | None
    min_driver: int | None
    measured: bool = True
    multiprocessor_shared_memory: int = 0
    multiprocessor_threads: int = 2048
    rates: Rates | None = None

    @property
    def is_cpu(self) -> bool:
        return self.capability is None


A100 = Rates("NVIDIA A100 80GB", 2.039e12, 312e12, 19.5e12, 108 * 16 * 1.41e9, measured=False)
L40S = Rates("NVIDIA L40S", 0.864e12, 362e12, 91.6e12, 142 * 16 * 2.52e9, measured=False)
H200 = Rates("NVIDIA H200", 4.3e12, 790e12, 132 * 256 * 1.98e9, 132 * 16 * 1.98e9, measured=True)

ARCHS: dict[str, Arch] = {
    row.name: row
    for row in (
        Arch("sm_80", "sm_80", 163 * KIB, False, (8, 0), 580, True, 164 * KIB, 2048, A100),
        Arch("sm_89", "sm_89", 99 * KIB, False, (8, 9), 580, True, 100 * KIB, 1536, L40S),
        Arch("sm_90", "sm_90a", 227 * KIB, True, (9, 0), 580, True, 228 * KIB, 2048, H200),
        # Without the suffix a: what needs it (tcgen05) is not used, and plain code runs on 10.3, 12.1 and later ones as well.
        Arch("sm_100", "sm_100", 227 * KIB, False, (10, 0), 580, False, 228 * KIB, 2048),
        Arch("sm_120", "sm_120", 99 * KIB, False, (12, 0), 580, False, 100 * KIB, 1536),
        Arch("cpu", "c", 0, True, None, None),
    )
}


def arch(name: str) -> Arch:
    """The row of `name`. Raises ValueError, listing the names, for an arch that is not in the table."""
    if name not in ARCHS:
        raise ValueError(f"arch must be one of {', '.join(ARCHS)}, got {name!r}")
    return ARCHS[name]


def archs_for_capability(capability: tuple[int, int], shared_memory: int | None = None) -> list[str]:
    """Archs whose artifacts a device of this compute capability can load, best first.

    Archs that were never measured come after those that were, whose code at least ran on a newer GPU through its PTX: a device
    of compute capability 10.0 gets sm_89's artifacts, unless sm_100 is asked for by name.

    shared_memory: bytes that the device grants one block. Archs whose schedules may use more come last: sm_86 has 99 KiB and
    runs no sm_89 code, so it gets sm_80's artifacts, each of which is held to the device's limit when it is loaded.
    """
    loadable = [
        row
        for row in ARCHS.values()
        if row.capability is not None and (row.capability == capability if row.exact else row.capability <= capability)
    ]

    def preference(row: Arch) -> tuple[bool, bool, tuple[int, int]]:
        return row.measured, shared_memory is None or row.shared_memory <= shared_memory, row.capability or (0, 0)

    return [row.name for row in sorted(loadable, key=preference, reverse=True)]


@dataclass(frozen=True)
class ProvisionalArch:
    """A device of a compute capability that the table has no row for.

    Attributes:
        row: one as the table would have it, with the limits that the driver tells.
        nearest: the arch whose artifacts and schedules the device takes until it has its own.
        multiprocessors, registers: of the device, and of each multiprocessor; None where torch does not tell.
    """

    row: Arch
    nearest: str
    multiprocessors: int | None
    registers: int | None

    def __str__(self) -> str:
        limits = [f"{self.row.shared_memory / KIB:.0f} KiB of shared memory per block"]
        limits += [] if self.multiprocessors is None else [f"{self.multiprocessors} multiprocessors"]
        limits += [] if self.registers is None else [f"{self.registers} registers in each"]
        return f"provisional {self.row.name} ({', '.join(limits)})"


def provisional_arch(
    capability: tuple[int, int],
    shared_memory: int | None = None,
    multiprocessors: int | None = None,
    registers: int | None = None,
) -> ProvisionalArch | None:
    """The row of a device that the table does not know; None where it does, or where no arch's code runs on it.

    The nearest arch is the best of `archs_for_capability`: the newest that was measured and is not newer than the device.
    """
    if any(row.capability == capability for row in ARCHS.values()):
        return None
    loadable = archs_for_capability(capability, shared_memory)
    if not loadable:
        return None
    name, nearest = f"sm_{capability[0]}{capability[1]}", ARCHS[loadable[0]]
    block = nearest.shared_memory if shared_memory is None else shared_memory
    row = Arch(name, name, block, False, capability, nearest.min_driver, measured=False)
    return ProvisionalArch(row, nearest.name, multiprocessors, registers)

"""What does a compiler make of the Triton kernels for an H200? No device is needed.

    python scripts/compile_gpu.py [WIDTH...]

Compiles them for elements of each width (default: 1 2 4 8 bytes) as they are launched for whole, aligned tensors of
FP8, BF16, F32 and F64, by the ptxas that comes with Triton, and prints registers a thread, bytes of shared memory and
of spilt registers a program, how many of a processor's 64 warps these leave room for, and the instructions in the code,
also per element of a tile: loops count once, and so do paths that whole tiles do not take. Left out: unaligned offsets,
tensors without an exponent.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Compiled, not interpreted, and anew.
os.environ.pop("TRITON_INTERPRET", None)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dcr_kernels.gpu import compacting, comparing, measuring, patching
from dcr_kernels.gpu.elements import OPTIONS, TILE_BYTES, tile_warps

TARGET = GPUTarget("cuda", 90, 32)
# What a processor of it has.
PROCESSOR_REGISTERS, PROCESSOR_SHARED, PROCESSOR_WARPS, PROCESSOR_PROGRAMS = 65536, 228 << 10, 64, 32
FIELDS = {1: (4, 3), 2: (8, 7), 4: (8, 23), 8: (11, 52)}
# Arguments that are no elements.
TYPES = {
    "block_elements": "*i64",
    "count": "i64",
    "skew": "i32",
    "first_rows": "*i64",
    "keys": "*i16",
    "pivot": "*i32",
    "sums": "*i32",
    "changed": "*i32",
    "digests": "*i32",
    "tops": "*i32",
    "starts": "*i64",
    "positions": "*i32",
    "ranks": "*i32",
}
PACKED = {"measure": "*i64", "settle": "*i16", "compact": "*i64"}


@dataclass(frozen=True, slots=True)
class Compiled:
    """What one kernel takes."""

    kernel: str
    width: int
    warps: int
    registers: int
    shared_bytes: int
    spilt_bytes: int
    resident_warps: int
    instructions: int
    instructions_per_element: float


def kernels_of(width: int) -> list[tuple[Any, dict[str, int], int, int]]:
    """Kernels, what they are compiled for, their warps, and the elements that a program takes at once."""
    tile, (bits, shift) = TILE_BYTES // width, FIELDS[width]
    known = {"tile_elements": tile, "exponent_bits": bits, "exponent_shift": shift}
    warps = tile_warps(tile)
    return [
        (measuring.measure, known | {"width": width, "is_pair": 1, "is_aligned": 1}, warps, tile),
        (measuring.settle, known | {"is_aligned": 1}, warps, 64 * tile),
        (compacting.compact, known, warps, tile),
        (compacting.gather, known | {"chunk": comparing.CHUNK}, comparing.CHUNK_WARPS, comparing.CHUNK),
        (patching.scatter, {"chunk": patching.CHUNK, "is_xor": 1}, 4, patching.CHUNK),
    ]


def type_of(name: str, kernel: str, width: int) -> str:
    """The type of an argument, as Triton spells it."""
    if name == "populations" or (name in ("run_members", "tile_members") and kernel == "compact"):
        return PACKED[kernel]
    if name in ("run_members", "tile_members"):
        return {"run_members": "*i16", "tile_members": "*i32"}[name]
    return TYPES.get(name, f"*i{8 * width}")


def compile_kernel(kernel: Any, known: dict[str, int], warps: int, width: int) -> tuple[bytes, int]:
    """The code for the device, of pointers that are multiples of 16, and the shared memory that a launch asks for."""
    name = kernel.fn.__name__
    types = {each: "constexpr" if each in known else type_of(each, name, width) for each in kernel.arg_names}
    places = {each: (place,) for place, each in enumerate(kernel.arg_names)}
    aligned = {places[each]: [["tt.divisibility", 16]] for each, type_ in types.items() if type_.startswith("*")}
    constants = {places[each]: value for each, value in known.items()}
    source = ASTSource(fn=kernel, signature=types, constexprs=constants, attrs=aligned)
    compiled = triton.compile(source, target=TARGET, options=OPTIONS | {"num_warps": warps})
    return compiled.asm["cubin"], int(compiled.metadata.shared)


def resident_warps(registers: int, shared_bytes: int, warps: int) -> int:
    """Of a processor's 64 warps, those of as many programs as its registers and shared memory hold.

    Registers are given to a warp by 256, shared memory to a program by 128 bytes, and 1 KiB besides (CUDA's tables of
    what a processor of compute capability 9.0 has).
    """
    by_registers = PROCESSOR_REGISTERS // (-(-32 * registers // 256) * 256) // 4 * 4 // warps
    by_memory = PROCESSOR_SHARED // (-(-shared_bytes // 128) * 128 + 1024)
    return warps * min(PROCESSOR_WARPS // warps, PROCESSOR_PROGRAMS, by_registers, by_memory)


def look_at(code: bytes, *arguments: str) -> str:
    """What cuobjdump says of code."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        return subprocess.run([tool, *arguments, file.name], check=True, capture_output=True, text=True).stdout


def measured(kernel: Any, known: dict[str, int], warps: int, elements: int, width: int) -> Compiled:
    """Compile one kernel and look at what came out."""
    code, shared = compile_kernel(kernel, known, warps, width)
    usage = re.search(r"REG:(\d+) STACK:(\d+)", look_at(code, "-res-usage"))
    assert usage is not None
    registers, stack = (int(number) for number in usage.groups())
    instructions = len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?!NOP)", look_at(code, "-sass"), re.MULTILINE))
    share = round(instructions * warps * 32 / elements, 1)
    resident = resident_warps(registers, shared, warps)
    return Compiled(kernel.fn.__name__, width, warps, registers, shared, stack, resident, instructions, share)


def main() -> None:
    with tempfile.TemporaryDirectory() as cache:
        triton.knobs.cache.dir = cache
        rows = [
            measured(kernel, known, warps, elements, width)
            for width in [int(argument) for argument in sys.argv[1:]] or list(FIELDS)
            for kernel, known, warps, elements in kernels_of(width)
        ]
    columns = f"{'registers':>10}{'shared':>8}{'spilt':>6}{'resident':>9}{'code':>6}{'an element':>11}"
    print(f"{'kernel':10}{'width':>6}{'warps':>6}{columns}")
    for row in rows:
        numbers = f"{row.registers:10}{row.shared_bytes:8}{row.spilt_bytes:6}{row.resident_warps:9}{row.instructions:6}"
        print(f"{row.kernel:10}{row.width:6}{row.warps:6}{numbers}{row.instructions_per_element:11}")
    print(json.dumps({"triton": triton.__version__, "target": "sm_90", "kernels": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    main()

"""The kernels on CUDA, in Triton: what changed between two sides of a piece, its digests, its ranks; and patches.

The same bits as reference.py. Tensors are the caller's and stay where they are; nothing here reads files, codes bits or
chooses a device, and no other module of this package imports it. Kernels have more parameters than functions elsewhere,
because they take nothing but pointers and numbers. None uses atomics, so that one order is all there is.

Several pieces, each padded to whole blocks, are compared at once; what is behind the last element of a block is never
loaded. A piece is gone through twice, because neither where a change is written nor its class is known before all of a
block has been seen. `measure` counts and digests, `settle` finds the tops of blocks; after a prefix sum, for whose last
number the host waits, `compact` writes positions, and how many members of each class come before each 32 elements;
`gather` reads these and the changes alone. `scatter` patches.

What they move, in bytes an element of width w of which a share c changes, in sectors of 32 bytes; a tile is 8192 bytes:

    measure   2w read; 8 a tile read, 68 a tile written, 100 where the tensor's offset is no multiple of 8192
    settle    64 a tile read, 16 a block read, 36 a block written
    compact   2w read, 16 a tile; 4c and 1 written: 32 for each 32 elements, 32 a tile
    gather    c times: 4 of the position, at most 32w of the run, 32 of the target, 32 of members, read; 2w + 4 written
    scatter   c times: 4 or 8 of the position, w of the value, 32 read (xor alone) and 32 written

The floor on an H200, whose copies were measured to move 4.3 TB/s, for a GiB of BF16 in the base, 2^29 elements:

    measure   4.02 bytes: 2.16 GB, 0.50 ms
    compact   5.05 bytes at 1 %: 2.71 GB, 0.63 ms; 5.13 at 3 %: 0.64 ms
    gather    c times 4 + 64 + 32 + 32 + 8 = 140: 1.40 bytes at 1 %, 0.17 ms; 4.20 at 3 %, 0.52 ms
    scatter   c times 4 + 2 + 64 = 70: 0.70 bytes at 1 %, 0.09 ms; 2.10 at 3 %, 0.26 ms; its check of positions moves 50
              bytes a change more: 0.06 and 0.19 ms

So 1.3 ms at 1 % and 1.7 ms at 3 %, where the least that any way of comparing could take is 4 bytes: 0.50 ms.

Instructions bound it before bytes do. What ptxas makes of them for sm_90 (scripts/compile_gpu.py, Triton 3.9.0), as
registers a thread and instructions an element, without any spilt register but 8 bytes of gather's for F32:

    width          1            2            4            8
    measure     82, 75       64, 67      128, 93     233, 148
    settle      54, 0.6      61, 0.7      54, 0.7      56, 0.8
    compact     98, 82      103, 70      107, 71      120, 88
    gather      32           40           48           48        784, 992, 1168 and 1456 a change, 64 at once
    scatter     32, 30       36, 28       40, 27       48, 30    of the changes

That leaves room for so many of a processor's 64 warps, `compact` of bytes and BF16 having 64 and 32 KiB of shared
memory a program, all others at most 8:

    width          1            2            4            8
    measure        16           32           16           8
    settle         32           32           36           36
    compact        16           16           16           16
    gather         64           48           40           40
    scatter        64           48           48           40

All this is for aligned offsets; measure takes 1.7 to 2.6 times the instructions for others, and spills 824 bytes for
F64. The counts are of code: a tile of BF16 at 1 % has 41 changes, which cost gather one turn of 64, thus 992 * 64 /
4096 = 16 instructions an element; 123 at 3 % cost two, 31. Paths for a piece's last tile are in the numbers and seldom
taken. 132 processors that issue 4 instructions of 32 lanes a cycle, at an assumed 1.8 GHz, make 30.4e12 a second: for a
GiB of BF16 at 1 % 2^29 * (67 + 70 + 16) / 30.4e12 = 2.7 ms, at 3 % 3.0 ms. That is a floor, too, as 16 or 32 warps may
not hide all that each of them waits for. No device was at hand: none of these times was measured.
"""

from dcr_kernels.gpu.comparing import Compared, Ranks, Run, compare, compare_runs, digest
from dcr_kernels.gpu.patching import patch, patch_xor

__all__ = ["Compared", "Ranks", "Run", "compare", "compare_runs", "digest", "patch", "patch_xor"]

/* What the extension module asks of a set of kernels. Sections are those of FORMAT.md.
 *
 * Every level (plain, avx2, avx512, neon) is variant.c compiled with other flags. What is read, and elements that are written, may be
 * unaligned; positions that are written, and work memory, are aligned. `width` is 1, 2, 4 or 8 bytes.
 * Memory is the caller's: sizes named in bytes below are what a kernel may touch, whatever the encoded bytes say.
 */
#ifndef DCR_KERNELS_H
#define DCR_KERNELS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define ROW_UNITS 4096
#define ROW_BYTES 8192
#define CLASSES 16
#define STATES 32
/* Elements whose classes are counted together, and chunks whose counts are summed up in 16 bits. */
#define CHUNK 256
#define GROUP 64
#define LONGEST_CODE 12
#define MOST_SYMBOLS 2048
#define MOST_AXES 32
/* Writable bytes or entries past the end of every output, so that stores need no bounds of their own. */
#define SLACK 64

/* What is wrong with an input, and where: `unit` is "byte" or "element". */
struct fault {
    const char *what;
    const char *unit;
    uint64_t at;
};

/* An exponent field; `bits` is 0 for dtypes without one. */
struct field {
    unsigned bits;
    unsigned shift;
};

/* A block of `count` elements; `target` is NULL where only the base is known. */
struct block {
    const uint8_t *base;
    const uint8_t *target;
    size_t count;
    int width;
    struct field exponent;
};

/* Changes: `positions` are u32, `values` elements. */
struct changes {
    const uint8_t *positions;
    const uint8_t *values;
    size_t count;
};

/* An axis of a box: its elements, and how far, in elements, the next one lies on either side. */
struct axis {
    size_t count;
    size_t out;
    size_t source;
};

/* A Huffman table (5.7): entries sorted by length and symbol, the escape's length or -1. */
struct table {
    const uint8_t *symbols;
    const uint8_t *lengths;
    size_t count;
    int escape_length;
};

struct span {
    const uint8_t *data;
    size_t size;
};

/* The context form of a block up to its magnitudes, which are in coding order; `work` is draft_work_bytes(room for changes), `stream`
 * stream_bytes(count, changed) bytes. */
struct draft {
    uint8_t *work;
    uint8_t *stream;
    size_t stream_size;
    uint32_t *class_counts;
    uint8_t *magnitudes;
};

/* Changes in ascending position of a block that somebody else has gone through: `members` has a u32 for each class, `ranks` one for
 * each change. */
struct ranked {
    int width;
    struct field exponent;
    unsigned top;
    const uint8_t *members;
    const uint8_t *ranks;
    const uint8_t *old;
    const uint8_t *new;
    size_t changed;
};

/* What a decoder fills in; positions and values have room for `count` entries, `work` is decode_work_bytes(count).
 * context_decode also digests the base, which lies at byte `offset` of its tensor, as a comparison does, and makes the target in `out`,
 * which may be the base itself, or NULL. */
struct decoded {
    uint8_t *work;
    uint32_t *positions;
    uint8_t *values;
    size_t count;
    uint64_t offset;
    uint8_t *out;
    uint32_t sums[4];
    uint32_t growth[4];
};

/* What compare fills in: what the base adds to the four sums, what they grow by, and the changes; their arrays have room for `count`
 * entries, positions for SLACK more. The draft is made if `draft` is not NULL and there are changes. */
struct comparison {
    uint64_t offset;
    uint32_t sums[4];
    uint32_t growth[4];
    uint32_t *positions;
    uint8_t *old;
    uint8_t *new;
    size_t changed;
    struct draft *draft;
};

/* A section of the adaptive coder; `size` becomes SIZE_MAX when it does not fit the capacity. */
struct section {
    uint8_t *data;
    size_t capacity;
    size_t size;
};

/* What one magnitude can take at most: 64 bits 1, one bit 0 and 63 plain bits, of at most 2 bytes each. */
#define MAGNITUDE_BYTES 320

struct kernels {
    const char *name;
    void (*digest)(struct span data, uint64_t offset, uint32_t sums[4]);
    void (*digest_changes)(const struct changes *changes, const uint8_t *old, int width, uint64_t offset, uint32_t sums[4]);
    size_t (*scan)(const struct block *block, uint32_t *positions);
    bool (*gather)(const uint8_t *elements, size_t count, int width, const struct changes *changes, uint8_t *out, struct fault *fault);
    bool (*patch)(uint8_t *out, size_t count, int width, const struct changes *changes, struct fault *fault);
    bool (*patch_xor)(uint8_t *out, size_t count, int width, const struct changes *changes, struct fault *fault);
    /* `axes` have at least one element each, and no two elements of `out` are one. */
    void (*copy_box)(uint8_t *out, const uint8_t *source, int width, const struct axis *axes, size_t count);
    void (*compare)(const struct block *block, struct comparison *found);
    /* The draft's memory is that of a comparison of as many elements as there are members. */
    bool (*draft)(const struct ranked *known, struct draft *draft, struct fault *fault);
    bool (*context_decode)(struct span stream, const struct block *block, const uint16_t *states, struct decoded *decoded,
                           struct fault *fault);
    bool (*magnitude_bins)(const uint32_t *class_counts, const uint8_t *magnitudes, int width, uint64_t *bins, struct fault *fault);
    bool (*magnitude_encode)(const uint32_t *class_counts, const uint8_t *magnitudes, int width, const uint16_t *states,
                             struct section *out, struct fault *fault);
    bool (*position_bits)(size_t members, const struct changes *changes, uint64_t *bits, struct fault *fault);
    /* `out` is gap_bytes(count, changed, width) bytes; sets `size`. */
    bool (*gap_encode)(size_t count, int width, const struct changes *changes, const struct table *table, uint8_t *out, size_t *size,
                       struct fault *fault);
    bool (*gap_decode)(struct span stream, size_t count, int width, const struct table *table, struct decoded *decoded,
                       struct fault *fault);
};

static inline size_t chunks_of(size_t count) { return (count + CHUNK - 1) / CHUNK; }

static inline size_t groups_of(size_t count) { return (count + GROUP * CHUNK - 1) / (GROUP * CHUNK); }

static inline size_t group_size(const struct block *block, size_t first) {
    return block->count - first < GROUP * CHUNK ? block->count - first : GROUP * CHUNK;
}

/* A class and a rank for each change; a rank and a sign in coding order. */
static inline size_t draft_work_bytes(size_t changed) { return 10 * (changed + CHUNK); }

/* For each group 16 counts of each chunk and 16 of its own, in two bytes, and a class for each element. */
static inline size_t decode_work_bytes(size_t count) { return groups_of(count) * (2 * CLASSES * (GROUP + 1) + GROUP * CHUNK); }

/* Position codes take at most 1.2 bits a member (5.3); counts, top and head fit the constant. */
static inline size_t stream_bytes(size_t count, size_t changed) { return count / 4 + changed / 8 + 512; }

/* All of a draft's memory but its results: its work and stream. */
static inline size_t draft_bytes(size_t count, size_t changed) { return draft_work_bytes(changed) + stream_bytes(count, changed); }

static inline size_t compare_bytes(size_t count) { return draft_bytes(count, count); }

static inline size_t gap_bytes(size_t count, size_t changed, int width) {
    return count / 4 + changed * (size_t)(width + 2) + 512;
}

/* Whether the processor deposits bits in hardware; AMD's before Zen 3 take a step for each bit. */
extern bool has_fast_deposit;

/* K_q[i] as unit_keys[q][i] and as unit_keys_by_column[i][q]; row_key(q, j) is R_q(j) (3.1). */
extern int16_t unit_keys[4][ROW_UNITS];
extern int16_t unit_keys_by_column[ROW_UNITS][4];

static inline uint64_t mix(uint64_t x) {
    uint64_t z = x + UINT64_C(0x9E3779B97F4A7C15);
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    return z ^ (z >> 31);
}

static inline uint32_t row_key(unsigned q, uint64_t row) { return (uint32_t)mix(((uint64_t)q << 60) + row) | 1; }

#endif

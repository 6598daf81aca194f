/* Changes of plain arrays: find them, write them. */
#ifndef DCR_CHANGES_H
#define DCR_CHANGES_H

#include "simd.h"

/* Appends the positions of a mask's set bits, `step` at a time; may write that many entries more than it appends. */
ALWAYS_INLINE uint32_t *append_set_bits(uint32_t *out, uint64_t mask, uint32_t base, unsigned step) {
    unsigned count = (unsigned)__builtin_popcountll(mask);
    uint32_t *at = out;
    do {
        for (unsigned i = 0; i < step; i++) {
            /* A spent mask gives an entry that the next one overwrites. */
            at[i] = base + any_trailing_zeros(mask);
            mask &= mask - 1;
        }
        at += step;
    } while (UNLIKELY(mask));
    return out + count;
}

/* Finds the elements that differ, the first of which has the number `first`. Where changes are sparse, a word has two at most. */
ALWAYS_INLINE size_t scan_of(int width, const uint8_t *base, const uint8_t *target, size_t count, uint32_t first, bool are_sparse,
                             uint32_t *positions) {
    uint32_t *out = positions;
    size_t at = 0;
    for (; at + 64 <= count; at += 64) {
        uint64_t mask = differ_mask(base + at * (size_t)width, target + at * (size_t)width, width);
        out = append_set_bits(out, mask, first + (uint32_t)at, are_sparse ? 2 : 4);
    }
    for (; at < count; at++) {
        *out = first + (uint32_t)at;
        out += load_element(base, at, width) != load_element(target, at, width);
    }
    return (size_t)(out - positions);
}

static size_t scan(const struct block *block, uint32_t *positions) {
    return FOR_WIDTH(block->width, scan_of, block->base, block->target, block->count, 0, false, positions);
}

ALWAYS_INLINE void patch_of(int width, uint8_t *out, size_t count, const struct changes *changes, bool is_xor) {
    for (size_t i = 0; i < changes->count; i++) {
        uint32_t position = position_at(changes, i);
        if (UNLIKELY(position >= count)) return;
        uint64_t value = load_element(changes->values, i, width);
        store_element(out, position, is_xor ? value ^ load_element(out, position, width) : value, width);
    }
}

ALWAYS_INLINE bool are_within(size_t count, const struct changes *changes, struct fault *fault) {
    uint32_t largest = 0;
    for (size_t i = 0; i < changes->count; i++) {
        uint32_t position = position_at(changes, i);
        largest = position > largest ? position : largest;
    }
    if (!changes->count || largest < count) return true;
    size_t at = 0;
    while (at + 1 < changes->count && position_at(changes, at) < count) at++;
    return fail(fault, "position outside", "element", at);
}

ALWAYS_INLINE bool patch_any(uint8_t *out, size_t count, int width, const struct changes *changes, bool is_xor, struct fault *fault) {
    if (!are_within(count, changes, fault)) return false;
    FOR_WIDTH(width, patch_of, out, count, changes, is_xor);
    return true;
}

ALWAYS_INLINE void gather_of(int width, const uint8_t *elements, size_t count, const struct changes *changes, uint8_t *out) {
    for (size_t i = 0; i < changes->count; i++) {
        uint32_t position = position_at(changes, i);
        if (UNLIKELY(position >= count)) return;
        store_element(out, i, load_element(elements, position, width), width);
    }
}

static bool gather(const uint8_t *elements, size_t count, int width, const struct changes *changes, uint8_t *out, struct fault *fault) {
    if (!are_within(count, changes, fault)) return false;
    FOR_WIDTH(width, gather_of, elements, count, changes, out);
    return true;
}

static bool patch(uint8_t *out, size_t count, int width, const struct changes *changes, struct fault *fault) {
    return patch_any(out, count, width, changes, false, fault);
}

static bool patch_xor(uint8_t *out, size_t count, int width, const struct changes *changes, struct fault *fault) {
    return patch_any(out, count, width, changes, true, fault);
}

#endif

/* The additive tensor digest of FORMAT.md 3.2. */
#ifndef DCR_DIGEST_H
#define DCR_DIGEST_H

#include "simd.h"

typedef uint32_t four_sums __attribute__((vector_size(16)));

ALWAYS_INLINE four_sums keys_of_row(uint64_t row) {
    return (four_sums){row_key(0, row), row_key(1, row), row_key(2, row), row_key(3, row)};
}

typedef int16_t four_keys __attribute__((vector_size(8)));

ALWAYS_INLINE four_sums keys_of_column(unsigned column) {
    four_keys keys;
    memcpy(&keys, unit_keys_by_column[column], sizeof keys);
    return __builtin_convertvector(keys, four_sums);
}

ALWAYS_INLINE void add_unit(four_sums *sums, uint64_t unit, uint32_t value) {
    *sums += value * keys_of_column(unit % ROW_UNITS) * keys_of_row(unit / ROW_UNITS);
}

/* What the byte at `address` counts: signed and 256 times as much at odd addresses. */
ALWAYS_INLINE uint32_t byte_value(uint64_t address, uint8_t byte) {
    return address & 1 ? (uint32_t)((int32_t)(int8_t)byte * 256) : byte;
}

/* Units [column, column + count) of a row. */
static void add_row(four_sums *sums, const uint8_t *units, uint64_t row, size_t column, size_t count) {
    uint32_t part[4] = {0};
    dot_tail(units, &unit_keys[0][column], 0, count, part);
    *sums += (four_sums){part[0], part[1], part[2], part[3]} * keys_of_row(row);
}

/* One or two pairs of rows, a quarter of each at a time, so that keys stay in the nearest cache for the second pair. */
ALWAYS_INLINE four_sums digest_pairs(const uint8_t *at, uint64_t row, unsigned pairs, uintptr_t ahead) {
    uint32_t sums[4][4] = {{0}};
    for (size_t column = 0; column < ROW_UNITS; column += ROW_UNITS / 4) {
        for (unsigned first = 0; first < 2 * pairs; first += 2) {
            const uint8_t *units = at + first * ROW_BYTES + 2 * column;
            struct two_rows part;
            dot_two_rows(units, units + ROW_BYTES, &unit_keys[0][column], ROW_UNITS / 4, ahead, &part);
            for (unsigned q = 0; q < 4; q++) {
                sums[first][q] += part.first[q];
                sums[first + 1][q] += part.second[q];
            }
        }
    }
    four_sums all = {0};
    for (unsigned i = 0; i < 2 * pairs; i++) all += (four_sums){sums[i][0], sums[i][1], sums[i][2], sums[i][3]} * keys_of_row(row + i);
    return all;
}

/* What bytes at `offset` of their tensor add to the four sums; asks for what is at a distance of `ahead` from it. */
static four_sums digest_of(struct span data, uint64_t offset, uintptr_t ahead) {
    four_sums sums = {0};
    const uint8_t *at = data.data, *end = data.data + data.size;
    if (at < end && offset & 1) {
        add_unit(&sums, offset / 2, byte_value(1, *at++));
        offset++;
    }
    uint64_t unit = offset / 2;
    size_t units = (size_t)(end - at) / 2;
    if ((end - at) & 1) add_unit(&sums, unit + units, byte_value(0, end[-1]));
    while (units) {
        size_t column = unit % ROW_UNITS, count = ROW_UNITS - column < units ? ROW_UNITS - column : units;
        if (!column && units >= 4 * ROW_UNITS) {
            sums += digest_pairs(at, unit / ROW_UNITS, 2, ahead);
            count = 4 * ROW_UNITS;
        } else if (!column && units >= 2 * ROW_UNITS) {
            sums += digest_pairs(at, unit / ROW_UNITS, 1, ahead);
            count = 2 * ROW_UNITS;
        } else {
            add_row(&sums, at, unit / ROW_UNITS, column, count);
        }
        at += 2 * count;
        unit += count;
        units -= count;
    }
    return sums;
}

static void digest(struct span data, uint64_t offset, uint32_t out[4]) {
    four_sums sums = digest_of(data, offset, 0);
    memcpy(out, &sums, sizeof sums);
}

/* Row keys of the rows last seen: a block has 64, and classes go through them again and again. */
struct row_cache {
    uint64_t rows[64];
    four_sums keys[64];
};

static inline void start_rows(struct row_cache *cache) { memset(cache->rows, 255, sizeof cache->rows); }

ALWAYS_INLINE void add_unit_cached(four_sums *sums, struct row_cache *cache, uint64_t unit, uint32_t value) {
    uint64_t row = unit / ROW_UNITS;
    if (UNLIKELY(cache->rows[row % 64] != row)) {
        cache->rows[row % 64] = row;
        cache->keys[row % 64] = keys_of_row(row);
    }
    *sums += value * keys_of_column(unit % ROW_UNITS) * cache->keys[row % 64];
}

/* Adds what the sums grow by when the element at byte `address` goes from `before` to `after`. */
ALWAYS_INLINE void add_change(int width, four_sums *sums, struct row_cache *cache, uint64_t address, uint64_t before, uint64_t after) {
    if (width == 1 || address & 1) {
        for (int byte = 0; byte < width; byte++, address++, before >>= 8, after >>= 8)
            add_unit_cached(sums, cache, address / 2, byte_value(address, (uint8_t)after) - byte_value(address, (uint8_t)before));
    } else {
        for (int part = 0; part < width; part += 2, address += 2, before >>= 16, after >>= 16)
            add_unit_cached(sums, cache, address / 2, (uint32_t)((int32_t)(int16_t)after - (int16_t)before));
    }
}

ALWAYS_INLINE four_sums digest_changes_of(int width, const struct changes *changes, const uint8_t *old, uint64_t offset) {
    four_sums sums = {0};
    struct row_cache cache;
    start_rows(&cache);
    for (size_t i = 0; i < changes->count; i++) {
        uint64_t address = offset + (uint64_t)position_at(changes, i) * (unsigned)width;
        add_change(width, &sums, &cache, address, load_element(old, i, width), load_element(changes->values, i, width));
    }
    return sums;
}

static void digest_changes(const struct changes *changes, const uint8_t *old, int width, uint64_t offset, uint32_t out[4]) {
    four_sums sums = FOR_WIDTH(width, digest_changes_of, changes, old, offset);
    memcpy(out, &sums, sizeof sums);
}

#endif

/* Unaligned loads and stores, and the bit streams of FORMAT.md 1. */
#ifndef DCR_BITS_H
#define DCR_BITS_H

#include <string.h>

#include "kernels.h"

#define ALWAYS_INLINE static inline __attribute__((always_inline))
#define UNLIKELY(x) __builtin_expect(!!(x), 0)

/* Calls f with the width as a constant, so that the compiler makes a version of it for each. */
#define FOR_WIDTH(width, f, ...) \
    ((width) == 1 ? f(1, __VA_ARGS__) : (width) == 2 ? f(2, __VA_ARGS__) : (width) == 4 ? f(4, __VA_ARGS__) : f(8, __VA_ARGS__))

ALWAYS_INLINE uint32_t load32(const uint8_t *at) {
    uint32_t value;
    memcpy(&value, at, 4);
    return value;
}

ALWAYS_INLINE uint64_t load64(const uint8_t *at) {
    uint64_t value;
    memcpy(&value, at, 8);
    return value;
}

/* Asks for the memory at `distance` from `at`, wherever that is: any address may be asked for. */
ALWAYS_INLINE void prefetch(const uint8_t *at, uintptr_t distance) { __builtin_prefetch((const void *)((uintptr_t)at + distance)); }

ALWAYS_INLINE void store64(uint8_t *at, uint64_t value) { memcpy(at, &value, 8); }

ALWAYS_INLINE uint64_t load_element(const uint8_t *elements, size_t index, int width) {
    uint64_t value = 0;
    memcpy(&value, elements + index * (size_t)width, (size_t)width);
    return value;
}

ALWAYS_INLINE void store_element(uint8_t *elements, size_t index, uint64_t value, int width) {
    memcpy(elements + index * (size_t)width, &value, (size_t)width);
}

ALWAYS_INLINE uint32_t position_at(const struct changes *changes, size_t index) { return load32(changes->positions + 4 * index); }

/* All ones in the low `count` bits, 0 <= count <= 64. */
ALWAYS_INLINE uint64_t low_bits(unsigned count) { return count >= 64 ? ~UINT64_C(0) : (UINT64_C(1) << count) - 1; }

/* bitlen(x) of FORMAT.md 1. */
ALWAYS_INLINE unsigned bit_length(uint64_t x) { return x ? 64u - (unsigned)__builtin_clzll(x) : 0; }

ALWAYS_INLINE unsigned trailing_zeros(uint64_t x) { return (unsigned)__builtin_ctzll(x); }

ALWAYS_INLINE bool fail(struct fault *fault, const char *what, const char *unit, uint64_t at) {
    *fault = (struct fault){what, unit, at};
    return false;
}

/* Writes up to 8 bytes past what it has written; who uses it has made sure of the room. */
struct writer {
    uint8_t *at;
    uint64_t bits;
    unsigned count;
};

ALWAYS_INLINE void write_bits(struct writer *writer, uint64_t value, unsigned count) {
    /* At most 56 bits, none set above them. */
    uint64_t bits = writer->bits | value << writer->count;
    unsigned held = writer->count + count;
    store64(writer->at, bits);
    writer->at += held >> 3;
    writer->bits = bits >> (held & 56);
    writer->count = held & 7;
}

ALWAYS_INLINE void write_field(struct writer *writer, uint64_t value, unsigned count) {
    if (count > 32) {
        write_bits(writer, value & UINT32_MAX, 32);
        value >>= 32;
        count -= 32;
    }
    write_bits(writer, value & low_bits(count), count);
}

static inline void write_gamma(struct writer *writer, uint64_t x) {
    unsigned low = bit_length(x) - 1;
    write_field(writer, 0, low);
    write_bits(writer, 1, 1);
    write_field(writer, x, low);
}

/* Fills the last byte with zero bits and returns the end. */
static inline uint8_t *write_end(struct writer *writer) { return writer->at + (writer->count > 0); }

/* Reads zeros past the end; `is_past_end` tells. */
struct reader {
    const uint8_t *data;
    size_t size;
    uint64_t bit;
};

static inline uint64_t load_tail(const struct reader *reader, uint64_t byte) {
    uint64_t value = 0;
    for (unsigned i = 0; i < 8 && byte + i < reader->size; i++) value |= (uint64_t)reader->data[byte + i] << 8 * i;
    return value;
}

/* The next bits, at least 57 of them valid. */
ALWAYS_INLINE uint64_t peek(const struct reader *reader) {
    uint64_t byte = reader->bit >> 3;
    uint64_t value = UNLIKELY(byte + 8 > reader->size) ? load_tail(reader, byte) : load64(reader->data + byte);
    return value >> (reader->bit & 7);
}

static inline bool is_past_end(const struct reader *reader) { return reader->bit > 8 * (uint64_t)reader->size; }

static inline uint64_t read_field(struct reader *reader, unsigned count) {
    uint64_t low = peek(reader) & low_bits(count < 32 ? count : 32);
    if (count <= 32) {
        reader->bit += count;
        return low;
    }
    reader->bit += 32;
    uint64_t high = peek(reader) & low_bits(count - 32);
    reader->bit += count - 32;
    return high << 32 | low;
}

/* Counts the zero bits before the next 1 bit and reads that too; false at the end of the stream. */
static inline bool read_zeros(struct reader *reader, uint64_t *count) {
    uint64_t zeros = 0;
    while (reader->bit < 8 * (uint64_t)reader->size) {
        uint64_t bits = peek(reader);
        if (bits) {
            zeros += trailing_zeros(bits);
            reader->bit += trailing_zeros(bits) + 1;
            *count = zeros;
            return true;
        }
        unsigned skipped = 64 - (unsigned)(reader->bit & 7);
        zeros += skipped;
        reader->bit += skipped;
    }
    return false;
}

static inline bool read_gamma(struct reader *reader, uint64_t *x) {
    uint64_t low;
    if (!read_zeros(reader, &low) || low > 63) return false;
    *x = UINT64_C(1) << low | read_field(reader, (unsigned)low);
    return !is_past_end(reader);
}

static inline bool malformed(struct fault *fault, const char *what, const struct reader *reader) {
    return fail(fault, what, "byte", reader->bit / 8 < reader->size ? reader->bit / 8 : reader->size);
}

/* Reads the zero bits up to the byte boundary. */
static inline bool read_end(struct reader *reader, struct fault *fault) {
    unsigned rest = -(unsigned)reader->bit & 7;
    if (is_past_end(reader)) return malformed(fault, "malformed block: the bit stream runs past the end", reader);
    if (read_field(reader, rest)) {
        reader->bit -= rest;
        return malformed(fault, "malformed block: bits after the end", reader);
    }
    return true;
}

static inline bool read_head(struct reader *reader, struct fault *fault) {
    if (!reader->size) return malformed(fault, "malformed block: no bytes", reader);
    if (read_field(reader, 1)) {
        reader->bit = 0;
        return malformed(fault, "malformed block: the block is in its whole form", reader);
    }
    return true;
}

#endif

/* The position code of FORMAT.md 5.3: which of the members of a set changed, as Rice-coded gaps. */
#ifndef DCR_POSITION_H
#define DCR_POSITION_H

#include "bits.h"

struct rice {
    uint64_t coded;
    unsigned parameter;
    bool inverted;
};

static inline struct rice rice_plan(uint64_t members, uint64_t changed) {
    struct rice rice = {.coded = changed, .inverted = 2 * changed > members};
    if (rice.inverted) rice.coded = members - changed;
    if (rice.coded) rice.parameter = bit_length((123 * (2 * (members - rice.coded) + rice.coded)) / (512 * rice.coded));
    return rice;
}

ALWAYS_INLINE void write_gap(struct writer *writer, uint64_t gap, unsigned parameter) {
    uint64_t zeros = gap >> parameter;
    uint64_t low = gap & low_bits(parameter);
    while (UNLIKELY(zeros + parameter >= 56)) {
        uint64_t part = zeros < 56 ? zeros : 56;
        write_bits(writer, 0, (unsigned)part);
        zeros -= part;
        if (!zeros) break;
    }
    write_bits(writer, (low << 1 | 1) << zeros, (unsigned)zeros + 1 + parameter);
}

static inline void write_positions(struct writer *writer, uint64_t members, const struct changes *changes) {
    struct rice rice = rice_plan(members, changes->count);
    uint64_t next = 0;
    if (!rice.inverted) {
        for (size_t i = 0; i < changes->count; i++) {
            uint32_t position = position_at(changes, i);
            write_gap(writer, position - next, rice.parameter);
            next = (uint64_t)position + 1;
        }
        return;
    }
    uint64_t run = 0;
    for (size_t i = 0; i <= changes->count; i++) {
        uint64_t end = i < changes->count ? position_at(changes, i) : members;
        for (; next < end; next++) {
            write_gap(writer, run, rice.parameter);
            run = 0;
        }
        run++;
        next++;
    }
}

/* The size of the code. */
static inline uint64_t count_position_bits(uint64_t members, const struct changes *changes) {
    struct rice rice = rice_plan(members, changes->count);
    uint64_t zeros = 0, next = 0, run = 0;
    for (size_t i = 0; i < changes->count; i++) {
        uint32_t position = position_at(changes, i);
        if (!rice.inverted) {
            zeros += (position - next) >> rice.parameter;
        } else if (position > next) {
            zeros += run >> rice.parameter;
            run = 0;
        }
        run++;
        next = (uint64_t)position + 1;
    }
    if (rice.inverted && next < members) zeros += run >> rice.parameter;
    return zeros + rice.coded * (rice.parameter + 1);
}

/* Reads one gap; a value above every possible position when the stream ends within it. */
static inline uint64_t read_gap(struct reader *reader, unsigned parameter) {
    uint64_t bits = peek(reader);
    unsigned zeros = bits ? trailing_zeros(bits) : 64;
    if (UNLIKELY(zeros + 1 + parameter > 57)) {
        uint64_t many;
        if (!read_zeros(reader, &many) || many > UINT32_MAX) return UINT64_MAX >> 1;
        return many << parameter | read_field(reader, parameter);
    }
    reader->bit += zeros + 1 + parameter;
    return (uint64_t)zeros << parameter | ((bits >> zeros >> 1) & low_bits(parameter));
}

/* Reads two gaps at once, half the time of one after the other, where they surely lie within the stream and are not long. */
ALWAYS_INLINE bool read_two_gaps(struct reader *reader, unsigned parameter, uint64_t gaps[2]) {
    uint64_t byte = reader->bit >> 3;
    if (UNLIKELY(byte + 8 > reader->size)) return false;
    uint64_t bits = load64(reader->data + byte) >> (reader->bit & 7), low = low_bits(parameter);
    /* A bit above those that are valid ends every count; such a gap is too long and not used. */
    unsigned first = trailing_zeros(bits | UINT64_C(1) << 63);
    uint64_t rest = bits >> first >> 1 >> parameter;
    unsigned second = trailing_zeros(rest | UINT64_C(1) << 63);
    unsigned used = first + second + 2 * (parameter + 1);
    if (UNLIKELY(used > 57)) return false;
    gaps[0] = (uint64_t)first << parameter | (bits >> first >> 1 & low);
    gaps[1] = (uint64_t)second << parameter | (rest >> second >> 1 & low);
    reader->bit += used;
    return true;
}

/* Reads which of `members` changed into `ranks`, which has room for `changed` <= members entries. */
static inline bool read_positions(struct reader *reader, uint64_t members, size_t changed, uint32_t *ranks, struct fault *fault) {
    struct rice rice = rice_plan(members, changed);
    uint64_t next = 0;
    size_t filled = 0;
    uint64_t i = 0;
    while (!rice.inverted && i + 2 <= rice.coded) {
        uint64_t gaps[2];
        if (UNLIKELY(!read_two_gaps(reader, rice.parameter, gaps))) {
            if (reader->bit / 8 + 8 > reader->size) break;
            gaps[0] = read_gap(reader, rice.parameter);
            gaps[1] = read_gap(reader, rice.parameter);
        }
        if (UNLIKELY(gaps[0] >= members - next || gaps[1] + 1 >= members - next - gaps[0]))
            return malformed(fault, "malformed block: a position outside", reader);
        ranks[i] = (uint32_t)(next + gaps[0]);
        ranks[i + 1] = (uint32_t)(next + gaps[0] + 1 + gaps[1]);
        next += gaps[0] + gaps[1] + 2;
        i += 2;
        filled += 2;
    }
    for (; i < rice.coded; i++) {
        uint64_t gap = read_gap(reader, rice.parameter);
        if (UNLIKELY(gap >= members - next)) return malformed(fault, "malformed block: a position outside", reader);
        if (rice.inverted) {
            if (gap > changed - filled) return malformed(fault, "malformed block: a position outside", reader);
            for (uint64_t j = 0; j < gap; j++) ranks[filled++] = (uint32_t)next++;
        } else {
            next += gap;
            ranks[filled++] = (uint32_t)next;
        }
        next++;
    }
    if (rice.inverted)
        while (filled < changed) ranks[filled++] = (uint32_t)next++;
    if (is_past_end(reader)) return malformed(fault, "malformed block: the bit stream runs past the end", reader);
    return true;
}

static inline bool check_positions(size_t members, const struct changes *changes, struct fault *fault) {
    uint64_t next = 0;
    if (!changes->count) return fail(fault, "no positions", "element", 0);
    for (size_t i = 0; i < changes->count; i++) {
        uint32_t position = position_at(changes, i);
        if (UNLIKELY(position < next)) return fail(fault, "positions not ascending", "element", i);
        if (UNLIKELY(position >= members)) return fail(fault, "position outside", "element", i);
        next = (uint64_t)position + 1;
    }
    return true;
}

#endif

/* Gap blocks and their Huffman codes, FORMAT.md 5.6 and 5.7. */
#ifndef DCR_GAP_H
#define DCR_GAP_H

#include "position.h"

/* Codes with their first bit lowest, as they stand in a stream; the escape is entry `table->count`. */
struct codes {
    uint16_t bits[MOST_SYMBOLS + 1];
    uint8_t length[MOST_SYMBOLS + 1];
    unsigned longest;
    bool has_escape;
};

static inline uint16_t reversed(unsigned code, unsigned length) {
    unsigned bits = 0;
    for (unsigned i = 0; i < length; i++) bits |= (code >> i & 1) << (length - 1 - i);
    return (uint16_t)bits;
}

static bool build_codes(int width, const struct table *table, struct codes *codes, struct fault *fault) {
    size_t entries = table->count + (table->escape_length >= 0);
    uint64_t limit = width < 4 ? UINT64_C(1) << 8 * width : UINT64_C(1) << 32, previous = 0;
    if (table->count > MOST_SYMBOLS || !entries) return fail(fault, "malformed table: no such number of symbols", "element", table->count);
    codes->has_escape = table->escape_length >= 0;
    for (size_t i = 0; i < table->count; i++) {
        uint64_t symbol = load64(table->symbols + 8 * i);
        if (symbol >= limit) return fail(fault, "malformed table: symbol out of range", "element", i);
        if (i && (table->lengths[i] < table->lengths[i - 1] || (table->lengths[i] == table->lengths[i - 1] && symbol <= previous)))
            return fail(fault, "malformed table: not sorted by length and symbol", "element", i);
        codes->length[i] = table->lengths[i];
        previous = symbol;
    }
    if (codes->has_escape) codes->length[table->count] = (uint8_t)(table->escape_length < 255 ? table->escape_length : 255);
    if (entries == 1) {
        if (codes->length[0]) return fail(fault, "malformed table: the code of a single entry is empty", "element", 0);
        codes->bits[0] = 0;
        codes->longest = 0;
        return true;
    }
    unsigned code = 0, length = 0;
    size_t next = 0;
    bool is_escape_due = codes->has_escape;
    for (size_t done = 0; done < entries; done++) {
        bool is_escape = is_escape_due && (next == table->count || codes->length[next] > codes->length[table->count]);
        size_t entry = is_escape ? table->count : next++;
        if (is_escape) is_escape_due = false;
        if (!codes->length[entry] || codes->length[entry] > LONGEST_CODE) return fail(fault, "malformed table: code length", "element", entry);
        code <<= codes->length[entry] - length;
        length = codes->length[entry];
        if (code >> length) return fail(fault, "malformed table: not a complete code", "element", entry);
        codes->bits[entry] = reversed(code++, length);
    }
    if (code != 1u << length) return fail(fault, "malformed table: not a complete code", "element", entries);
    codes->longest = length;
    return true;
}

/* Where the table has a symbol: slots hold entry + 1, found by hash and the slots after it. */
#define SLOTS 8192

static inline unsigned slot_of(uint64_t symbol) { return (unsigned)(symbol * UINT64_C(0x9E3779B97F4A7C15) >> 51); }

static inline void fill_slots(const struct table *table, uint16_t slots[SLOTS]) {
    memset(slots, 0, SLOTS * sizeof *slots);
    for (size_t i = 0; i < table->count; i++) {
        unsigned slot = slot_of(load64(table->symbols + 8 * i));
        while (slots[slot]) slot = (slot + 1) % SLOTS;
        slots[slot] = (uint16_t)(i + 1);
    }
}

/* The first entry of the symbol, or `table->count` where it has none. */
ALWAYS_INLINE size_t find_entry(const struct table *table, const uint16_t slots[SLOTS], uint64_t symbol) {
    unsigned slot = slot_of(symbol);
    for (; slots[slot]; slot = (slot + 1) % SLOTS)
        if (load64(table->symbols + 8 * (slots[slot] - 1u)) == symbol) return slots[slot] - 1u;
    return table->count;
}

ALWAYS_INLINE bool gap_encode_of(int width, size_t count, const struct changes *changes, const struct table *table, uint8_t *out,
                                 size_t *size, struct fault *fault) {
    struct codes codes;
    uint16_t slots[SLOTS];
    if (!check_positions(count, changes, fault) || !build_codes(width, table, &codes, fault)) return false;
    fill_slots(table, slots);
    struct writer writer = {.at = out};
    write_bits(&writer, 0, 1);
    write_gamma(&writer, changes->count);
    write_positions(&writer, count, changes);
    for (size_t i = 0; i < changes->count; i++) {
        uint64_t symbol = load_element(changes->values, i, width);
        size_t entry = find_entry(table, slots, symbol);
        if (UNLIKELY(entry == table->count && !codes.has_escape)) return fail(fault, "symbol without a code", "element", i);
        write_bits(&writer, codes.bits[entry], codes.length[entry]);
        if (entry == table->count) write_field(&writer, symbol, 8 * (unsigned)width);
    }
    *size = (size_t)(write_end(&writer) - out);
    return true;
}

static bool gap_encode(size_t count, int width, const struct changes *changes, const struct table *table, uint8_t *out, size_t *size,
                       struct fault *fault) {
    return FOR_WIDTH(width, gap_encode_of, count, changes, table, out, size, fault);
}

/* For the next `longest` bits of a stream: 16 * entry + code length. */
static inline void fill_lookup(const struct table *table, const struct codes *codes, uint16_t lookup[1 << LONGEST_CODE]) {
    for (size_t entry = 0; entry < table->count + codes->has_escape; entry++)
        for (unsigned bits = codes->bits[entry]; bits < 1u << codes->longest; bits += 1u << codes->length[entry])
            lookup[bits] = (uint16_t)(16 * entry + codes->length[entry]);
}

ALWAYS_INLINE bool gap_decode_of(int width, struct span stream, size_t count, const struct table *table, struct decoded *decoded,
                                 struct fault *fault) {
    struct codes codes;
    uint16_t lookup[1 << LONGEST_CODE];
    struct reader reader = {stream.data, stream.size, 0};
    uint64_t changed;
    if (!build_codes(width, table, &codes, fault) || !read_head(&reader, fault)) return false;
    fill_lookup(table, &codes, lookup);
    if (!read_gamma(&reader, &changed)) return malformed(fault, "malformed block: no count", &reader);
    if (changed > count) return malformed(fault, "malformed block: more changes than elements", &reader);
    decoded->count = (size_t)changed;
    if (!read_positions(&reader, count, decoded->count, decoded->positions, fault)) return false;
    for (size_t i = 0; i < decoded->count; i++) {
        unsigned found = lookup[peek(&reader) & low_bits(codes.longest)];
        reader.bit += found % 16;
        size_t entry = found / 16;
        uint64_t symbol = entry < table->count ? load64(table->symbols + 8 * entry) : read_field(&reader, 8 * (unsigned)width);
        if (UNLIKELY(is_past_end(&reader))) return malformed(fault, "malformed block: the bit stream runs past the end", &reader);
        store_element(decoded->values, i, symbol, width);
    }
    if (!read_end(&reader, fault)) return false;
    if (reader.bit / 8 < reader.size) return malformed(fault, "malformed block: bytes that nothing reads", &reader);
    return true;
}

static bool gap_decode(struct span stream, size_t count, int width, const struct table *table, struct decoded *decoded,
                       struct fault *fault) {
    return FOR_WIDTH(width, gap_decode_of, stream, count, table, decoded, fault);
}

static bool position_bits(size_t members, const struct changes *changes, uint64_t *bits, struct fault *fault) {
    if (!check_positions(members, changes, fault)) return false;
    *bits = 2 * bit_length(changes->count) - 1 + count_position_bits(members, changes);
    return true;
}

#endif

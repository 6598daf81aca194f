/* Context blocks, FORMAT.md 5.5, except the coder's section when encoding. */
#ifndef DCR_CONTEXT_H
#define DCR_CONTEXT_H

#include "classes.h"
#include "coder.h"
#include "position.h"

/* The top of the block coded last by this thread: the next one mostly has the same. */
static _Thread_local unsigned likely_top;

ALWAYS_INLINE uint64_t width_mask(int width) { return low_bits(8 * (unsigned)width); }

/* Given how many exponents are above top, and how many at least top: those of class 0. */
ALWAYS_INLINE bool is_top(const struct block *block, unsigned top, uint64_t above, uint64_t at_least) {
    return 256 * above <= block->count && (top == 0 || 256 * at_least > block->count);
}

ALWAYS_INLINE bool check_changes(int width, const struct block *block, const struct changes *changes, struct fault *fault) {
    if (!check_positions(block->count, changes, fault)) return false;
    for (size_t i = 0; i < changes->count; i++) {
        uint32_t position = position_at(changes, i);
        if (UNLIKELY(load_element(block->base, position, width) == load_element(block->target, position, width)))
            return fail(fault, "unchanged element", "element", i);
    }
    return true;
}

struct ranking {
    uint8_t *classes;
    uint8_t *signs;
    uint32_t *ranks;
    uint64_t members[CLASSES];
    uint32_t starts[CLASSES + 1];
};

/* Puts ranks, signs and magnitudes into coding order, given the members of each class before a chunk and its class bytes. */
ALWAYS_INLINE void place_change(int width, const struct block *block, uint32_t position, size_t place, uint64_t rank,
                                struct ranking *ranking, uint8_t *magnitudes) {
    uint64_t base = load_element(block->base, position, width), target = load_element(block->target, position, width);
    uint64_t difference = (target - base) & width_mask(width);
    uint64_t sign = difference >> (8 * width - 1);
    store_element(magnitudes, place, sign ? -difference : difference, width);
    ranking->signs[place] = (uint8_t)sign;
    ranking->ranks[place] = (uint32_t)rank;
}

/* Ranks every change within its class for an assumed top; false if that is not the block's top. */
ALWAYS_INLINE bool rank_changes(int width, const struct block *block, const struct changes *changes, unsigned top, struct ranking *ranking,
                                uint8_t *magnitudes) {
    uint32_t counts[CLASSES] = {0}, next[CLASSES];
    for (size_t i = 0; i < changes->count; i++) {
        uint64_t element = load_element(block->base, position_at(changes, i), width);
        unsigned class = class_of(exponent_of(element, block->exponent), top);
        ranking->classes[i] = (uint8_t)class;
        counts[class]++;
    }
    ranking->starts[0] = 0;
    for (unsigned c = 0; c < CLASSES; c++) ranking->starts[c + 1] = ranking->starts[c] + counts[c];
    memcpy(next, ranking->starts, sizeof next);

    uint64_t above = 0;
    size_t change = 0;
    memset(ranking->members, 0, sizeof ranking->members);
    for (size_t first = 0; first < block->count; first += CHUNK) {
        uint8_t classes[CHUNK];
        uint16_t chunk[CLASSES];
        size_t count = block->count - first < CHUNK ? block->count - first : CHUNK;
        above += classify_chunk(block->base + first * (size_t)width, count, width, block->exponent, top, classes);
        for (; change < changes->count; change++) {
            uint32_t position = position_at(changes, change);
            if (position >= first + count) break;
            unsigned class = ranking->classes[change];
            uint64_t rank = ranking->members[class] + rank_in_chunk(classes, class, (unsigned)(position - first));
            place_change(width, block, position, next[class]++, rank, ranking, magnitudes);
        }
        count_chunk(classes, chunk);
        for (unsigned c = 0; c < CLASSES; c++) ranking->members[c] += chunk[c];
    }
    return is_top(block, top, above, ranking->members[0]);
}

static inline void write_signs(struct writer *writer, const uint8_t *signs, size_t count) {
    size_t at = 0;
    for (; at + 8 <= count; at += 8) write_bits(writer, load64(signs + at) * UINT64_C(0x0102040810204080) >> 56, 8);
    for (; at < count; at++) write_bits(writer, signs[at], 1);
}

ALWAYS_INLINE bool context_draft_of(int width, const struct block *block, const struct changes *changes, struct draft *draft,
                                    struct fault *fault) {
    if (!check_changes(width, block, changes, fault)) return false;
    bool has_classes = block->exponent.bits > 0;
    unsigned class_count = has_classes ? CLASSES : 1;
    uint8_t *work = draft->work;
    struct ranking ranking = {.ranks = (uint32_t *)work, .classes = work + 4 * (changes->count + SLACK)};
    ranking.signs = ranking.classes + changes->count + SLACK;
    unsigned top = 0;
    if (has_classes) {
        top = likely_top & (unsigned)low_bits(block->exponent.bits);
        if (!rank_changes(width, block, changes, top, &ranking, draft->magnitudes)) {
            top = find_top(block);
            rank_changes(width, block, changes, top, &ranking, draft->magnitudes);
        }
        likely_top = top;
    } else {
        ranking.members[0] = block->count;
        ranking.starts[1] = (uint32_t)changes->count;
        for (size_t i = 0; i < changes->count; i++) {
            uint32_t position = position_at(changes, i);
            place_change(width, block, position, i, position, &ranking, draft->magnitudes);
        }
    }

    struct writer writer = {.at = draft->stream};
    write_bits(&writer, 0, 1);
    write_field(&writer, top, block->exponent.bits);
    for (unsigned c = 0; c < class_count; c++) {
        draft->class_counts[c] = ranking.starts[c + 1] - ranking.starts[c];
        write_gamma(&writer, (uint64_t)draft->class_counts[c] + 1);
    }
    for (unsigned c = 0; c < class_count; c++) {
        struct changes ranks = {.positions = (const uint8_t *)(ranking.ranks + ranking.starts[c]), .count = draft->class_counts[c]};
        if (ranks.count) write_positions(&writer, ranking.members[c], &ranks);
    }
    write_signs(&writer, ranking.signs, changes->count);
    draft->stream_size = (size_t)(write_end(&writer) - draft->stream);
    return true;
}

static bool context_draft(const struct block *block, const struct changes *changes, struct draft *draft, struct fault *fault) {
    return FOR_WIDTH(block->width, context_draft_of, block, changes, draft, fault);
}

/* Classifies the whole block; false if `top` is not its top. */
ALWAYS_INLINE bool classify_block(int width, const struct block *block, unsigned top, uint8_t *classes, uint16_t *chunk_counts,
                                  uint64_t members[CLASSES]) {
    uint64_t above = 0;
    for (size_t first = 0; first < block->count; first += CHUNK) {
        size_t count = block->count - first < CHUNK ? block->count - first : CHUNK;
        uint16_t *chunk = chunk_counts + first / CHUNK * CLASSES;
        above += classify_chunk(block->base + first * (size_t)width, count, width, block->exponent, top, classes + first);
        count_chunk(classes + first, chunk);
        for (unsigned c = 0; c < CLASSES; c++) members[c] += chunk[c];
    }
    return is_top(block, top, above, members[0]);
}

/* Turns ranks, `count[c]` of them for each class, ascending, into positions, in place. */
ALWAYS_INLINE void select_positions(const struct block *block, const uint8_t *classes, const uint16_t *chunk_counts,
                                    const uint32_t *starts, uint32_t *positions) {
    uint32_t next[CLASSES], passed[CLASSES] = {0};
    memcpy(next, starts, sizeof next);
    for (size_t chunk = 0; chunk < chunks_of(block->count); chunk++) {
        const uint8_t *chunk_classes = classes + chunk * CHUNK;
        for (unsigned c = 0; c < CLASSES; c++) {
            uint32_t end = passed[c] + chunk_counts[chunk * CLASSES + c];
            for (; next[c] < starts[c + 1] && positions[next[c]] < end; next[c]++)
                positions[next[c]] = (uint32_t)(chunk * CHUNK) + select_in_chunk(chunk_classes, c, positions[next[c]] - passed[c]);
            passed[c] = end;
        }
    }
}

/* Reads signs, then magnitudes, into the new bits of the changed elements. */
ALWAYS_INLINE bool decode_changes(int width, struct reader *reader, const struct block *block, const uint32_t *starts,
                                  const uint16_t *states, struct decoded *decoded, struct fault *fault) {
    struct reader signs = *reader;
    reader->bit += decoded->count;
    if (!read_end(reader, fault)) return false;
    uint16_t state[CLASSES][STATES];
    memcpy(state, states, sizeof state);
    const uint8_t *section = reader->data + (reader->bit + 7) / 8, *end = reader->data + reader->size;
    if (section < end && !end[-1]) return fail(fault, "malformed block: the section ends with a zero byte", "byte", reader->size - 1);
    struct decoder decoder = decoder_start(section, end);
    for (unsigned class = 0; class < CLASSES; class++) {
        for (uint32_t i = starts[class]; i < starts[class + 1]; i++, signs.bit++) {
            uint64_t sign = reader->data[signs.bit >> 3] >> (signs.bit & 7) & 1;
            uint64_t magnitude = decode_magnitude(&decoder, state[class], 8 * (unsigned)width);
            if (UNLIKELY(!magnitude || magnitude - sign >= UINT64_C(1) << (8 * width - 1)))
                return fail(fault, "malformed block: a magnitude out of range", "byte", (uint64_t)(decoder.next - reader->data));
            uint64_t base = load_element(block->base, decoded->positions[i], width);
            store_element(decoded->values, i, sign ? base - magnitude : base + magnitude, width);
        }
    }
    if (decoder.next < end) return fail(fault, "malformed block: bytes that nothing reads", "byte", (uint64_t)(decoder.next - reader->data));
    return true;
}

ALWAYS_INLINE bool context_decode_of(int width, struct span stream, const struct block *block, const uint16_t *states,
                                     struct decoded *decoded, struct fault *fault) {
    struct reader reader = {stream.data, stream.size, 0};
    uint8_t *classes = decoded->work;
    uint16_t *chunk_counts = (uint16_t *)(void *)(classes + chunks_of(block->count) * CHUNK);
    uint64_t members[CLASSES] = {0};
    uint32_t starts[CLASSES + 1] = {0};
    bool has_classes = block->exponent.bits > 0;
    if (!read_head(&reader, fault)) return false;
    if (has_classes) {
        unsigned top = (unsigned)read_field(&reader, block->exponent.bits);
        if (is_past_end(&reader)) return malformed(fault, "malformed block: the bit stream runs past the end", &reader);
        if (!classify_block(width, block, top, classes, chunk_counts, members))
            return malformed(fault, "malformed block: the top exponent is not that of the base", &reader);
    } else {
        members[0] = block->count;
    }
    for (unsigned c = 0; c < CLASSES; c++) {
        uint64_t count = 1;
        if ((c == 0 || has_classes) && !read_gamma(&reader, &count)) return malformed(fault, "malformed block: no count", &reader);
        if (count - 1 > members[c]) return malformed(fault, "malformed block: more changes than the class has members", &reader);
        starts[c + 1] = starts[c] + (uint32_t)(count - 1);
    }
    decoded->count = starts[CLASSES];
    if (!decoded->count) return malformed(fault, "malformed block: a block without changes", &reader);
    for (unsigned c = 0; c < CLASSES; c++) {
        uint32_t changed = starts[c + 1] - starts[c];
        if (changed && !read_positions(&reader, members[c], changed, decoded->positions + starts[c], fault)) return false;
    }
    if (has_classes) select_positions(block, classes, chunk_counts, starts, decoded->positions);
    return decode_changes(width, &reader, block, starts, states, decoded, fault);
}

static bool context_decode(struct span stream, const struct block *block, const uint16_t *states, struct decoded *decoded,
                           struct fault *fault) {
    return FOR_WIDTH(block->width, context_decode_of, stream, block, states, decoded, fault);
}

#endif

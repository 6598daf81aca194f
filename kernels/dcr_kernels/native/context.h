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

/* The changes of a block on their way into coding order. */
struct ranking {
    uint64_t *differences;
    uint32_t *ranks;
    uint8_t *classes;
    uint8_t *signs;
    uint64_t members[CLASSES];
    uint32_t starts[CLASSES + 1];
};

ALWAYS_INLINE bool find_differences(int width, const struct block *block, const struct changes *changes, struct ranking *ranking,
                                    struct fault *fault) {
    const uint8_t *base = block->base, *target = block->target;
    uint64_t *differences = ranking->differences;
    for (size_t i = 0, next = 0; i < changes->count; i++) {
        size_t position = position_at(changes, i);
        if (UNLIKELY(position < next || position >= block->count)) return check_positions(block->count, changes, fault);
        next = position + 1;
        differences[i] = (load_element(target, position, width) - load_element(base, position, width)) & width_mask(width);
        if (UNLIKELY(!differences[i])) return fail(fault, "unchanged element", "element", i);
    }
    return changes->count || check_positions(block->count, changes, fault);
}

/* Finds the class of each change for an assumed top, and where each class starts in coding order. */
ALWAYS_INLINE void find_classes(int width, const struct block *block, const struct changes *changes, unsigned top, struct ranking *ranking) {
    struct field exponent = block->exponent;
    const uint8_t *base = block->base, *positions = changes->positions;
    uint8_t *classes = ranking->classes;
    size_t count = changes->count;
    for (size_t i = 0; i < count; i++)
        classes[i] = (uint8_t)class_of(exponent_of(load_element(base, load32(positions + 4 * i), width), exponent), top);
    memset(classes + count, PADDING, CHUNK);
    uint32_t counts[CLASSES] = {0};
    for (size_t i = 0; i < count; i += CHUNK) {
        uint16_t part[CLASSES] = {0};
        count_chunk(classes + i, part);
        for (unsigned c = 0; c < CLASSES; c++) counts[c] += part[c];
    }
    ranking->starts[0] = 0;
    for (unsigned c = 0; c < CLASSES; c++) ranking->starts[c + 1] = ranking->starts[c] + counts[c];
}

ALWAYS_INLINE void place_change(int width, const struct ranking *ranking, size_t change, size_t place, uint64_t rank, uint8_t *magnitudes) {
    uint64_t difference = ranking->differences[change], sign = difference >> (8 * width - 1);
    store_element(magnitudes, place, (difference ^ -sign) + sign, width);
    ranking->signs[place] = (uint8_t)sign;
    ranking->ranks[place] = (uint32_t)rank;
}

/* Ranks every change within its class for an assumed top; false if that is not the block's top. */
ALWAYS_INLINE bool rank_changes(int width, const struct block *block, const struct changes *changes, unsigned top, struct ranking *ranking,
                                uint8_t *magnitudes) {
    uint8_t classes[GROUP * CHUNK];
    uint16_t starts[GROUP][CLASSES], group[CLASSES];
    uint64_t above = 0, members[CLASSES] = {0};
    uint32_t next[CLASSES];
    size_t change = 0;
    find_classes(width, block, changes, top, ranking);
    memcpy(next, ranking->starts, sizeof next);
    /* A copy whose address nobody has, so that stores of bytes cannot be stores to it. */
    const struct ranking places = *ranking;
    for (size_t first = 0; first < block->count; first += GROUP * CHUNK) {
        size_t count = block->count - first < GROUP * CHUNK ? block->count - first : GROUP * CHUNK;
        above += classify_group(width, block, first, count, top, classes, starts, group);
        if (256 * above > block->count) return false;
        for (; change < changes->count; change++) {
            size_t at = position_at(changes, change) - first;
            if (at >= count) break;
            unsigned class = places.classes[change];
            uint64_t rank = members[class] + starts[at / CHUNK][class];
            rank += rank_in_chunk(classes + at / CHUNK * CHUNK, class, at % CHUNK);
            place_change(width, &places, change, next[class]++, rank, magnitudes);
        }
        for (unsigned c = 0; c < CLASSES; c++) members[c] += group[c];
    }
    memcpy(ranking->members, members, sizeof members);
    return is_top(block, top, above, members[0]);
}

static inline void write_signs(struct writer *writer, const uint8_t *signs, size_t count) {
    size_t at = 0;
    for (; at + 8 <= count; at += 8) write_bits(writer, load64(signs + at) * UINT64_C(0x0102040810204080) >> 56, 8);
    for (; at < count; at++) write_bits(writer, signs[at], 1);
}

ALWAYS_INLINE bool context_draft_of(int width, const struct block *block, const struct changes *changes, struct draft *draft,
                                    struct fault *fault) {
    size_t room = changes->count + CHUNK;
    struct ranking ranking = {.differences = (uint64_t *)(void *)draft->work};
    ranking.ranks = (uint32_t *)(ranking.differences + room);
    ranking.classes = (uint8_t *)(ranking.ranks + room);
    ranking.signs = ranking.classes + room;
    if (!find_differences(width, block, changes, &ranking, fault)) return false;
    bool has_classes = block->exponent.bits > 0;
    unsigned class_count = has_classes ? CLASSES : 1, top = 0;
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
        for (size_t i = 0; i < changes->count; i++) place_change(width, &ranking, i, i, position_at(changes, i), draft->magnitudes);
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

/* The classes of a block while it is decoded; see decode_work_bytes. */
struct map {
    uint8_t *classes;
    /* For each group the members before each chunk, and those of the group. */
    uint16_t (*starts)[CLASSES][GROUP];
    uint16_t (*groups)[CLASSES];
    uint64_t members[CLASSES];
};

/* Classifies the whole block; false if `top` is not its top. */
ALWAYS_INLINE bool classify_block(int width, const struct block *block, unsigned top, struct map *map) {
    uint64_t above = 0, members[CLASSES] = {0};
    for (size_t group = 0; group < groups_of(block->count); group++) {
        uint16_t starts[GROUP][CLASSES];
        size_t first = group * GROUP * CHUNK;
        size_t count = block->count - first < GROUP * CHUNK ? block->count - first : GROUP * CHUNK;
        above += classify_group(width, block, first, count, top, map->classes + first, starts, map->groups[group]);
        /* A chunk that is not there starts above every rank. */
        for (size_t chunk = chunks_of(count); chunk < GROUP; chunk++) memset(starts[chunk], 127, sizeof starts[chunk]);
        transpose_group((const uint16_t (*)[CLASSES])starts, map->starts[group]);
        for (unsigned c = 0; c < CLASSES; c++) members[c] += map->groups[group][c];
    }
    memcpy(map->members, members, sizeof members);
    return is_top(block, top, above, members[0]);
}

/* Turns the ranks of all classes, ascending in each, into positions, in place. Group by group, since a group's classes stay in
 * the fastest cache. */
ALWAYS_INLINE void select_positions(const struct map *map, size_t groups, const uint32_t starts[CLASSES + 1], uint32_t *positions) {
    uint32_t next[CLASSES], before[CLASSES] = {0};
    memcpy(next, starts, sizeof next);
    for (size_t group = 0; group < groups; group++) {
        const uint8_t *classes = map->classes + group * GROUP * CHUNK;
        for (unsigned c = 0; c < CLASSES; c++) {
            const uint16_t *chunk_starts = map->starts[group][c];
            uint32_t at = next[c], end = starts[c + 1], passed = before[c], members = map->groups[group][c];
            /* Two loops, for each has a short chain of operations that depend on each other. */
            for (; at < end && positions[at] - passed < members; at++) {
                unsigned rank = positions[at] - passed, chunk = count_at_most(chunk_starts, rank) - 1;
                positions[at] = chunk * CHUNK + (rank - chunk_starts[chunk]);
            }
            for (uint32_t i = next[c]; i < at; i++) {
                uint32_t chunk = positions[i] / CHUNK, within = select_in_chunk(classes + chunk * CHUNK, c, positions[i] % CHUNK);
                positions[i] = (uint32_t)(group * GROUP * CHUNK) + chunk * CHUNK + within;
            }
            next[c] = at;
            before[c] = passed + members;
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
    struct map map = {.starts = (void *)decoded->work, .members = {block->count}};
    map.groups = (void *)(map.starts + groups_of(block->count));
    map.classes = (void *)(map.groups + groups_of(block->count));
    uint32_t starts[CLASSES + 1] = {0};
    bool has_classes = block->exponent.bits > 0;
    if (!read_head(&reader, fault)) return false;
    if (has_classes) {
        unsigned top = (unsigned)read_field(&reader, block->exponent.bits);
        if (is_past_end(&reader)) return malformed(fault, "malformed block: the bit stream runs past the end", &reader);
        if (!classify_block(width, block, top, &map))
            return malformed(fault, "malformed block: the top exponent is not that of the base", &reader);
    }
    for (unsigned c = 0; c < CLASSES; c++) {
        uint64_t count = 1;
        if ((c == 0 || has_classes) && !read_gamma(&reader, &count)) return malformed(fault, "malformed block: no count", &reader);
        if (count - 1 > map.members[c]) return malformed(fault, "malformed block: more changes than the class has members", &reader);
        starts[c + 1] = starts[c] + (uint32_t)(count - 1);
    }
    decoded->count = starts[CLASSES];
    if (!decoded->count) return malformed(fault, "malformed block: a block without changes", &reader);
    for (unsigned c = 0; c < CLASSES; c++) {
        uint32_t changed = starts[c + 1] - starts[c];
        if (changed && !read_positions(&reader, map.members[c], changed, decoded->positions + starts[c], fault)) return false;
    }
    if (has_classes) select_positions(&map, groups_of(block->count), starts, decoded->positions);
    return decode_changes(width, &reader, block, starts, states, decoded, fault);
}

static bool context_decode(struct span stream, const struct block *block, const uint16_t *states, struct decoded *decoded,
                           struct fault *fault) {
    return FOR_WIDTH(block->width, context_decode_of, stream, block, states, decoded, fault);
}

#endif

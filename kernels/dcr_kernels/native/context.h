/* Context blocks, FORMAT.md 5.5: drafts, which lack the section of the coder, and decoding. */
#ifndef DCR_CONTEXT_H
#define DCR_CONTEXT_H

#include "classes.h"
#include "coder.h"
#include "digest.h"
#include "position.h"

/* The top of a sample from all over the block, mostly that of the whole block, too. The one before, in the same thread, is tried
 * first. */
static unsigned likely_top_of(const struct block *block) {
    enum { PIECES = 128, LENGTH = 32 };
    static _Thread_local unsigned last;
    uint8_t elements[PIECES * LENGTH * 8];
    size_t piece = LENGTH * (size_t)block->width, stride = block->count / PIECES * (size_t)block->width;
    struct block sample = *block;
    if (stride > piece) {
        for (size_t i = 0; i < PIECES; i++) memcpy(elements + i * piece, block->base + i * stride, piece);
        sample.base = elements;
        sample.count = PIECES * LENGTH;
    }
    unsigned top = last & (unsigned)low_bits(block->exponent.bits);
    if (!is_enough(&sample, top) || (top && is_enough(&sample, top - 1))) top = find_top(&sample);
    last = top;
    return top;
}

ALWAYS_INLINE uint64_t width_mask(int width) { return low_bits(8 * (unsigned)width); }

/* Given how many exponents are above top, and how many at least top: those of class 0. */
ALWAYS_INLINE bool is_top(const struct block *block, unsigned top, uint64_t above, uint64_t at_least) {
    return 256 * above <= block->count && (top == 0 || 256 * at_least > block->count);
}

/* The changes of a block on their way into coding order: for each its class, and its rank in that class among those of the groups
 * that were gone through. Then the same ranks, and the signs, in coding order. See draft_work_bytes. */
struct ranking {
    uint32_t *ranks, *ordered_ranks;
    uint8_t *classes, *ordered_signs;
    size_t ranked;
    uint64_t above;
    uint32_t members[CLASSES];
};

static inline struct ranking start_ranking(uint8_t *work, size_t room) {
    struct ranking ranking = {.ranks = (uint32_t *)(void *)work};
    ranking.ordered_ranks = ranking.ranks + room + CHUNK;
    ranking.classes = (uint8_t *)(ranking.ordered_ranks + room + CHUNK);
    ranking.ordered_signs = ranking.classes + room + CHUNK;
    return ranking;
}

/* Ranks the changes in the group of elements that begins at `first`, for an assumed top. */
ALWAYS_INLINE void rank_group(int width, const struct block *block, size_t first, unsigned top, const struct changes *changes,
                              uintptr_t ahead, struct ranking *ranking) {
    uint8_t classes[GROUP * CHUNK];
    uint16_t starts[GROUP][CLASSES], members[CLASSES];
    size_t count = group_size(block, first), change = ranking->ranked;
    ranking->above += classify_group(width, block, first, count, top, ahead, classes, starts, members);
    /* A copy whose address nobody has, so that stores of bytes cannot be stores to it. */
    const struct ranking before = *ranking;
    for (; change < changes->count; change++) {
        size_t at = position_at(changes, change) - first;
        if (at >= count) break;
        unsigned class = classes[at];
        unsigned within = rank_in_chunk(classes + at / CHUNK * CHUNK, class, at % CHUNK);
        before.classes[change] = (uint8_t)class;
        before.ranks[change] = before.members[class] + starts[at / CHUNK][class] + within;
    }
    ranking->ranked = change;
    for (unsigned c = 0; c < CLASSES; c++) ranking->members[c] += members[c];
}

/* Ranks all changes for an assumed top; false if it is not the block's top. */
ALWAYS_INLINE bool rank_block(int width, const struct block *block, unsigned top, const struct changes *changes, struct ranking *ranking) {
    for (size_t first = 0; first < block->count; first += GROUP * CHUNK) {
        rank_group(width, block, first, top, changes, 0, ranking);
        if (256 * ranking->above > block->count) return false;
    }
    return is_top(block, top, ranking->above, ranking->members[0]);
}

static inline void write_signs(struct writer *writer, const uint8_t *signs, size_t count) {
    size_t at = 0;
    for (; at + 8 <= count; at += 8) write_bits(writer, load64(signs + at) * UINT64_C(0x0102040810204080) >> 56, 8);
    for (; at < count; at++) write_bits(writer, signs[at], 1);
}

/* Brings ranked changes into coding order and writes the stream. */
ALWAYS_INLINE void write_draft(int width, const struct block *block, unsigned top, const struct changes *changes, const uint8_t *old,
                               const struct ranking *ranking, struct draft *draft) {
    const struct ranking order = *ranking;
    uint8_t *magnitudes = draft->magnitudes;
    uint32_t counts[CLASSES] = {0}, starts[CLASSES + 1] = {0}, next[CLASSES];
    for (size_t i = 0; i < changes->count; i++) counts[order.classes[i]]++;
    for (unsigned c = 0; c < CLASSES; c++) starts[c + 1] = starts[c] + counts[c];
    memcpy(next, starts, sizeof next);
    for (size_t i = 0; i < changes->count; i++) {
        uint32_t place = next[order.classes[i]]++;
        uint64_t difference = (load_element(changes->values, i, width) - load_element(old, i, width)) & width_mask(width);
        uint64_t sign = difference >> (8 * width - 1);
        store_element(magnitudes, place, (difference ^ -sign) + sign, width);
        order.ordered_signs[place] = (uint8_t)sign;
        order.ordered_ranks[place] = order.ranks[i];
    }

    unsigned class_count = block->exponent.bits ? CLASSES : 1;
    struct writer writer = {.at = draft->stream};
    write_bits(&writer, 0, 1);
    write_field(&writer, top, block->exponent.bits);
    memcpy(draft->class_counts, counts, class_count * sizeof *counts);
    for (unsigned c = 0; c < class_count; c++) write_gamma(&writer, (uint64_t)counts[c] + 1);
    for (unsigned c = 0; c < class_count; c++) {
        struct changes ranks = {.positions = (const uint8_t *)(order.ordered_ranks + starts[c]), .count = counts[c]};
        if (ranks.count) write_positions(&writer, order.members[c], &ranks);
    }
    write_signs(&writer, order.ordered_signs, changes->count);
    draft->stream_size = (size_t)(write_end(&writer) - draft->stream);
}

/* Drafts a block with these changes, at least one, of which nothing is known but that `top` is not the block's top. */
ALWAYS_INLINE void draft_block(int width, const struct block *block, const struct changes *changes, const uint8_t *old, size_t room,
                               struct draft *draft) {
    struct ranking ranking = start_ranking(draft->work, room);
    unsigned top = 0;
    if (block->exponent.bits) {
        top = find_top(block);
        rank_block(width, block, top, changes, &ranking);
    } else {
        ranking.members[0] = (uint32_t)block->count;
        memset(ranking.classes, 0, changes->count);
        memcpy(ranking.ranks, changes->positions, 4 * changes->count);
    }
    write_draft(width, block, top, changes, old, &ranking, draft);
}

/* Drafts a block of which the changes, their ranks and the members of its classes are known. */
ALWAYS_INLINE bool draft_of(int width, const struct ranked *known, struct draft *draft, struct fault *fault) {
    struct ranking ranking = start_ranking(draft->work, known->changed);
    struct block block = {.width = width, .exponent = known->exponent};
    uint32_t least[CLASSES] = {0};
    memcpy(ranking.members, known->members, (known->exponent.bits ? CLASSES : 1) * sizeof *ranking.members);
    for (size_t i = 0; i < known->changed; i++) {
        unsigned class = class_of(exponent_of(load_element(known->old, i, width), known->exponent), known->top);
        uint32_t rank = load32(known->ranks + 4 * i);
        if (UNLIKELY(rank >= ranking.members[class])) return fail(fault, "no such member of its class", "element", i);
        if (UNLIKELY(rank < least[class])) return fail(fault, "ranks not ascending in a class", "element", i);
        least[class] = rank + 1;
        ranking.classes[i] = (uint8_t)class;
        ranking.ranks[i] = rank;
    }
    struct changes changes = {.values = known->new, .count = known->changed};
    write_draft(width, &block, known->top, &changes, known->old, &ranking, draft);
    return true;
}

static bool draft(const struct ranked *known, struct draft *draft, struct fault *fault) {
    return FOR_WIDTH(known->width, draft_of, known, draft, fault);
}

/* The classes of a block while it is decoded; see decode_work_bytes. */
struct map {
    uint8_t *classes;
    /* For each group the members before each chunk, and those of the group. */
    uint16_t (*starts)[CLASSES][GROUP];
    uint16_t (*groups)[CLASSES];
    uint64_t members[CLASSES];
};

/* Goes over the whole block once: classes, digest, copy. False if `top` is not its top. */
ALWAYS_INLINE bool classify_block(int width, const struct block *block, unsigned top, struct map *map, struct decoded *decoded) {
    uint64_t above = 0, members[CLASSES] = {0};
    four_sums sums = {0};
    for (size_t group = 0; group < groups_of(block->count); group++) {
        uint16_t starts[GROUP][CLASSES];
        size_t first = group * GROUP * CHUNK, count = group_size(block, first), bytes = count * (size_t)width;
        const uint8_t *base = block->base + first * (size_t)width;
        above += classify_group(width, block, first, count, top, bytes, map->classes + first, starts, map->groups[group]);
        /* A chunk that is not there starts above every rank. */
        for (size_t chunk = chunks_of(count); chunk < GROUP; chunk++) memset(starts[chunk], 127, sizeof starts[chunk]);
        transpose_group((const uint16_t (*)[CLASSES])starts, map->starts[group]);
        for (unsigned c = 0; c < CLASSES; c++) members[c] += map->groups[group][c];
        bool is_copied = decoded->out && decoded->out != block->base;
        uint8_t *out = is_copied ? decoded->out + first * (size_t)width : NULL;
        sums += digest_of((struct span){base, bytes}, decoded->offset + first * (size_t)width, out ? (uintptr_t)out - (uintptr_t)base : 0);
        if (out) memcpy(out, base, bytes);
    }
    memcpy(map->members, members, sizeof members);
    memcpy(decoded->sums, &sums, sizeof sums);
    return is_top(block, top, above, members[0]);
}

/* Turns the differences of changes begin .. end into new bits, and patches them in. */
ALWAYS_INLINE void add_differences(int width, const struct block *block, size_t begin, size_t end, const struct decoded *decoded,
                                   four_sums *growth, struct row_cache *rows) {
    const struct decoded to = *decoded;
    for (size_t i = begin; i < end; i++) {
        uint32_t position = to.positions[i];
        uint64_t old = load_element(block->base, position, width), new = (old + load_element(to.values, i, width)) & width_mask(width);
        store_element(to.values, i, new, width);
        if (to.out) store_element(to.out, position, new, width);
        add_change(width, growth, rows, to.offset + (uint64_t)position * (unsigned)width, old, new);
    }
}

/* Turns the ranks of all classes, ascending in each, into positions, and differences into new bits, in place. Group by group, since
 * a group's classes stay in the fastest cache. */
ALWAYS_INLINE void place_changes(int width, const struct block *block, const struct map *map, const uint32_t starts[CLASSES + 1],
                                 struct decoded *decoded) {
    uint32_t next[CLASSES], before[CLASSES] = {0}, *positions = decoded->positions;
    four_sums growth = {0};
    struct row_cache rows;
    start_rows(&rows);
    memcpy(next, starts, sizeof next);
    for (size_t group = 0; group < groups_of(block->count); group++) {
        const uint8_t *classes = map->classes + group * GROUP * CHUNK;
        uint32_t from[CLASSES];
        memcpy(from, next, sizeof from);
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
                __builtin_prefetch(block->base + (size_t)positions[i] * (unsigned)width);
                if (decoded->out) __builtin_prefetch(decoded->out + (size_t)positions[i] * (unsigned)width, 1);
            }
            next[c] = at;
            before[c] = passed + members;
        }
        for (unsigned c = 0; c < CLASSES; c++)
            add_differences(width, block, from[c], next[c], decoded, &growth, &rows);
    }
    memcpy(decoded->growth, &growth, sizeof growth);
}

/* Reads signs, then magnitudes, as differences of the changed elements. */
ALWAYS_INLINE bool decode_differences(int width, struct reader *reader, const uint32_t *starts, const uint16_t *states,
                                      struct decoded *decoded, struct fault *fault) {
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
            store_element(decoded->values, i, (magnitude ^ -sign) + sign, width);
        }
    }
    if (decoder.next < end) return fail(fault, "malformed block: bytes that nothing reads", "byte", (uint64_t)(decoder.next - reader->data));
    return true;
}

/* What classify_block and place_changes do, without classes. */
ALWAYS_INLINE void place_without_classes(int width, const struct block *block, struct decoded *decoded) {
    four_sums growth = {0};
    struct row_cache rows;
    start_rows(&rows);
    digest((struct span){block->base, block->count * (size_t)width}, decoded->offset, decoded->sums);
    if (decoded->out && decoded->out != block->base) memcpy(decoded->out, block->base, block->count * (size_t)width);
    add_differences(width, block, 0, decoded->count, decoded, &growth, &rows);
    memcpy(decoded->growth, &growth, sizeof growth);
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
        if (!classify_block(width, block, top, &map, decoded))
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
    if (!decode_differences(width, &reader, starts, states, decoded, fault)) return false;
    if (has_classes) place_changes(width, block, &map, starts, decoded);
    else place_without_classes(width, block, decoded);
    return true;
}

static bool context_decode(struct span stream, const struct block *block, const uint16_t *states, struct decoded *decoded,
                           struct fault *fault) {
    return FOR_WIDTH(block->width, context_decode_of, stream, block, states, decoded, fault);
}

#endif

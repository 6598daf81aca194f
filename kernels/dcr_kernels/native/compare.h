/* All that is done with a block that has two sides, in one pass: changes, digests and, up to the magnitudes, its context form.
 *
 * A group at a time, so that what one step has read is in the nearest caches for the next ones. The first step, the scan, asks for
 * the group after it.
 */
#ifndef DCR_COMPARE_H
#define DCR_COMPARE_H

#include "changes.h"
#include "context.h"
#include "digest.h"

/* One change in so many elements is seldom the third one of its 64. */
#define SPARSE 60

/* Old and new bits of the changes from number `from` on, which lie in the group that begins at `first`. */
ALWAYS_INLINE void load_sides(int width, const uint8_t *base, const uint8_t *target, uint32_t first, size_t from, const struct comparison *found) {
    const struct comparison to = *found;
    for (size_t i = from; i < to.changed; i++) {
        uint32_t at = to.positions[i] - first;
        store_element(to.old, i, load_element(base, at, width), width);
        store_element(to.new, i, load_element(target, at, width), width);
    }
}

ALWAYS_INLINE void compare_of(int width, const struct block *block, struct comparison *found) {
    struct draft *draft = found->draft;
    struct ranking ranking = {0};
    bool are_sparse = true, is_ranked = draft && block->exponent.bits;
    unsigned top = 0;
    size_t ranked_to = 0;
    four_sums base_sums = {0};
    if (is_ranked) ranking = start_ranking(draft->work, block->count);
    found->changed = 0;
    for (size_t first = 0; first < block->count; first += GROUP * CHUNK) {
        size_t count = group_size(block, first), bytes = count * (size_t)width;
        const uint8_t *base = block->base + first * (size_t)width, *target = block->target + first * (size_t)width;
        size_t from = found->changed;
        found->changed += are_sparse ? scan_of(width, base, target, count, (uint32_t)first, true, found->positions + from)
                                     : scan_of(width, base, target, count, (uint32_t)first, false, found->positions + from);
        are_sparse = SPARSE * (found->changed - from) < count;
        load_sides(width, base, target, (uint32_t)first, from, found);
        base_sums += digest_of((struct span){base, bytes}, found->offset + first * (size_t)width, bytes);
        if (!is_ranked || !found->changed) continue;
        struct changes changes = {.positions = (const uint8_t *)found->positions, .count = found->changed};
        if (!ranked_to) top = likely_top_of(block);
        for (; ranked_to <= first; ranked_to += GROUP * CHUNK) rank_group(width, block, ranked_to, top, &changes, (uintptr_t)target + bytes - (uintptr_t)base, &ranking);
        is_ranked = 256 * ranking.above <= block->count;
    }
    struct changes changes = {(const uint8_t *)found->positions, found->new, found->changed};
    memcpy(found->sums, &base_sums, sizeof base_sums);
    digest_changes(&changes, found->old, width, found->offset, found->growth);
    if (!draft || !found->changed) return;
    if (is_ranked && is_top(block, top, ranking.above, ranking.members[0]))
        write_draft(width, block, top, &changes, found->old, &ranking, draft);
    else draft_block(width, block, &changes, found->old, block->count, draft);
}

static void compare(const struct block *block, struct comparison *found) { FOR_WIDTH(block->width, compare_of, block, found); }

#endif

/* Copies boxes of strided elements: what layouts take from one tensor to another. */
#ifndef DCR_COPY_H
#define DCR_COPY_H

#include "simd.h"

/* A tile of so many elements each way is turned at once, in memory whose rows do not fall on the same lines of a cache. */
#define TILE(width) ((width) <= 2 ? 64 : 32)
#define TILE_ROW(width) ((TILE(width) + 4) * (width))
#define TILE_BYTES (32 * TILE_ROW(8))

/* Copies `rows` runs of `run` elements; the runs are contiguous on both sides if their step is 1 on both. */
ALWAYS_INLINE void copy_runs(int width, uint8_t *out, const uint8_t *source, const struct axis *row, const struct axis *run) {
    size_t bytes = run->count * (size_t)width;
    bool is_contiguous = run->out == 1 && run->source == 1;
    for (size_t r = 0; r < row->count; r++) {
        uint8_t *to = out + r * row->out * (size_t)width;
        const uint8_t *from = source + r * row->source * (size_t)width;
        if (is_contiguous) {
            memcpy(to, from, bytes);
            continue;
        }
        for (size_t i = 0; i < run->count; i++) store_element(to, i * run->out, load_element(from, i * run->source, width), width);
    }
}

/* Turns a square of SQUARE elements each way: its rows become columns. Steps are in bytes. Each round deals the vectors out in turn, like the
 * two halves of a pack of cards; after log2(SQUARE) of them each holds a column. */
#ifdef WITH_ZIP
#define SQUARE(width) (16 / (width))
ALWAYS_INLINE void turn_square(int width, uint8_t *out, size_t out_step, const uint8_t *source, size_t source_step) {
    vector16 rows[16], dealt[16];
    for (int i = 0; i < SQUARE(width); i++) rows[i] = load16_bytes(source + (size_t)i * source_step);
    for (int round = 1; round < SQUARE(width); round *= 2) {
        for (int i = 0; i < SQUARE(width) / 2; i++) {
            dealt[2 * i] = zip_low(rows[i], rows[i + SQUARE(width) / 2], width);
            dealt[2 * i + 1] = zip_high(rows[i], rows[i + SQUARE(width) / 2], width);
        }
        for (int i = 0; i < SQUARE(width); i++) rows[i] = dealt[i];
    }
    for (int i = 0; i < SQUARE(width); i++) store16_bytes(out + (size_t)i * out_step, rows[i]);
}
#else
#define SQUARE(width) 1
ALWAYS_INLINE void turn_square(int width, uint8_t *out, size_t out_step, const uint8_t *source, size_t source_step) {
    (void)out_step, (void)source_step;
    memcpy(out, source, (size_t)width);
}
#endif

/* Copies a tile whose rows are contiguous in `source`, and whose columns are contiguous in `out`, by way of `kept`: squares of it, and one
 * by one what is left beside them. */
ALWAYS_INLINE void turn_tile(int width, uint8_t *out, size_t out_step, const uint8_t *source, size_t source_step, size_t rows, size_t columns) {
    const size_t w = (size_t)width, kept_step = (size_t)TILE_ROW(width), square = SQUARE(width);
    const size_t whole_rows = rows / square * square, whole_columns = columns / square * square;
    uint8_t kept[TILE_BYTES], turned[TILE_BYTES];
    for (size_t i = 0; i < rows; i++) memcpy(kept + i * kept_step, source + i * source_step, columns * w);
    for (size_t j = 0; j < whole_columns; j += square)
        for (size_t i = 0; i < whole_rows; i += square)
            turn_square(width, turned + j * kept_step + i * w, kept_step, kept + i * kept_step + j * w, kept_step);
    for (size_t j = 0; j < columns; j++)
        for (size_t i = j < whole_columns ? whole_rows : 0; i < rows; i++) memcpy(turned + j * kept_step + i * w, kept + i * kept_step + j * w, w);
    for (size_t j = 0; j < columns; j++) memcpy(out + j * out_step, turned + j * kept_step, rows * w);
}

/* Copies a matrix whose columns are near each other in `source` and whose rows are in `out`, tile by tile. */
ALWAYS_INLINE void turn(int width, uint8_t *out, const uint8_t *source, const struct axis *row, const struct axis *column) {
    const size_t w = (size_t)width, tile = TILE(width), row_out = row->out, row_source = row->source, column_out = column->out, column_source = column->source;
    for (size_t r = 0; r < row->count; r += tile) {
        size_t rows = row->count - r < tile ? row->count - r : tile;
        for (size_t c = 0; c < column->count; c += tile) {
            size_t columns = column->count - c < tile ? column->count - c : tile;
            const uint8_t *from = source + (r * row_source + c * column_source) * w;
            uint8_t *to = out + (r * row_out + c * column_out) * w;
            if (row_out == 1 && column_source == 1) {
                if (rows == tile && columns == tile) turn_tile(width, to, column_out * w, from, row_source * w, tile, tile);
                else turn_tile(width, to, column_out * w, from, row_source * w, rows, columns);
                continue;
            }
            for (size_t j = 0; j < columns; j++)
                for (size_t i = 0; i < rows; i++)
                    memcpy(to + (j * column_out + i * row_out) * w, from + (i * row_source + j * column_source) * w, w);
        }
    }
}

/* The axis, of those that are not `taken`, with the shortest step; on the side of `out` or of the source. */
static inline size_t nearest(const struct axis *axes, size_t count, bool in_out, size_t taken) {
    size_t found = SIZE_MAX;
    for (size_t i = 0; i < count; i++) {
        if (i == taken) continue;
        if (found == SIZE_MAX || (in_out ? axes[i].out < axes[found].out : axes[i].source < axes[found].source)) found = i;
    }
    return found;
}

ALWAYS_INLINE void copy_box_of(int width, uint8_t *out, const uint8_t *source, const struct axis *axes, size_t count) {
    static const struct axis one = {1, 0, 0};
    size_t inner = nearest(axes, count, false, SIZE_MAX), other = nearest(axes, count, true, SIZE_MAX);
    bool is_turned = inner != other;
    if (!is_turned && count > 1) other = nearest(axes, count, true, inner);
    const struct axis *run = count ? &axes[inner] : &one, *row = other != inner && count ? &axes[other] : &one;
    size_t steps[MOST_AXES] = {0};
    for (;;) {
        if (is_turned) turn(width, out, source, row, run);
        else copy_runs(width, out, source, row, run);
        /* The next place of the axes around these two. */
        size_t at = 0;
        for (; at < count; at++) {
            if (at == inner || at == other) continue;
            out += axes[at].out * (size_t)width;
            source += axes[at].source * (size_t)width;
            if (++steps[at] < axes[at].count) break;
            out -= axes[at].out * axes[at].count * (size_t)width;
            source -= axes[at].source * axes[at].count * (size_t)width;
            steps[at] = 0;
        }
        if (at >= count) return;
    }
}

static void copy_box(uint8_t *out, const uint8_t *source, int width, const struct axis *axes, size_t count) {
    FOR_WIDTH(width, copy_box_of, out, source, axes, count);
}

#endif

/* Copies boxes of strided elements: what layouts take from one tensor to another. */
#ifndef DCR_COPY_H
#define DCR_COPY_H

#include "simd.h"

/* A square of so many elements each way is turned at once, in memory whose rows do not fall on the same lines of a cache. */
#define TILE 32
#define TILE_ROW (TILE + 4)

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

/* Copies a tile whose rows are contiguous in `source`, and whose columns are contiguous in `out`, by way of `kept`. */
ALWAYS_INLINE void turn_tile(int width, uint8_t *out, size_t out_step, const uint8_t *source, size_t source_step, size_t rows, size_t columns) {
    uint8_t kept[TILE * TILE_ROW * 8];
    for (size_t i = 0; i < rows; i++) memcpy(kept + i * TILE_ROW * (size_t)width, source + i * source_step, columns * (size_t)width);
    for (size_t j = 0; j < columns; j++) {
        uint8_t line[TILE * 8];
        const uint8_t *from = kept + j * (size_t)width;
        for (size_t i = 0; i < rows; i++) memcpy(line + i * (size_t)width, from + i * TILE_ROW * (size_t)width, (size_t)width);
        memcpy(out + j * out_step, line, rows * (size_t)width);
    }
}

/* Copies a matrix whose columns are near each other in `source` and whose rows are in `out`, tile by tile. */
ALWAYS_INLINE void turn(int width, uint8_t *out, const uint8_t *source, const struct axis *row, const struct axis *column) {
    const size_t w = (size_t)width, row_out = row->out, row_source = row->source, column_out = column->out, column_source = column->source;
    for (size_t r = 0; r < row->count; r += TILE) {
        size_t rows = row->count - r < TILE ? row->count - r : TILE;
        for (size_t c = 0; c < column->count; c += TILE) {
            size_t columns = column->count - c < TILE ? column->count - c : TILE;
            const uint8_t *from = source + (r * row_source + c * column_source) * w;
            uint8_t *to = out + (r * row_out + c * column_out) * w;
            if (row_out == 1 && column_source == 1) {
                if (rows == TILE && columns == TILE) turn_tile(width, to, column_out * w, from, row_source * w, TILE, TILE);
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

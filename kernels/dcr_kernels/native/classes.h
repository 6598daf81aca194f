/* The classes of FORMAT.md 5.5, by chunks of 256 elements: one class byte for each element, and how many of each class.
 *
 * Class bytes past the end of a block are PADDING, which is no class and is counted nowhere.
 */
#ifndef DCR_CLASSES_H
#define DCR_CLASSES_H

#include "simd.h"

#define PADDING 255

ALWAYS_INLINE unsigned exponent_of(uint64_t element, struct field exponent) {
    return (unsigned)(element >> exponent.shift & low_bits(exponent.bits));
}

ALWAYS_INLINE unsigned class_of(unsigned exponent, unsigned top) {
    unsigned distance = exponent < top ? top - exponent : 0;
    return distance < CLASSES - 1 ? distance : CLASSES - 1;
}

/* Writes CHUNK class bytes; returns how many of the `count` elements have an exponent above `top`. */
ALWAYS_INLINE unsigned classify_plain(const uint8_t *base, size_t count, int width, struct field exponent, unsigned top,
                                      uint8_t *classes) {
    unsigned above = 0;
    for (size_t i = 0; i < count; i++) {
        unsigned x = exponent_of(load_element(base, i, width), exponent);
        classes[i] = (uint8_t)class_of(x, top);
        above += x > top;
    }
    memset(classes + count, PADDING, CHUNK - count);
    return above;
}

/* Exponents of at most 8 bits in elements of two bytes, in vectors that every processor has. */
typedef int16_t eight_halves __attribute__((vector_size(16)));
typedef uint8_t eight_bytes __attribute__((vector_size(8)));

ALWAYS_INLINE unsigned classify_halves(const uint8_t *base, struct field exponent, unsigned top, uint8_t *classes) {
    eight_halves above = {0}, tops = (eight_halves){0} + (int16_t)top, last = (eight_halves){0} + (CLASSES - 1);
    for (int i = 0; i < CHUNK; i += 8) {
        eight_halves x;
        memcpy(&x, base + 2 * i, sizeof x);
        x = (x >> (int16_t)exponent.shift) & (int16_t)low_bits(exponent.bits);
        eight_halves class = (tops - x) & (x < tops);
        class = (class & (class < last)) | (last & (class >= last));
        eight_bytes bytes = __builtin_convertvector(class, eight_bytes);
        memcpy(classes + i, &bytes, sizeof bytes);
        above -= x > tops;
    }
    unsigned sum = 0;
    for (int i = 0; i < 8; i++) sum += (unsigned)above[i];
    return sum;
}

#ifdef WITH_AVX2

/* The exponents, of at most 8 bits, of 32 elements. */
ALWAYS_INLINE __m256i exponents32(const uint8_t *base, int width, __m128i shift, __m256i mask) {
    if (width == 1) return _mm256_and_si256(_mm256_srl_epi16(load256(base), shift), mask);
    if (width == 2) {
        __m256i low = _mm256_and_si256(_mm256_srl_epi16(load256(base), shift), mask);
        __m256i high = _mm256_and_si256(_mm256_srl_epi16(load256(base + 32), shift), mask);
        return _mm256_permute4x64_epi64(_mm256_packus_epi16(low, high), 0xD8);
    }
    __m256i part[4];
    for (int i = 0; i < 4; i++) part[i] = _mm256_and_si256(_mm256_srl_epi32(load256(base + 32 * i), shift), mask);
    __m256i low = _mm256_packus_epi32(part[0], part[1]), high = _mm256_packus_epi32(part[2], part[3]);
    return _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

ALWAYS_INLINE unsigned classify_vector(const uint8_t *base, int width, struct field exponent, unsigned top, uint8_t *classes) {
    int ones = (int)low_bits(exponent.bits);
    __m256i mask = width == 1 ? _mm256_set1_epi8((char)ones) : width == 2 ? _mm256_set1_epi16((short)ones) : _mm256_set1_epi32(ones);
    __m128i shift = _mm_cvtsi32_si128((int)exponent.shift);
    __m256i tops = _mm256_set1_epi8((char)top), last = _mm256_set1_epi8(CLASSES - 1);
    __m256i above = _mm256_set1_epi8(CHUNK / 32);
#pragma GCC unroll 2
    for (int i = 0; i < CHUNK; i += 32) {
        __m256i x = exponents32(base + i * width, width, shift, mask);
        _mm256_storeu_si256((__m256i *)(classes + i), _mm256_min_epu8(_mm256_subs_epu8(tops, x), last));
        above = _mm256_add_epi8(above, _mm256_cmpeq_epi8(_mm256_max_epu8(x, tops), tops));
    }
    __m256i sums = _mm256_sad_epu8(above, _mm256_setzero_si256());
    __m128i half = _mm_add_epi64(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
    return (unsigned)_mm_cvtsi128_si32(_mm_add_epi32(half, _mm_unpackhi_epi64(half, half)));
}

#endif

/* Table i counts class 2i in the low and class 2i + 1 in the high nibble of a byte. */
#define PAIR_TABLE(i) {[2 * (i)] = 0x01, [2 * (i) + 1] = 0x10}
static const uint8_t pair_tables[8][16] = {PAIR_TABLE(0), PAIR_TABLE(1), PAIR_TABLE(2), PAIR_TABLE(3),
                                           PAIR_TABLE(4), PAIR_TABLE(5), PAIR_TABLE(6), PAIR_TABLE(7)};

/* Adds to `members` how many of a chunk's elements are of each class, modulo 2^16. */
#ifdef WITH_AVX2

ALWAYS_INLINE void count_chunk(const uint8_t *classes, uint16_t members[CLASSES]) {
    const __m256i high = _mm256_set1_epi8((char)0xf0), zero = _mm256_setzero_si256();
    __m256i lanes[8], both[8], quarter[4];
    for (int i = 0; i < 8; i++) lanes[i] = load256(classes + 32 * i);
    /* Unrolled, this needs more registers than there are. */
#pragma GCC unroll 1
    for (int pair = 0; pair < 8; pair++) {
        /* Eight vectors add at most 8 to a nibble; PADDING looks up 0. */
        __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)pair_tables[pair]));
        __m256i a = _mm256_add_epi8(_mm256_shuffle_epi8(table, lanes[0]), _mm256_shuffle_epi8(table, lanes[1]));
        __m256i b = _mm256_add_epi8(_mm256_shuffle_epi8(table, lanes[2]), _mm256_shuffle_epi8(table, lanes[3]));
        __m256i c = _mm256_add_epi8(_mm256_shuffle_epi8(table, lanes[4]), _mm256_shuffle_epi8(table, lanes[5]));
        __m256i d = _mm256_add_epi8(_mm256_shuffle_epi8(table, lanes[6]), _mm256_shuffle_epi8(table, lanes[7]));
        __m256i sum = _mm256_add_epi8(_mm256_add_epi8(a, b), _mm256_add_epi8(c, d));
        /* The even class and 16 times the odd one, then the latter alone: together at most 17 * 64 in a lane. */
        __m256i odd = _mm256_sad_epu8(_mm256_and_si256(sum, high), zero);
        both[pair] = _mm256_or_si256(_mm256_sad_epu8(sum, zero), _mm256_slli_epi64(odd, 16));
    }
    /* quarter[i] holds pairs 2i and 2i + 1 as u16 in each of four lanes; add the lanes up. */
    for (int i = 0; i < 4; i++) quarter[i] = _mm256_or_si256(both[2 * i], _mm256_slli_epi64(both[2 * i + 1], 32));
    __m256i ab = _mm256_add_epi16(_mm256_permute2x128_si256(quarter[0], quarter[2], 0x20),
                                  _mm256_permute2x128_si256(quarter[0], quarter[2], 0x31));
    __m256i cd = _mm256_add_epi16(_mm256_permute2x128_si256(quarter[1], quarter[3], 0x20),
                                  _mm256_permute2x128_si256(quarter[1], quarter[3], 0x31));
    __m256i all = _mm256_add_epi16(_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd));
    __m256i counts = _mm256_blend_epi16(_mm256_sub_epi16(all, _mm256_srli_epi32(all, 16)), _mm256_srli_epi16(all, 4), 0xAA);
    _mm256_storeu_si256((__m256i *)members, _mm256_add_epi16(load256((const uint8_t *)members), counts));
}

/* How many of a group's 64 numbers, none above 2^15, are at most `limit`. */
ALWAYS_INLINE unsigned count_at_most(const uint16_t numbers[GROUP], unsigned limit) {
    __m256i limits = _mm256_set1_epi16((short)limit);
    unsigned count = GROUP;
    for (int i = 0; i < GROUP; i += 32) {
        __m256i low = _mm256_cmpgt_epi16(load256((const uint8_t *)(numbers + i)), limits);
        __m256i high = _mm256_cmpgt_epi16(load256((const uint8_t *)(numbers + i + 16)), limits);
        count -= (unsigned)__builtin_popcount((unsigned)_mm256_movemask_epi8(_mm256_packs_epi16(low, high)));
    }
    return count;
}

/* Turns rows of classes into rows of chunks. */
ALWAYS_INLINE void transpose_group(const uint16_t by_chunk[GROUP][CLASSES], uint16_t by_class[CLASSES][GROUP]) {
    for (int chunk = 0; chunk < GROUP; chunk += 8) {
        for (int class = 0; class < CLASSES; class += 8) {
            __m128i a[8], b[8];
            for (int i = 0; i < 8; i++) a[i] = _mm_loadu_si128((const __m128i *)&by_chunk[chunk + i][class]);
            for (int i = 0; i < 4; i++) {
                b[2 * i] = _mm_unpacklo_epi16(a[i], a[i + 4]);
                b[2 * i + 1] = _mm_unpackhi_epi16(a[i], a[i + 4]);
            }
            for (int i = 0; i < 4; i++) {
                a[2 * i] = _mm_unpacklo_epi16(b[i], b[i + 4]);
                a[2 * i + 1] = _mm_unpackhi_epi16(b[i], b[i + 4]);
            }
            for (int i = 0; i < 4; i++) {
                _mm_storeu_si128((__m128i *)&by_class[class + 2 * i][chunk], _mm_unpacklo_epi16(a[i], a[i + 4]));
                _mm_storeu_si128((__m128i *)&by_class[class + 2 * i + 1][chunk], _mm_unpackhi_epi16(a[i], a[i + 4]));
            }
        }
    }
}

#else

#ifdef WITH_NEON

ALWAYS_INLINE void count_chunk(const uint8_t *classes, uint16_t members[CLASSES]) {
    for (int pair = 0; pair < 8; pair++) {
        uint8x16_t table = vld1q_u8(pair_tables[pair]), even = vdupq_n_u8(0), odd = even;
        for (int half = 0; half < 2; half++) {
            uint8x16_t sum = vdupq_n_u8(0);
            for (int i = 0; i < 8; i++) sum = vaddq_u8(sum, vqtbl1q_u8(table, vld1q_u8(classes + 128 * half + 16 * i)));
            even = vaddq_u8(even, vandq_u8(sum, vdupq_n_u8(15)));
            odd = vaddq_u8(odd, vshrq_n_u8(sum, 4));
        }
        members[2 * pair] = (uint16_t)(members[2 * pair] + vaddlvq_u8(even));
        members[2 * pair + 1] = (uint16_t)(members[2 * pair + 1] + vaddlvq_u8(odd));
    }
}

#else

ALWAYS_INLINE void count_chunk(const uint8_t *classes, uint16_t members[CLASSES]) {
    uint16_t bins[4][256] = {{0}};
    for (int i = 0; i < CHUNK; i += 4)
        for (int j = 0; j < 4; j++) bins[j][classes[i + j]]++;
    for (int c = 0; c < CLASSES; c++) members[c] = (uint16_t)(members[c] + bins[0][c] + bins[1][c] + bins[2][c] + bins[3][c]);
}

#endif

ALWAYS_INLINE unsigned count_at_most(const uint16_t numbers[GROUP], unsigned limit) {
    uint16_t count = 0;
    for (int i = 0; i < GROUP; i++) count += numbers[i] <= limit;
    return count;
}

ALWAYS_INLINE void transpose_group(const uint16_t by_chunk[GROUP][CLASSES], uint16_t by_class[CLASSES][GROUP]) {
    for (int class = 0; class < CLASSES; class++)
        for (int chunk = 0; chunk < GROUP; chunk++) by_class[class][chunk] = by_chunk[chunk][class];
}

#endif

ALWAYS_INLINE unsigned classify_chunk(const uint8_t *base, size_t count, int width, struct field exponent, unsigned top, uint8_t *classes) {
#ifdef WITH_AVX2
    if (count == CHUNK && width <= 4 && exponent.bits <= 8) return classify_vector(base, width, exponent, top, classes);
#else
    if (count == CHUNK && width == 2 && exponent.bits <= 8) return classify_halves(base, exponent, top, classes);
#endif
    return classify_plain(base, count, width, exponent, top, classes);
}

#if defined(WITH_NEON) || (defined(WITH_AVX2) && !defined(WITH_AVX512))

/* Here moving bytes to bits is slow, so these functions add up bytes. */

static const uint8_t first_bytes[2 * CHUNK] = {
#define ONES_16 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1
#define ONES_64 ONES_16, ONES_16, ONES_16, ONES_16
    ONES_64, ONES_64, ONES_64, ONES_64};

#endif

#if defined(WITH_AVX2) && !defined(WITH_AVX512)

/* How many of the first `end` elements, at most CHUNK, of a chunk are of the class. */
ALWAYS_INLINE unsigned rank_in_chunk(const uint8_t *classes, unsigned class, unsigned end) {
    const uint8_t *ones = first_bytes + CHUNK - end;
    __m256i wanted = _mm256_set1_epi8((char)class), sum = _mm256_setzero_si256();
    for (int i = 0; i < CHUNK; i += 32)
        sum = _mm256_add_epi8(sum, _mm256_and_si256(_mm256_cmpeq_epi8(load256(classes + i), wanted), load256(ones + i)));
    sum = _mm256_sad_epu8(sum, _mm256_setzero_si256());
    __m128i half = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
    return (unsigned)(_mm_cvtsi128_si32(half) + _mm_extract_epi32(half, 2));
}

/* How many of each 64 elements of a chunk are of the class, as four u16. */
ALWAYS_INLINE uint64_t members_by_word(const uint8_t *classes, unsigned class) {
    __m256i wanted = _mm256_set1_epi8((char)class), zero = _mm256_setzero_si256(), sums = zero;
    for (int word = CHUNK / 64 - 1; word >= 0; word--) {
        __m256i low = _mm256_cmpeq_epi8(load256(classes + 64 * word), wanted);
        __m256i high = _mm256_cmpeq_epi8(load256(classes + 64 * word + 32), wanted);
        __m256i sum = _mm256_sad_epu8(_mm256_sub_epi8(zero, _mm256_add_epi8(low, high)), zero);
        sums = _mm256_or_si256(_mm256_slli_epi64(sums, 16), sum);
    }
    __m128i half = _mm_add_epi64(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
    return (uint64_t)_mm_cvtsi128_si64(_mm_add_epi64(half, _mm_unpackhi_epi64(half, half)));
}

#elif defined(WITH_NEON)

ALWAYS_INLINE unsigned rank_in_chunk(const uint8_t *classes, unsigned class, unsigned end) {
    const uint8_t *ones = first_bytes + CHUNK - end;
    uint8x16_t wanted = vdupq_n_u8((uint8_t)class), sum = vdupq_n_u8(0);
    for (int i = 0; i < CHUNK; i += 16) sum = vaddq_u8(sum, vandq_u8(vceqq_u8(vld1q_u8(classes + i), wanted), vld1q_u8(ones + i)));
    return vaddlvq_u8(sum);
}

ALWAYS_INLINE uint64_t members_by_word(const uint8_t *classes, unsigned class) {
    uint8x16_t wanted = vdupq_n_u8((uint8_t)class);
    uint64_t members = 0;
    for (int word = 0; word < CHUNK / 64; word++) {
        uint8x16_t sum = vdupq_n_u8(0);
        for (int i = 0; i < 64; i += 16) sum = vsubq_u8(sum, vceqq_u8(vld1q_u8(classes + 64 * word + i), wanted));
        members |= (uint64_t)vaddvq_u8(sum) << 16 * word;
    }
    return members;
}

#else

ALWAYS_INLINE unsigned rank_in_chunk(const uint8_t *classes, unsigned class, unsigned end) {
    unsigned rank = 0;
    for (unsigned word = 0; word < CHUNK / 64; word++) {
        /* No branch: in which word the end is cannot be guessed. */
        uint64_t full = -(uint64_t)(word < end / 64), part = -(uint64_t)(word == end / 64);
        uint64_t wanted = full | (part & ((UINT64_C(1) << end % 64) - 1));
        rank += (unsigned)__builtin_popcountll(equal_mask(classes + 64 * word, (uint8_t)class) & wanted);
    }
    return rank;
}

ALWAYS_INLINE uint64_t members_by_word(const uint8_t *classes, unsigned class) {
    uint64_t members = 0;
    for (unsigned word = 0; word < CHUNK / 64; word++)
        members |= (uint64_t)__builtin_popcountll(equal_mask(classes + 64 * word, (uint8_t)class)) << 16 * word;
    return members;
}

#endif

/* Where in a chunk the element of the class with this rank is; the chunk has more elements of the class than that. */
ALWAYS_INLINE unsigned select_in_chunk(const uint8_t *classes, unsigned class, unsigned rank) {
    const uint64_t each = UINT64_C(0x0001000100010001), highest = UINT64_C(0x8000800080008000);
    /* Members up to the end of each word; then the highest bit of each u16 says whether that is at most the rank. */
    uint64_t ends = members_by_word(classes, class) * each;
    uint64_t passed = ((rank * each) | highest) - ends;
    unsigned word = (unsigned)__builtin_popcountll(passed & (highest >> 16));
    unsigned before = (unsigned)(ends << 16 >> 16 * word) & 0xffff;
    return 64 * word + select_bit(equal_mask(classes + 64 * word, (uint8_t)class), rank - before);
}

/* Classifies the elements [first, first + count), at most a group, of a block. `starts` gets the members of each class before
 * each chunk, `members` those of the group. Returns how many exponents are above `top`. */
ALWAYS_INLINE uint64_t classify_group(int width, const struct block *block, size_t first, size_t count, unsigned top, uintptr_t ahead,
                                      uint8_t *classes, uint16_t starts[GROUP][CLASSES], uint16_t members[CLASSES]) {
    const uint8_t *base = block->base + first * (size_t)width;
    struct field exponent = block->exponent;
    uint64_t above = 0;
    memset(members, 0, CLASSES * sizeof *members);
    for (size_t chunk = 0; chunk < chunks_of(count); chunk++, base += CHUNK * width, classes += CHUNK) {
        for (int line = 0; line < CHUNK * width; line += 64) prefetch(base + line, ahead);
        size_t left = count - chunk * CHUNK;
        above += classify_chunk(base, left < CHUNK ? left : CHUNK, width, exponent, top, classes);
        memcpy(starts[chunk], members, CLASSES * sizeof *members);
        count_chunk(classes, members);
    }
    return above;
}

/* How many exponents are above `top`. The compiler makes vectors of the inner loop, whose sum is as wide as an element. */
#define COUNT_ABOVE(TYPE, BITS)                                                                                                            \
    typedef TYPE any_##BITS __attribute__((aligned(1), may_alias));                                                                        \
    static size_t count_above_##BITS(const struct block *block, unsigned top) {                                                            \
        const any_##BITS *elements = (const any_##BITS *)(const void *)block->base;                                                        \
        TYPE mask = (TYPE)low_bits(block->exponent.bits), limit = (TYPE)top;                                                               \
        unsigned shift = block->exponent.shift;                                                                                            \
        size_t total = 0, run = BITS == 8 ? 128 : 4096;                                                                                    \
        for (size_t first = 0; first < block->count; first += run) {                                                                       \
            size_t count = block->count - first < run ? block->count - first : run;                                                        \
            TYPE above = 0;                                                                                                                \
            for (size_t i = 0; i < count; i++) above = (TYPE)(above + ((TYPE)((TYPE)(elements[first + i] >> shift) & mask) > limit));      \
            total += above;                                                                                                                \
        }                                                                                                                                  \
        return total;                                                                                                                      \
    }
COUNT_ABOVE(uint8_t, 8)
COUNT_ABOVE(uint16_t, 16)
COUNT_ABOVE(uint32_t, 32)
COUNT_ABOVE(uint64_t, 64)

static bool is_enough(const struct block *block, unsigned top) {
    size_t above = block->width == 1   ? count_above_8(block, top)
                   : block->width == 2 ? count_above_16(block, top)
                   : block->width == 4 ? count_above_32(block, top)
                                       : count_above_64(block, top);
    return 256 * (uint64_t)above <= block->count;
}

/* What the top would be if every 61st element stood for all. */
static unsigned guess_top(const struct block *block) {
    uint16_t bins[2048] = {0};
    size_t stride = block->count < 4096 ? 1 : 61, count = 0;
    for (size_t i = 0; i < block->count; i += stride, count++)
        bins[exponent_of(load_element(block->base, i, block->width), block->exponent)]++;
    unsigned top = (unsigned)low_bits(block->exponent.bits);
    for (size_t above = 0; top && 256 * (above + bins[top]) <= count; top--) above += bins[top];
    return top;
}

/* The smallest t with 256 * #{exponents > t} <= count: away from a guess in growing steps, then by halves. */
static unsigned find_top(const struct block *block) {
    unsigned likely = guess_top(block);
    unsigned most = (unsigned)low_bits(block->exponent.bits), low, high, step = 1;
    if (is_enough(block, likely)) {
        for (high = likely; high; high = low, step *= 2) {
            low = high > step ? high - step : 0;
            if (!is_enough(block, low)) break;
        }
        if (!high) return 0;
    } else {
        for (low = likely;; low = high, step *= 2) {
            high = low + step < most ? low + step : most;
            if (high == most || is_enough(block, high)) break;
        }
    }
    /* `low` is not enough, `high` is. */
    while (high - low > 1) {
        unsigned middle = low + (high - low) / 2;
        if (is_enough(block, middle)) high = middle;
        else low = middle;
    }
    return high;
}

#endif

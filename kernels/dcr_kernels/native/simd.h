/* The few vector operations, one section per instruction set; the plain section says what each one does. */
#ifndef DCR_SIMD_H
#define DCR_SIMD_H

#include "bits.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__BMI2__)
#define WITH_AVX512 1
#endif
#if defined(__AVX2__) && defined(__BMI2__)
#define WITH_AVX2 1
#include <immintrin.h>
#elif defined(__aarch64__) && defined(__ARM_NEON)
#define WITH_NEON 1
#include <arm_neon.h>
#endif

/* sums[q] += units[i] * keys[q][i] over i < count, and likewise for the units `second`, modulo 2^32. dot_two_rows asks for what is at a
 * distance of `ahead` from what it reads, where the processor does not do so by itself. */
struct two_rows {
    uint32_t first[4];
    uint32_t second[4];
};

ALWAYS_INLINE void dot_tail(const uint8_t *units, const int16_t *keys, size_t from, size_t count, uint32_t sums[4]) {
    for (unsigned q = 0; q < 4; q++) {
        uint32_t sum = 0;
        for (size_t i = from; i < count; i++) {
            int16_t unit;
            memcpy(&unit, units + 2 * i, 2);
            sum += (uint32_t)((int32_t)unit * keys[ROW_UNITS * q + i]);
        }
        sums[q] += sum;
    }
}

/* How many zero bits a mask ends with; any number for 0. */
ALWAYS_INLINE unsigned any_trailing_zeros(uint64_t mask) {
#ifdef WITH_AVX2
    return (unsigned)_tzcnt_u64(mask);
#else
    return trailing_zeros(mask | UINT64_C(1) << 63);
#endif
}

/* Position of the set bit number `rank` (from 0) of a mask that has more set bits than that. */
ALWAYS_INLINE unsigned select_bit(uint64_t mask, unsigned rank) {
#ifdef WITH_AVX2
    if (has_fast_deposit) return trailing_zeros(_pdep_u64(UINT64_C(1) << rank, mask));
#endif
    unsigned at = 0;
    for (unsigned step = 32; step; step >>= 1) {
        unsigned below = (unsigned)__builtin_popcountll(mask & low_bits(step));
        unsigned skip = rank >= below ? step : 0;
        rank -= skip ? below : 0;
        at += skip;
        mask >>= skip;
    }
    return at;
}

#if defined(WITH_AVX2)

/* One bit for each of 64 bytes: is it `value`? */
ALWAYS_INLINE uint64_t equal_mask(const uint8_t *bytes, uint8_t value) {
#ifdef WITH_AVX512
    return _mm512_cmpeq_epi8_mask(_mm512_loadu_si512(bytes), _mm512_set1_epi8((char)value));
#else
    __m256i wanted = _mm256_set1_epi8((char)value);
    __m256i low = _mm256_cmpeq_epi8(_mm256_loadu_si256((const __m256i *)bytes), wanted);
    __m256i high = _mm256_cmpeq_epi8(_mm256_loadu_si256((const __m256i *)(bytes + 32)), wanted);
    return (uint32_t)_mm256_movemask_epi8(low) | (uint64_t)(uint32_t)_mm256_movemask_epi8(high) << 32;
#endif
}

ALWAYS_INLINE __m256i load256(const uint8_t *at) { return _mm256_loadu_si256((const __m256i *)at); }

/* One bit for each of 64 elements: do the two arrays differ there? */
ALWAYS_INLINE uint64_t differ_mask(const uint8_t *a, const uint8_t *b, int width) {
    uint64_t mask = 0;
#ifdef WITH_AVX512
    for (int i = 0; i < width; i++) {
        __m512i left = _mm512_loadu_si512(a + 64 * i), right = _mm512_loadu_si512(b + 64 * i);
        uint64_t part = width == 1   ? _mm512_cmpneq_epi8_mask(left, right)
                        : width == 2 ? _mm512_cmpneq_epi16_mask(left, right)
                        : width == 4 ? _mm512_cmpneq_epi32_mask(left, right)
                                     : _mm512_cmpneq_epi64_mask(left, right);
        mask |= part << (64 / width * i);
    }
    return mask;
#else
    if (width <= 2) {
        for (int half = 0; half < 2; half++) {
            __m256i same;
            if (width == 1) {
                same = _mm256_cmpeq_epi8(load256(a + 32 * half), load256(b + 32 * half));
            } else {
                __m256i low = _mm256_cmpeq_epi16(load256(a + 64 * half), load256(b + 64 * half));
                __m256i high = _mm256_cmpeq_epi16(load256(a + 64 * half + 32), load256(b + 64 * half + 32));
                same = _mm256_permute4x64_epi64(_mm256_packs_epi16(low, high), 0xD8);
            }
            mask |= (uint64_t)(uint32_t)_mm256_movemask_epi8(same) << (32 * half);
        }
        return ~mask;
    }
    for (int i = 0; i < 2 * width; i++) {
        __m256i left = load256(a + 32 * i), right = load256(b + 32 * i);
        uint64_t same = width == 4 ? (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(left, right)))
                                   : (uint32_t)_mm256_movemask_pd(_mm256_castsi256_pd(_mm256_cmpeq_epi64(left, right)));
        mask |= same << (32 / width * i);
    }
    return ~mask;
#endif
}

ALWAYS_INLINE void dot_two_rows(const uint8_t *first, const uint8_t *second, const int16_t *keys, size_t count, uintptr_t ahead,
                                struct two_rows *sums) {
#ifdef WITH_AVX512
    enum { LANES = 32 };
    __m512i a[4], b[4];
    for (int q = 0; q < 4; q++) a[q] = b[q] = _mm512_setzero_si512();
    for (size_t i = 0; i + LANES <= count; i += LANES) {
        __m512i u = _mm512_loadu_si512(first + 2 * i), v = _mm512_loadu_si512(second + 2 * i);
        prefetch(first + 2 * i, ahead);
        prefetch(second + 2 * i, ahead);
        for (int q = 0; q < 4; q++) {
            __m512i key = _mm512_loadu_si512(keys + ROW_UNITS * q + i);
            a[q] = _mm512_add_epi32(a[q], _mm512_madd_epi16(u, key));
            b[q] = _mm512_add_epi32(b[q], _mm512_madd_epi16(v, key));
        }
    }
    for (int q = 0; q < 4; q++) {
        sums->first[q] = (uint32_t)_mm512_reduce_add_epi32(a[q]);
        sums->second[q] = (uint32_t)_mm512_reduce_add_epi32(b[q]);
    }
#else
    enum { LANES = 16 };
    __m256i a[4], b[4];
    for (int q = 0; q < 4; q++) a[q] = b[q] = _mm256_setzero_si256();
#pragma GCC unroll 2
    for (size_t i = 0; i + LANES <= count; i += LANES) {
        __m256i u = load256(first + 2 * i), v = load256(second + 2 * i);
        if (i % (2 * LANES) == 0) {
            prefetch(first + 2 * i, ahead);
            prefetch(second + 2 * i, ahead);
        }
        for (int q = 0; q < 4; q++) {
            __m256i key = load256((const uint8_t *)(keys + ROW_UNITS * q + i));
            a[q] = _mm256_add_epi32(a[q], _mm256_madd_epi16(u, key));
            b[q] = _mm256_add_epi32(b[q], _mm256_madd_epi16(v, key));
        }
    }
    __m256i low = _mm256_hadd_epi32(_mm256_hadd_epi32(a[0], a[1]), _mm256_hadd_epi32(a[2], a[3]));
    __m256i high = _mm256_hadd_epi32(_mm256_hadd_epi32(b[0], b[1]), _mm256_hadd_epi32(b[2], b[3]));
    __m128i one = _mm_add_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
    __m128i two = _mm_add_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
    _mm_storeu_si128((__m128i *)sums->first, one);
    _mm_storeu_si128((__m128i *)sums->second, two);
#endif
    size_t done = count - count % LANES;
    dot_tail(first, keys, done, count, sums->first);
    dot_tail(second, keys, done, count, sums->second);
}

/* 16 bytes, and of the elements of two such vectors, in turn, those of the lower halves or of the upper ones. */
#define WITH_ZIP 1
typedef __m128i vector16;

ALWAYS_INLINE vector16 load16_bytes(const uint8_t *at) { return _mm_loadu_si128((const __m128i *)at); }
ALWAYS_INLINE void store16_bytes(uint8_t *at, vector16 v) { _mm_storeu_si128((__m128i *)at, v); }

ALWAYS_INLINE vector16 zip_low(vector16 a, vector16 b, int width) {
    return width == 1   ? _mm_unpacklo_epi8(a, b)
           : width == 2 ? _mm_unpacklo_epi16(a, b)
           : width == 4 ? _mm_unpacklo_epi32(a, b)
                        : _mm_unpacklo_epi64(a, b);
}

ALWAYS_INLINE vector16 zip_high(vector16 a, vector16 b, int width) {
    return width == 1   ? _mm_unpackhi_epi8(a, b)
           : width == 2 ? _mm_unpackhi_epi16(a, b)
           : width == 4 ? _mm_unpackhi_epi32(a, b)
                        : _mm_unpackhi_epi64(a, b);
}

#elif defined(WITH_NEON)

ALWAYS_INLINE uint64_t bits_of_bytes(uint8x16_t a, uint8x16_t b, uint8x16_t c, uint8x16_t d) {
    static const uint8_t weights[16] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    uint8x16_t weight = vld1q_u8(weights);
    uint8x16_t low = vpaddq_u8(vandq_u8(a, weight), vandq_u8(b, weight));
    uint8x16_t high = vpaddq_u8(vandq_u8(c, weight), vandq_u8(d, weight));
    uint8x16_t all = vpaddq_u8(low, high);
    return vgetq_lane_u64(vreinterpretq_u64_u8(vpaddq_u8(all, all)), 0);
}

ALWAYS_INLINE uint64_t equal_mask(const uint8_t *bytes, uint8_t value) {
    uint8x16_t wanted = vdupq_n_u8(value);
    return bits_of_bytes(vceqq_u8(vld1q_u8(bytes), wanted), vceqq_u8(vld1q_u8(bytes + 16), wanted),
                         vceqq_u8(vld1q_u8(bytes + 32), wanted), vceqq_u8(vld1q_u8(bytes + 48), wanted));
}

/* 0xff for each of 16 elements that are the same. */
ALWAYS_INLINE uint8x16_t same_bytes(const uint8_t *a, const uint8_t *b, int width) {
    if (width == 1) return vceqq_u8(vld1q_u8(a), vld1q_u8(b));
    uint16x8_t pair[2];
    for (int i = 0; i < 2; i++) {
        const uint8_t *left = a + 8 * width * i, *right = b + 8 * width * i;
        if (width == 2) {
            pair[i] = vceqq_u16(vreinterpretq_u16_u8(vld1q_u8(left)), vreinterpretq_u16_u8(vld1q_u8(right)));
            continue;
        }
        uint32x4_t four[2];
        for (int j = 0; j < 2; j++, left += 4 * width, right += 4 * width) {
            if (width == 4) {
                four[j] = vceqq_u32(vreinterpretq_u32_u8(vld1q_u8(left)), vreinterpretq_u32_u8(vld1q_u8(right)));
            } else {
                uint64x2_t low = vceqq_u64(vreinterpretq_u64_u8(vld1q_u8(left)), vreinterpretq_u64_u8(vld1q_u8(right)));
                uint64x2_t high = vceqq_u64(vreinterpretq_u64_u8(vld1q_u8(left + 16)), vreinterpretq_u64_u8(vld1q_u8(right + 16)));
                four[j] = vcombine_u32(vmovn_u64(low), vmovn_u64(high));
            }
        }
        pair[i] = vcombine_u16(vmovn_u32(four[0]), vmovn_u32(four[1]));
    }
    return vcombine_u8(vmovn_u16(pair[0]), vmovn_u16(pair[1]));
}

ALWAYS_INLINE uint64_t differ_mask(const uint8_t *a, const uint8_t *b, int width) {
    uint8x16_t same[4];
    for (int i = 0; i < 4; i++) same[i] = same_bytes(a + 16 * width * i, b + 16 * width * i, width);
    return ~bits_of_bytes(same[0], same[1], same[2], same[3]);
}

ALWAYS_INLINE void dot_two_rows(const uint8_t *first, const uint8_t *second, const int16_t *keys, size_t count, uintptr_t ahead,
                                struct two_rows *sums) {
    (void)ahead;
    int32x4_t a[4], b[4];
    for (int q = 0; q < 4; q++) a[q] = b[q] = vdupq_n_s32(0);
    for (size_t i = 0; i + 8 <= count; i += 8) {
        int16x8_t u = vreinterpretq_s16_u8(vld1q_u8(first + 2 * i)), v = vreinterpretq_s16_u8(vld1q_u8(second + 2 * i));
        for (int q = 0; q < 4; q++) {
            int16x8_t key = vld1q_s16(keys + ROW_UNITS * q + i);
            a[q] = vmlal_high_s16(vmlal_s16(a[q], vget_low_s16(u), vget_low_s16(key)), u, key);
            b[q] = vmlal_high_s16(vmlal_s16(b[q], vget_low_s16(v), vget_low_s16(key)), v, key);
        }
    }
    for (int q = 0; q < 4; q++) {
        sums->first[q] = (uint32_t)vaddvq_s32(a[q]);
        sums->second[q] = (uint32_t)vaddvq_s32(b[q]);
    }
    dot_tail(first, keys, count & ~(size_t)7, count, sums->first);
    dot_tail(second, keys, count & ~(size_t)7, count, sums->second);
}

#define WITH_ZIP 1
typedef uint8x16_t vector16;

ALWAYS_INLINE vector16 load16_bytes(const uint8_t *at) { return vld1q_u8(at); }
ALWAYS_INLINE void store16_bytes(uint8_t *at, vector16 v) { vst1q_u8(at, v); }

ALWAYS_INLINE vector16 zip_low(vector16 a, vector16 b, int width) {
    if (width == 1) return vzip1q_u8(a, b);
    if (width == 2) return vreinterpretq_u8_u16(vzip1q_u16(vreinterpretq_u16_u8(a), vreinterpretq_u16_u8(b)));
    if (width == 4) return vreinterpretq_u8_u32(vzip1q_u32(vreinterpretq_u32_u8(a), vreinterpretq_u32_u8(b)));
    return vreinterpretq_u8_u64(vzip1q_u64(vreinterpretq_u64_u8(a), vreinterpretq_u64_u8(b)));
}

ALWAYS_INLINE vector16 zip_high(vector16 a, vector16 b, int width) {
    if (width == 1) return vzip2q_u8(a, b);
    if (width == 2) return vreinterpretq_u8_u16(vzip2q_u16(vreinterpretq_u16_u8(a), vreinterpretq_u16_u8(b)));
    if (width == 4) return vreinterpretq_u8_u32(vzip2q_u32(vreinterpretq_u32_u8(a), vreinterpretq_u32_u8(b)));
    return vreinterpretq_u8_u64(vzip2q_u64(vreinterpretq_u64_u8(a), vreinterpretq_u64_u8(b)));
}

#else

ALWAYS_INLINE uint64_t equal_mask(const uint8_t *bytes, uint8_t value) {
    const uint64_t low_seven = UINT64_C(0x7f7f7f7f7f7f7f7f), wanted = UINT64_C(0x0101010101010101) * value;
    uint64_t mask = 0;
    for (unsigned i = 0; i < 8; i++) {
        uint64_t x = load64(bytes + 8 * i) ^ wanted;
        uint64_t zero = ~(((x & low_seven) + low_seven) | x | low_seven) >> 7;
        mask |= (zero * UINT64_C(0x0102040810204080) >> 56) << 8 * i;
    }
    return mask;
}

/* One bit for each element of `width` bytes in a word: is it not 0? */
ALWAYS_INLINE uint64_t nonzero_elements(uint64_t word, int width) {
    uint64_t highest = width == 1   ? UINT64_C(0x8080808080808080)
                       : width == 2 ? UINT64_C(0x8000800080008000)
                       : width == 4 ? UINT64_C(0x8000000080000000)
                                    : UINT64_C(0x8000000000000000);
    uint64_t found = (((word & ~highest) + ~highest) | word) & highest;
    if (width == 1) return (found >> 7) * UINT64_C(0x0102040810204080) >> 56;
    if (width == 2) return ((found >> 15) * UINT64_C(0x0001000200040008) >> 48) & 15;
    if (width == 4) return (found >> 31 & 1) | (found >> 62 & 2);
    return found >> 63;
}

ALWAYS_INLINE uint64_t differ_mask(const uint8_t *a, const uint8_t *b, int width) {
    uint64_t mask = 0;
    for (int i = 0; i < 8 * width; i++) mask |= nonzero_elements(load64(a + 8 * i) ^ load64(b + 8 * i), width) << (8 / width * i);
    return mask;
}

ALWAYS_INLINE void dot_two_rows(const uint8_t *first, const uint8_t *second, const int16_t *keys, size_t count, uintptr_t ahead,
                                struct two_rows *sums) {
    (void)ahead;
    *sums = (struct two_rows){{0}, {0}};
    dot_tail(first, keys, 0, count, sums->first);
    dot_tail(second, keys, 0, count, sums->second);
}

#endif
#endif

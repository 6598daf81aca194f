/* The levels that meson compiled, the choice among them at run time, and the tables they share. */
#include "levels.h"

#ifdef WITH_LEVEL_AVX2
#include <cpuid.h>
#endif

int16_t unit_keys[4][ROW_UNITS];
int16_t unit_keys_by_column[ROW_UNITS][4];
bool has_fast_deposit = true;

static void fill_unit_keys(void) {
    for (uint64_t q = 0; q < 4; q++)
        for (uint64_t i = 0; i < ROW_UNITS; i++)
            unit_keys[q][i] = unit_keys_by_column[i][q] = (int16_t)(mix((UINT64_C(1) << 62) + ROW_UNITS * q + i) | 1);
}

#ifdef WITH_LEVEL_PLAIN
#define BASELINE kernels_plain
#else
#define BASELINE kernels_neon
#endif
extern const struct kernels BASELINE;
#ifdef WITH_LEVEL_AVX2
extern const struct kernels kernels_avx2;
#endif
#ifdef WITH_LEVEL_AVX512
extern const struct kernels kernels_avx512;
#endif

const struct kernels *levels[MOST_LEVELS];
size_t level_count;
const struct kernels *active;

#ifdef WITH_LEVEL_AVX2

static bool has_leading_zero_count(void) {
    unsigned a, b, c, d;
    return __get_cpuid(0x80000001, &a, &b, &c, &d) && (c & 1u << 5);
}

/* AMD's families are 0x17 for Zen 1 and 2, 0x19 for Zen 3. */
static bool deposits_fast(void) {
    unsigned a, b, c, d;
    if (!__builtin_cpu_is("amd") || !__get_cpuid(1, &a, &b, &c, &d)) return true;
    return (a >> 8 & 15) + (a >> 20 & 255) >= 0x19;
}

#endif

void start_levels(void) {
    fill_unit_keys();
    level_count = 0;
    levels[level_count++] = &BASELINE;
#ifdef WITH_LEVEL_AVX2
    has_fast_deposit = deposits_fast();
    /* These look at what the operating system saves, too. */
    bool is_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
                   __builtin_cpu_supports("popcnt") && has_leading_zero_count();
    if (is_avx2) levels[level_count++] = &kernels_avx2;
#ifdef WITH_LEVEL_AVX512
    if (is_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq"))
        levels[level_count++] = &kernels_avx512;
#endif
#endif
    active = levels[level_count - 1];
}

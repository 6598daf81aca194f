/* One level of the kernels: meson compiles this file once for each, with LEVEL as its name and the flags of its instruction set. */
#include "compare.h"
#include "copy.h"
#include "gap.h"

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define TEXT_(a) #a
#define TEXT(a) TEXT_(a)

const struct kernels JOIN(kernels_, LEVEL) = {
    .name = TEXT(LEVEL),
    .digest = digest,
    .digest_changes = digest_changes,
    .scan = scan,
    .gather = gather,
    .patch = patch,
    .patch_xor = patch_xor,
    .copy_box = copy_box,
    .compare = compare,
    .draft = draft,
    .context_decode = context_decode,
    .magnitude_bins = magnitude_bins,
    .magnitude_encode = magnitude_encode,
    .position_bits = position_bits,
    .gap_encode = gap_encode,
    .gap_decode = gap_decode,
};

/* The extension module dcr_kernels._native: arguments in, a kernel without the GIL, results out. native.py wraps and documents it.
 *
 * Every array is a contiguous buffer whose size is checked here, so that a wrong call is an exception and never a wrong access.
 */
#include "arguments.h"
#include "bits.h"
#include "levels.h"

/* digest(data, offset, sums) */
static PyObject *native_digest(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    struct views v;
    long long offset;
    if (!has_arguments(count, 3) || !get_integer(args[1], 0, 1LL << 62, &offset)) return NULL;
    PyObject *const arrays[] = {args[0], args[2]};
    if (!acquire(&v, arrays, 2, 1)) return NULL;
    if (!has_size(&v.view[1], 4, 4, true)) return stop(&v);
    uint32_t sums[4];
    const struct kernels *kernels = active;
    Py_BEGIN_ALLOW_THREADS
    kernels->digest((struct span){v.view[0].buf, (size_t)v.view[0].len}, (uint64_t)offset, sums);
    Py_END_ALLOW_THREADS
    memcpy(v.view[1].buf, sums, sizeof sums);
    release(&v);
    Py_RETURN_NONE;
}

/* digest_spans(data, begins, ends, sums) */
static PyObject *native_digest_spans(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    struct views v;
    size_t spans;
    if (!has_arguments(count, 4) || !acquire(&v, args, 4, 1)) return NULL;
    if (!get_count(&v.view[1], 8, &spans) || !has_size(&v.view[2], spans, 8, true) || !has_size(&v.view[3], 4 * spans, 4, true))
        return stop(&v);
    const uint8_t *data = v.view[0].buf, *begins = v.view[1].buf, *ends = v.view[2].buf;
    uint8_t *sums = v.view[3].buf;
    uint64_t size = (uint64_t)v.view[0].len;
    size_t done = 0;
    const struct kernels *kernels = active;
    Py_BEGIN_ALLOW_THREADS
    for (; done < spans; done++) {
        uint64_t begin = load64(begins + 8 * done), end = load64(ends + 8 * done);
        uint32_t four[4];
        if (begin > end || end > size) break;
        kernels->digest((struct span){data + begin, (size_t)(end - begin)}, 0, four);
        memcpy(sums + 16 * done, four, sizeof four);
    }
    Py_END_ALLOW_THREADS
    release(&v);
    if (done == spans) Py_RETURN_NONE;
    PyErr_Format(PyExc_ValueError, "span is not within the data: at element %zu", done);
    return NULL;
}

/* digest_changes(width, offset, positions, old, new, sums) */
static PyObject *native_digest_changes(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    struct views v;
    long long offset;
    int width;
    struct changes changes;
    if (!has_arguments(count, 6) || !get_width(args[0], &width) || !get_integer(args[1], 0, 1LL << 62, &offset)) return NULL;
    if (!acquire(&v, args + 2, 4, 1)) return NULL;
    if (!get_count(&v.view[0], 4, &changes.count) || !has_size(&v.view[1], changes.count, (size_t)width, true) ||
        !has_size(&v.view[2], changes.count, (size_t)width, true) || !has_size(&v.view[3], 4, 4, true))
        return stop(&v);
    changes.positions = v.view[0].buf;
    changes.values = v.view[2].buf;
    uint32_t sums[4];
    const struct kernels *kernels = active;
    Py_BEGIN_ALLOW_THREADS
    kernels->digest_changes(&changes, v.view[1].buf, width, (uint64_t)offset, sums);
    Py_END_ALLOW_THREADS
    memcpy(v.view[3].buf, sums, sizeof sums);
    release(&v);
    Py_RETURN_NONE;
}

/* scan(width, base, target, positions) -> count */
static PyObject *native_scan(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    struct views v;
    struct block block = {0};
    size_t found;
    if (!has_arguments(count, 4) || !get_width(args[0], &block.width) || !acquire(&v, args + 1, 3, 1)) return NULL;
    if (!get_count(&v.view[0], (size_t)block.width, &block.count) || !has_size(&v.view[1], block.count, (size_t)block.width, true) ||
        !has_size(&v.view[2], block.count + SLACK, 4, false) || !is_aligned(&v.view[2], 4))
        return stop(&v);
    block.base = v.view[0].buf;
    block.target = v.view[1].buf;
    const struct kernels *kernels = active;
    Py_BEGIN_ALLOW_THREADS
    found = kernels->scan(&block, v.view[2].buf);
    Py_END_ALLOW_THREADS
    release(&v);
    return PyLong_FromSize_t(found);
}

static PyObject *patch_with(PyObject *const *args, Py_ssize_t arguments, bool is_xor) {
    struct views v;
    int width;
    struct changes changes;
    struct fault fault;
    size_t elements;
    bool is_good;
    if (!has_arguments(arguments, 4) || !get_width(args[0], &width) || !acquire(&v, args + 1, 3, 1)) return NULL;
    if (!get_count(&v.view[0], 4, &changes.count) || !has_size(&v.view[1], changes.count, (size_t)width, true) ||
        !get_count(&v.view[2], (size_t)width, &elements))
        return stop(&v);
    changes.positions = v.view[0].buf;
    changes.values = v.view[1].buf;
    const struct kernels *kernels = active;
    Py_BEGIN_ALLOW_THREADS
    is_good = (is_xor ? kernels->patch_xor : kernels->patch)(v.view[2].buf, elements, width, &changes, &fault);
    Py_END_ALLOW_THREADS
    return finish(&v, is_good, &fault, Py_NewRef(Py_None));
}

/* gather(width, elements, positions, out) */
static PyObject *native_gather(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    struct views v;
    int width;
    size_t elements;
    struct changes changes = {0};
    struct fault fault;
    bool is_good;
    if (!has_arguments(count, 4) || !get_width(args[0], &width) || !acquire(&v, args + 1, 3, 1)) return NULL;
    if (!get_count(&v.view[0], (size_t)width, &elements) || !get_count(&v.view[1], 4, &changes.count) ||
        !has_size(&v.view[2], changes.count, (size_t)width, true))
        return stop(&v);
    changes.positions = v.view[1].buf;
    const struct kernels *kernels = active;
    Py_BEGIN_ALLOW_THREADS
    is_good = kernels->gather(v.view[0].buf, elements, width, &changes, v.view[2].buf, &fault);
    Py_END_ALLOW_THREADS
    return finish(&v, is_good, &fault, Py_NewRef(Py_None));
}

/* Takes axes from a view of (count, step in out, step in the source), and sees that from `begins` on they stay within `sizes` elements. */
static bool get_axes(const Py_buffer *view, const long long begins[2], const size_t sizes[2], struct axis *axes, size_t *count) {
    *count = (size_t)view->len / (3 * sizeof(int64_t));
    if ((size_t)view->len != *count * 3 * sizeof(int64_t) || *count > MOST_AXES) {
        PyErr_Format(PyExc_ValueError, "%zd bytes are no list of at most %d axes", view->len, MOST_AXES);
        return false;
    }
    unsigned long long ends[2] = {(unsigned long long)begins[0] + 1, (unsigned long long)begins[1] + 1};
    for (size_t i = 0; i < *count; i++) {
        int64_t axis[3];
        memcpy(axis, (const char *)view->buf + i * sizeof axis, sizeof axis);
        bool is_good = axis[0] > 0;
        for (int side = 0; side < 2 && is_good; side++) {
            unsigned long long reach;
            is_good = axis[side + 1] >= 0 && !__builtin_mul_overflow((unsigned long long)axis[0] - 1, (unsigned long long)axis[side + 1], &reach) &&
                      !__builtin_add_overflow(ends[side], reach, &ends[side]) && ends[side] <= sizes[side];
        }
        if (!is_good) {
            PyErr_Format(PyExc_ValueError, "outside of the elements that are given: at axis %zu", i);
            return false;
        }
        axes[i] = (struct axis){(size_t)axis[0], (size_t)axis[1], (size_t)axis[2]};
    }
    if (ends[0] <= sizes[0] && ends[1] <= sizes[1]) return true;
    PyErr_SetString(PyExc_ValueError, "outside of the elements that are given: at the first one");
    return false;
}

/* copy_box(width, out_begin, source_begin, axes, source, out) */
static PyObject *native_copy_box(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t arguments) {
    struct views v;
    int width;
    long long begins[2];
    struct axis axes[MOST_AXES];
    size_t count, sizes[2];
    if (!has_arguments(arguments, 6) || !get_width(args[0], &width) || !get_integer(args[1], 0, 1LL << 62, &begins[0]) ||
        !get_integer(args[2], 0, 1LL << 62, &begins[1]) || !acquire(&v, args + 3, 3, 1))
        return NULL;
    sizes[0] = (size_t)v.view[2].len / (size_t)width;
    sizes[1] = (size_t)v.view[1].len / (size_t)width;
    if (!get_axes(&v.view[0], begins, sizes, axes, &count) || !are_apart(&v, 1, -1, -1)) return stop(&v);
    const struct kernels *kernels = active;
    Py_BEGIN_ALLOW_THREADS
    kernels->copy_box((uint8_t *)v.view[2].buf + (size_t)begins[0] * (size_t)width,
                      (const uint8_t *)v.view[1].buf + (size_t)begins[1] * (size_t)width, width, axes, count);
    Py_END_ALLOW_THREADS
    release(&v);
    Py_RETURN_NONE;
}

/* patch(width, positions, values, out) */
static PyObject *native_patch(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    return patch_with(args, count, false);
}

/* patch_xor(width, positions, masks, out) */
static PyObject *native_patch_xor(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    return patch_with(args, count, true);
}

/* compare(width, bits, shift, offset, base, target, sums, positions, old, new, class_counts, magnitudes, scratch) -> (changed, stream);
 * the stream is None if `bits` is, or if nothing changed */
static PyObject *native_compare(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    struct views v;
    struct block block = {0};
    struct comparison found = {0};
    struct draft draft = {0};
    long long offset;
    if (!has_arguments(count, 13)) return NULL;
    bool is_drafted = args[1] != Py_None;
    if (!get_width(args[0], &block.width) || (is_drafted && !get_exponent(args + 1, block.width, &block.exponent)) || !get_integer(args[3], 0, 1LL << 62, &offset) ||
        !acquire(&v, args + 4, 9, 7))
        return NULL;
    size_t width = (size_t)block.width;
    if (!get_count(&v.view[0], width, &block.count) || !has_size(&v.view[1], block.count, width, true) ||
        !has_size(&v.view[2], 8, 4, true) || !has_size(&v.view[3], block.count + SLACK, 4, false) ||
        !has_size(&v.view[4], block.count, width, false) || !has_size(&v.view[5], block.count, width, false) ||
        !has_size(&v.view[6], CLASSES, 4, false) || !has_size(&v.view[7], block.count, width, false) ||
        !has_size(&v.view[8], compare_bytes(block.count), 1, false) || !is_aligned(&v.view[3], 4) ||
        !is_aligned(&v.view[8], 4) || !are_apart(&v, 7, -1, -1))
        return stop(&v);
    block.base = v.view[0].buf;
    block.target = v.view[1].buf;
    found.offset = (uint64_t)offset;
    found.positions = v.view[3].buf;
    found.old = v.view[4].buf;
    found.new = v.view[5].buf;
    draft.class_counts = v.view[6].buf;
    draft.magnitudes = v.view[7].buf;
    draft.work = v.view[8].buf;
    draft.stream = draft.work + draft_work_bytes(block.count);
    found.draft = is_drafted ? &draft : NULL;
    const struct kernels *kernels = active;
    Py_BEGIN_ALLOW_THREADS
    kernels->compare(&block, &found);
    Py_END_ALLOW_THREADS
    set_sums(&v.view[2], found.sums, found.growth);
    bool has_draft = is_drafted && found.changed;
    PyObject *result = has_draft ? Py_BuildValue("(ny#)", (Py_ssize_t)found.changed, draft.stream, (Py_ssize_t)draft.stream_size)
                                 : Py_BuildValue("(nO)", (Py_ssize_t)found.changed, Py_None);
    release(&v);
    return result;
}

/* draft(width, bits, shift, top, members, ranks, old, new, class_counts, magnitudes, scratch) -> stream; the scratch is
 * draft_bytes(sum of members, changes) */
static PyObject *native_draft(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    struct views v;
    struct ranked known = {0};
    struct draft draft = {0};
    struct fault fault;
    long long top;
    uint32_t members[CLASSES] = {0};
    uint64_t all = 0;
    bool is_good;
    if (!has_arguments(count, 11) || !get_width(args[0], &known.width) || !get_exponent(args + 1, known.width, &known.exponent) ||
        !get_integer(args[3], 0, (1LL << known.exponent.bits) - 1, &top) || !acquire(&v, args + 4, 7, 3))
        return NULL;
    size_t width = (size_t)known.width, classes = known.exponent.bits ? CLASSES : 1;
    if (!has_size(&v.view[0], classes, 4, true) || !get_count(&v.view[1], 4, &known.changed)) return stop(&v);
    memcpy(members, v.view[0].buf, 4 * classes);
    for (size_t c = 0; c < classes; c++) all += members[c];
    if (all > UINT32_MAX) {
        PyErr_Format(PyExc_ValueError, "%llu members of all classes", (unsigned long long)all);
        return stop(&v);
    }
    if (!has_size(&v.view[2], known.changed, width, true) || !has_size(&v.view[3], known.changed, width, true) ||
        !has_size(&v.view[4], CLASSES, 4, false) || !has_size(&v.view[5], known.changed, width, false) ||
        !has_size(&v.view[6], draft_bytes((size_t)all, known.changed), 1, false) || !is_aligned(&v.view[6], 4) ||
        !are_apart(&v, 3, -1, -1))
        return stop(&v);
    known.top = (unsigned)top;
    known.members = (const uint8_t *)members;
    known.ranks = v.view[1].buf;
    known.old = v.view[2].buf;
    known.new = v.view[3].buf;
    draft.class_counts = v.view[4].buf;
    draft.magnitudes = v.view[5].buf;
    draft.work = v.view[6].buf;
    draft.stream = draft.work + draft_work_bytes(known.changed);
    const struct kernels *kernels = active;
    Py_BEGIN_ALLOW_THREADS
    is_good = kernels->draft(&known, &draft, &fault);
    Py_END_ALLOW_THREADS
    PyObject *stream = is_good ? PyBytes_FromStringAndSize((const char *)draft.stream, (Py_ssize_t)draft.stream_size) : NULL;
    return finish(&v, is_good, &fault, stream);
}

/* magnitude_bins(width, class_counts, magnitudes, bins), bins zero before */
static PyObject *native_magnitude_bins(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    struct views v;
    int width;
    size_t magnitudes;
    uint32_t class_counts[CLASSES];
    uint64_t bins[CLASSES * STATES * 2] = {0};
    struct fault fault;
    bool is_good;
    if (!has_arguments(count, 4) || !get_width(args[0], &width) || !acquire(&v, args + 1, 3, 1)) return NULL;
    if (!get_count(&v.view[1], (size_t)width, &magnitudes) || !get_class_counts(&v.view[0], magnitudes, class_counts) ||
        !has_size(&v.view[2], CLASSES * STATES * 2, 8, true))
        return stop(&v);
    const struct kernels *kernels = active;
    Py_BEGIN_ALLOW_THREADS
    is_good = kernels->magnitude_bins(class_counts, v.view[1].buf, width, bins, &fault);
    Py_END_ALLOW_THREADS
    memcpy(v.view[2].buf, bins, sizeof bins);
    return finish(&v, is_good, &fault, Py_NewRef(Py_None));
}

/* magnitude_encode(width, class_counts, magnitudes, states, scratch) -> section bytes, or None when the scratch is too small */
static PyObject *native_magnitude_encode(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    struct views v;
    int width;
    size_t magnitudes;
    uint32_t class_counts[CLASSES];
    uint16_t states[CLASSES * STATES];
    struct fault fault;
    bool is_good;
    if (!has_arguments(count, 5) || !get_width(args[0], &width) || !acquire(&v, args + 1, 4, 1)) return NULL;
    if (!get_count(&v.view[1], (size_t)width, &magnitudes) || !get_class_counts(&v.view[0], magnitudes, class_counts) ||
        !get_states(&v.view[2], states))
        return stop(&v);
    struct section section = {v.view[3].buf, (size_t)v.view[3].len, 0};
    const struct kernels *kernels = active;
    Py_BEGIN_ALLOW_THREADS
    is_good = kernels->magnitude_encode(class_counts, v.view[1].buf, width, states, &section, &fault);
    Py_END_ALLOW_THREADS
    PyObject *value = NULL;
    if (is_good && section.size == SIZE_MAX) value = Py_NewRef(Py_None);
    else if (is_good) value = PyBytes_FromStringAndSize((const char *)section.data, (Py_ssize_t)section.size);
    return finish(&v, is_good, &fault, value);
}

/* context_decode(width, bits, shift, offset, stream, base, states, positions, values, scratch, sums, out) -> count; out may be None */
static PyObject *native_context_decode(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    struct views v;
    struct block block = {0};
    struct decoded decoded = {0};
    struct fault fault;
    uint16_t states[CLASSES * STATES];
    long long offset;
    bool is_good;
    if (!has_arguments(count, 12) || !get_width(args[0], &block.width) || !get_exponent(args + 1, block.width, &block.exponent) ||
        !get_integer(args[3], 0, 1LL << 62, &offset))
        return NULL;
    bool has_out = args[11] != Py_None;
    if (!acquire(&v, args + 4, 7 + has_out, 4 + has_out)) return NULL;
    if (!get_count(&v.view[1], (size_t)block.width, &block.count) || !get_states(&v.view[2], states) ||
        !has_size(&v.view[3], block.count, 4, false) || !has_size(&v.view[4], block.count, (size_t)block.width, false) ||
        !has_size(&v.view[5], decode_work_bytes(block.count), 1, false) || !has_size(&v.view[6], 8, 4, true) ||
        (has_out && !has_size(&v.view[7], block.count, (size_t)block.width, true)) || !is_aligned(&v.view[3], 4) ||
        !is_aligned(&v.view[5], 4) || !are_apart(&v, 4 + has_out, 7, 1))
        return stop(&v);
    block.base = v.view[1].buf;
    decoded.positions = v.view[3].buf;
    decoded.values = v.view[4].buf;
    decoded.work = v.view[5].buf;
    decoded.offset = (uint64_t)offset;
    decoded.out = has_out ? v.view[7].buf : NULL;
    struct span stream = {v.view[0].buf, (size_t)v.view[0].len};
    const struct kernels *kernels = active;
    Py_BEGIN_ALLOW_THREADS
    is_good = kernels->context_decode(stream, &block, states, &decoded, &fault);
    Py_END_ALLOW_THREADS
    set_sums(&v.view[6], decoded.sums, decoded.growth);
    return finish(&v, is_good, &fault, is_good ? PyLong_FromSize_t(decoded.count) : NULL);
}

/* position_bits(members, positions) -> bits */
static PyObject *native_position_bits(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    struct views v;
    long long members;
    struct changes changes = {0};
    struct fault fault;
    uint64_t bits = 0;
    bool is_good;
    if (!has_arguments(count, 2) || !get_integer(args[0], 0, UINT32_MAX, &members) || !acquire(&v, args + 1, 1, 0)) return NULL;
    if (!get_count(&v.view[0], 4, &changes.count)) return stop(&v);
    changes.positions = v.view[0].buf;
    const struct kernels *kernels = active;
    Py_BEGIN_ALLOW_THREADS
    is_good = kernels->position_bits((size_t)members, &changes, &bits, &fault);
    Py_END_ALLOW_THREADS
    return finish(&v, is_good, &fault, is_good ? PyLong_FromUnsignedLongLong(bits) : NULL);
}

/* gap_encode(width, members, escape_length, table_symbols, table_lengths, positions, symbols, scratch) -> bytes */
static PyObject *native_gap_encode(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    struct views v;
    int width;
    long long members;
    struct changes changes;
    struct table table;
    struct fault fault;
    size_t size = 0;
    bool is_good;
    if (!has_arguments(count, 8) || !get_width(args[0], &width) || !get_integer(args[1], 0, UINT32_MAX, &members) ||
        !acquire(&v, args + 3, 5, 1))
        return NULL;
    if (!get_table(&v.view[0], &v.view[1], args[2], &table) || !get_count(&v.view[2], 4, &changes.count) ||
        !has_size(&v.view[3], changes.count, (size_t)width, true) ||
        !has_size(&v.view[4], gap_bytes((size_t)members, changes.count, width), 1, false))
        return stop(&v);
    changes.positions = v.view[2].buf;
    changes.values = v.view[3].buf;
    uint8_t *out = v.view[4].buf;
    const struct kernels *kernels = active;
    Py_BEGIN_ALLOW_THREADS
    is_good = kernels->gap_encode((size_t)members, width, &changes, &table, out, &size, &fault);
    Py_END_ALLOW_THREADS
    return finish(&v, is_good, &fault, is_good ? PyBytes_FromStringAndSize((const char *)out, (Py_ssize_t)size) : NULL);
}

/* gap_decode(width, members, escape_length, table_symbols, table_lengths, stream, positions, symbols) -> count */
static PyObject *native_gap_decode(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    struct views v;
    int width;
    long long members;
    struct table table;
    struct decoded decoded = {0};
    struct fault fault;
    bool is_good;
    if (!has_arguments(count, 8) || !get_width(args[0], &width) || !get_integer(args[1], 0, UINT32_MAX, &members) ||
        !acquire(&v, args + 3, 5, 2))
        return NULL;
    if (!get_table(&v.view[0], &v.view[1], args[2], &table) || !has_size(&v.view[3], (size_t)members, 4, false) ||
        !is_aligned(&v.view[3], 4) || !has_size(&v.view[4], (size_t)members, (size_t)width, false))
        return stop(&v);
    struct span stream = {v.view[2].buf, (size_t)v.view[2].len};
    decoded.positions = v.view[3].buf;
    decoded.values = v.view[4].buf;
    const struct kernels *kernels = active;
    Py_BEGIN_ALLOW_THREADS
    is_good = kernels->gap_decode(stream, (size_t)members, width, &table, &decoded, &fault);
    Py_END_ALLOW_THREADS
    return finish(&v, is_good, &fault, is_good ? PyLong_FromSize_t(decoded.count) : NULL);
}

/* compare_bytes(members) -> the scratch that compare needs */
static PyObject *native_compare_bytes(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    long long members;
    if (!has_arguments(count, 1) || !get_integer(args[0], 0, UINT32_MAX, &members)) return NULL;
    return PyLong_FromSize_t(compare_bytes((size_t)members));
}

/* draft_bytes(members, changed) -> the scratch that draft needs */
static PyObject *native_draft_bytes(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    long long members, changed;
    if (!has_arguments(count, 2) || !get_integer(args[0], 0, UINT32_MAX, &members) || !get_integer(args[1], 0, UINT32_MAX, &changed))
        return NULL;
    return PyLong_FromSize_t(draft_bytes((size_t)members, (size_t)changed));
}

static PyObject *native_decode_bytes(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    long long members;
    if (!has_arguments(count, 1) || !get_integer(args[0], 0, UINT32_MAX, &members)) return NULL;
    return PyLong_FromSize_t(decode_work_bytes((size_t)members));
}

static PyObject *native_gap_bytes(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    long long members, changed;
    int width;
    if (!has_arguments(count, 3) || !get_integer(args[0], 0, UINT32_MAX, &members) || !get_integer(args[1], 0, UINT32_MAX, &changed) ||
        !get_width(args[2], &width))
        return NULL;
    return PyLong_FromSize_t(gap_bytes((size_t)members, (size_t)changed, width));
}

static PyObject *native_levels(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(nothing)) {
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list && i < level_count; i++) {
        PyObject *name = PyUnicode_FromString(levels[i]->name);
        if (!name || PyList_Append(list, name)) Py_CLEAR(list);
        Py_XDECREF(name);
    }
    return list;
}

static PyObject *native_level(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(nothing)) { return PyUnicode_FromString(active->name); }

static PyObject *native_set_level(PyObject *Py_UNUSED(module), PyObject *name) {
    const char *text = PyUnicode_AsUTF8(name);
    if (!text) return NULL;
    for (size_t i = 0; i < level_count; i++) {
        if (strcmp(text, levels[i]->name)) continue;
        active = levels[i];
        Py_RETURN_NONE;
    }
    return PyErr_Format(PyExc_ValueError, "no level %R on this machine", name);
}

#define FAST(name) {#name, (PyCFunction)(void (*)(void))native_##name, METH_FASTCALL, NULL}

static PyMethodDef methods[] = {
    FAST(digest),
    FAST(digest_spans),
    FAST(digest_changes),
    FAST(scan),
    FAST(gather),
    FAST(patch),
    FAST(patch_xor),
    FAST(copy_box),
    FAST(compare),
    FAST(draft),
    FAST(context_decode),
    FAST(magnitude_bins),
    FAST(magnitude_encode),
    FAST(position_bits),
    FAST(gap_encode),
    FAST(gap_decode),
    FAST(compare_bytes),
    FAST(draft_bytes),
    FAST(decode_bytes),
    FAST(gap_bytes),
    {"levels", native_levels, METH_NOARGS, NULL},
    {"level", native_level, METH_NOARGS, NULL},
    {"set_level", native_set_level, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static int start(PyObject *Py_UNUSED(module)) {
    start_levels();
    return 0;
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, (void *)start},
#ifdef Py_mod_gil
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "_native", .m_methods = methods, .m_slots = slots};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&definition); }

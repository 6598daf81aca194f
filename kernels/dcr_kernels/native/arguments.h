/* Arguments of the extension module's functions: buffers with a size that is checked, numbers in a range. */
#ifndef DCR_ARGUMENTS_H
#define DCR_ARGUMENTS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "kernels.h"

#define MOST_VIEWS 9

struct views {
    Py_buffer view[MOST_VIEWS];
    int count;
};

static void release(struct views *views) {
    while (views->count) PyBuffer_Release(&views->view[--views->count]);
}

/* Views `count` arguments, the last `writable` of them for writing. */
static bool acquire(struct views *views, PyObject *const *args, int count, int writable) {
    views->count = 0;
    for (int i = 0; i < count; i++) {
        int flags = i >= count - writable ? PyBUF_WRITABLE : PyBUF_SIMPLE;
        if (PyObject_GetBuffer(args[i], &views->view[i], flags)) {
            release(views);
            return false;
        }
        views->count++;
    }
    return true;
}

static bool has_arguments(Py_ssize_t found, Py_ssize_t wanted) {
    if (found == wanted) return true;
    PyErr_Format(PyExc_TypeError, "%zd arguments, not %zd", found, wanted);
    return false;
}

static bool get_integer(PyObject *object, long long least, long long most, long long *value) {
    *value = PyLong_AsLongLong(object);
    if (*value == -1 && PyErr_Occurred()) return false;
    if (*value >= least && *value <= most) return true;
    PyErr_Format(PyExc_ValueError, "%lld is not in %lld .. %lld", *value, least, most);
    return false;
}

static bool get_width(PyObject *object, int *width) {
    long long value;
    if (!get_integer(object, 1, 8, &value)) return false;
    *width = (int)value;
    if ((value & (value - 1)) == 0) return true;
    PyErr_Format(PyExc_ValueError, "no element width: %lld", value);
    return false;
}

static bool get_exponent(PyObject *const *args, int width, struct field *exponent) {
    long long bits, shift;
    if (!get_integer(args[0], 0, 11, &bits) || !get_integer(args[1], 0, 8 * width - bits, &shift)) return false;
    *exponent = (struct field){(unsigned)bits, (unsigned)shift};
    return true;
}

/* Has the view room for, or just, `count` entries of `size` bytes? */
static bool has_size(const Py_buffer *view, size_t count, size_t size, bool exact) {
    size_t bytes = (size_t)view->len;
    if (exact ? bytes % size == 0 && bytes / size == count : bytes / size >= count) return true;
    PyErr_Format(PyExc_ValueError, "sizes differ: %zu bytes for %zu entries of %zu bytes", bytes, count, size);
    return false;
}

/* Is the view aligned for entries of `size` bytes? */
static bool is_aligned(const Py_buffer *view, size_t size) {
    if ((uintptr_t)view->buf % size == 0) return true;
    PyErr_Format(PyExc_ValueError, "an array for results is not aligned for %zu bytes", size);
    return false;
}

static bool get_count(const Py_buffer *view, size_t size, size_t *count) {
    *count = (size_t)view->len / size;
    if ((size_t)view->len % size == 0 && *count <= UINT32_MAX) return true;
    PyErr_Format(PyExc_ValueError, "%zd bytes are no array of fewer than 2^32 entries of %zu bytes", view->len, size);
    return false;
}

static PyObject *raise_fault(const struct fault *fault) {
    return PyErr_Format(PyExc_ValueError, "%s: at %s %llu", fault->what, fault->unit, (unsigned long long)fault->at);
}

/* Ends a call: gives the views back and returns `value`, NULL for an exception that is set already, or the fault. */
static PyObject *finish(struct views *views, bool is_good, const struct fault *fault, PyObject *value) {
    release(views);
    if (is_good) return value;
    Py_XDECREF(value);
    return raise_fault(fault);
}

static PyObject *stop(struct views *views) {
    release(views);
    return NULL;
}

/* Refuses arrays that overlap where one is written, as the last `writable` views are. View `in_place` may be just view `source`; -1 for
 * none. */
static bool are_apart(const struct views *views, int writable, int in_place, int source) {
    for (int i = views->count - writable; i < views->count; i++) {
        const uint8_t *begin = views->view[i].buf, *end = begin + views->view[i].len;
        for (int j = 0; j < views->count; j++) {
            const uint8_t *other = views->view[j].buf;
            if (j == i || other >= end || other + views->view[j].len <= begin) continue;
            if (i == in_place && j == source && other == begin) continue;
            PyErr_SetString(PyExc_ValueError, "arrays overlap");
            return false;
        }
    }
    return true;
}

/* Copies one or 16 class counts, which must add up to `count`. */
static bool get_class_counts(const Py_buffer *view, size_t count, uint32_t class_counts[CLASSES]) {
    uint64_t sum = 0;
    if (view->len != 4 && view->len != 4 * CLASSES) {
        PyErr_Format(PyExc_ValueError, "%zd bytes of class counts", view->len);
        return false;
    }
    memset(class_counts, 0, CLASSES * sizeof *class_counts);
    memcpy(class_counts, view->buf, (size_t)view->len);
    for (int c = 0; c < CLASSES; c++) sum += class_counts[c];
    if (sum == count) return true;
    PyErr_Format(PyExc_ValueError, "class counts of %llu magnitudes for %zu", (unsigned long long)sum, count);
    return false;
}

static bool get_states(const Py_buffer *view, uint16_t states[CLASSES * STATES]) {
    if (!has_size(view, CLASSES * STATES, 2, true)) return false;
    memcpy(states, view->buf, (size_t)view->len);
    for (int i = 0; i < CLASSES * STATES; i++) {
        if (states[i]) continue;
        /* A bit of probability 0 would leave the coder a range of 0, from which it never returns. */
        PyErr_Format(PyExc_ValueError, "starting state 0: at element %d", i);
        return false;
    }
    return true;
}

static void set_sums(const Py_buffer *view, const uint32_t sums[4], const uint32_t growth[4]) {
    memcpy(view->buf, sums, 16);
    memcpy((uint8_t *)view->buf + 16, growth, 16);
}

static bool get_table(const Py_buffer *symbols, const Py_buffer *lengths, PyObject *escape_length, struct table *table) {
    long long escape;
    if (!get_integer(escape_length, -1, LONGEST_CODE, &escape) || !get_count(symbols, 8, &table->count) ||
        !has_size(lengths, table->count, 1, true))
        return false;
    table->symbols = symbols->buf;
    table->lengths = lengths->buf;
    table->escape_length = (int)escape;
    return true;
}

#endif

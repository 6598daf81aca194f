/* The adaptive binary coder of FORMAT.md 5.4 and the magnitudes it carries (5.5, step 5). */
#ifndef DCR_CODER_H
#define DCR_CODER_H

#include "bits.h"

#define RANGE_LEAST (UINT32_C(1) << 24)

struct encoder {
    uint8_t *at;
    uint64_t low;
    uint32_t range;
};

ALWAYS_INLINE void encoder_carry(struct encoder *encoder) {
    if (encoder->low <= UINT32_MAX) return;
    uint8_t *carry = encoder->at;
    do carry--;
    while (++*carry == 0);
    encoder->low &= UINT32_MAX;
}

/* Gives out the bytes of low that are settled, if there are any; writes up to 4 bytes past them. */
ALWAYS_INLINE void encoder_shift(struct encoder *encoder) {
    if (encoder->range >= RANGE_LEAST) return;
    encoder_carry(encoder);
    unsigned shift = (unsigned)__builtin_clz(encoder->range) & 24;
    uint32_t bytes = __builtin_bswap32((uint32_t)encoder->low);
    memcpy(encoder->at, &bytes, 4);
    encoder->at += shift >> 3;
    encoder->low = (uint32_t)(encoder->low << shift);
    encoder->range <<= shift;
}

ALWAYS_INLINE void encode_bit(struct encoder *encoder, uint16_t *state, bool bit) {
    uint32_t p = *state, bound = (encoder->range >> 16) * p;
    if (bit) {
        encoder->low += bound;
        encoder->range -= bound;
        *state = (uint16_t)(p - (p >> 5));
    } else {
        encoder->range = bound;
        *state = (uint16_t)(p + ((65536 - p) >> 5));
    }
    encoder_shift(encoder);
}

ALWAYS_INLINE void encode_plain(struct encoder *encoder, bool bit) {
    encoder->range >>= 1;
    encoder->low += bit ? encoder->range : 0;
    encoder_shift(encoder);
}

/* Ends the section at the value with the most trailing zero bytes in [low, low + range), which it drops. */
static inline uint8_t *encoder_end(struct encoder *encoder, uint8_t *begin) {
    encoder_carry(encoder);
    uint64_t end = encoder->low + encoder->range;
    uint64_t all = (encoder->low + UINT32_MAX) >> 32 << 32;
    encoder->low = all < end ? all : (encoder->low + (RANGE_LEAST - 1)) & ~(uint64_t)(RANGE_LEAST - 1);
    encoder_carry(encoder);
    *encoder->at++ = (uint8_t)(encoder->low >> 24);
    while (encoder->at > begin && encoder->at[-1] == 0) encoder->at--;
    return encoder->at;
}

ALWAYS_INLINE unsigned state_of(unsigned bit) { return bit < STATES ? bit : STATES - 1; }

/* |d| is 1 .. 2^(w-1). */
ALWAYS_INLINE bool is_magnitude(int width, uint64_t value) { return value - 1 < UINT64_C(1) << (8 * width - 1); }

ALWAYS_INLINE bool magnitude_encode_of(int width, const uint32_t *class_counts, const uint8_t *magnitudes, const uint16_t *states,
                                       struct section *out, struct fault *fault) {
    uint16_t state[CLASSES][STATES];
    memcpy(state, states, sizeof state);
    struct encoder encoder = {.at = out->data, .range = UINT32_MAX};
    size_t at = 0;
    for (unsigned class = 0; class < CLASSES; class++) {
        for (uint32_t i = 0; i < class_counts[class]; i++, at++) {
            if (UNLIKELY((size_t)(encoder.at - out->data) + MAGNITUDE_BYTES > out->capacity)) {
                out->size = SIZE_MAX;
                return true;
            }
            uint64_t value = load_element(magnitudes, at, width);
            if (UNLIKELY(!is_magnitude(width, value))) return fail(fault, "magnitude out of range", "element", at);
            unsigned length = bit_length(value) - 1;
            for (unsigned bit = 0; bit < length; bit++) encode_bit(&encoder, &state[class][state_of(bit)], true);
            encode_bit(&encoder, &state[class][state_of(length)], false);
            for (unsigned bit = length; bit-- > 0;) encode_plain(&encoder, value >> bit & 1);
        }
    }
    out->size = at ? (size_t)(encoder_end(&encoder, out->data) - out->data) : 0;
    return true;
}

static bool magnitude_encode(const uint32_t *class_counts, const uint8_t *magnitudes, int width, const uint16_t *states, struct section *out,
                             struct fault *fault) {
    return FOR_WIDTH(width, magnitude_encode_of, class_counts, magnitudes, states, out, fault);
}

ALWAYS_INLINE bool magnitude_bins_of(int width, const uint32_t *class_counts, const uint8_t *magnitudes, uint64_t *bins, struct fault *fault) {
    size_t at = 0;
    for (unsigned class = 0; class < CLASSES; class++) {
        uint64_t lengths[65] = {0};
        for (uint32_t i = 0; i < class_counts[class]; i++, at++) {
            uint64_t value = load_element(magnitudes, at, width);
            if (UNLIKELY(!is_magnitude(width, value))) return fail(fault, "magnitude out of range", "element", at);
            lengths[bit_length(value)]++;
        }
        uint64_t longer = 0;
        for (unsigned bit = 8 * (unsigned)width; bit-- > 0;) {
            uint64_t *state = bins + 2 * (STATES * class + state_of(bit));
            state[0] += lengths[bit + 1];
            state[1] += longer;
            longer += lengths[bit + 1];
        }
    }
    return true;
}

static bool magnitude_bins(const uint32_t *class_counts, const uint8_t *magnitudes, int width, uint64_t *bins, struct fault *fault) {
    return FOR_WIDTH(width, magnitude_bins_of, class_counts, magnitudes, bins, fault);
}

struct decoder {
    const uint8_t *next;
    const uint8_t *end;
    uint32_t code;
    uint32_t range;
};

ALWAYS_INLINE void decoder_shift(struct decoder *decoder) {
    while (decoder->range < RANGE_LEAST) {
        decoder->range <<= 8;
        decoder->code = decoder->code << 8 | (decoder->next < decoder->end ? *decoder->next++ : 0);
    }
}

static inline struct decoder decoder_start(const uint8_t *begin, const uint8_t *end) {
    struct decoder decoder = {.next = begin, .end = end, .range = UINT32_MAX};
    for (int i = 0; i < 4; i++) decoder.code = decoder.code << 8 | (decoder.next < end ? *decoder.next++ : 0);
    return decoder;
}

ALWAYS_INLINE bool decode_bit(struct decoder *decoder, uint16_t *state) {
    uint32_t p = *state, bound = (decoder->range >> 16) * p;
    bool bit = decoder->code >= bound;
    if (bit) {
        decoder->code -= bound;
        decoder->range -= bound;
        *state = (uint16_t)(p - (p >> 5));
    } else {
        decoder->range = bound;
        *state = (uint16_t)(p + ((65536 - p) >> 5));
    }
    decoder_shift(decoder);
    return bit;
}

ALWAYS_INLINE unsigned decode_plain(struct decoder *decoder) {
    decoder->range >>= 1;
    unsigned bit = decoder->code >= decoder->range;
    decoder->code -= bit ? decoder->range : 0;
    decoder_shift(decoder);
    return bit;
}

/* Reads one magnitude; 0 when it has more than `bits` bits. */
ALWAYS_INLINE uint64_t decode_magnitude(struct decoder *decoder, uint16_t *states, unsigned bits) {
    unsigned length = 0;
    while (decode_bit(decoder, &states[state_of(length)]))
        if (++length >= bits) return 0;
    uint64_t value = 1;
    for (unsigned i = 0; i < length; i++) value = value << 1 | decode_plain(decoder);
    return value;
}

#endif

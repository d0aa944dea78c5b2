/* The part of `vector_generic.h` for GEMMs of integers, in exact sums of 32 bits. */
typedef lanes ints; /* of 16 columns */

enum {
    INT_ROWS = 2,      /* of a tile at most */
    INT_WIDE_ROWS = 0, /* rows up to which a tile has both halves of a panel's columns */
};

INLINED ints ints_all(int32_t x) { return (ints){0} + x; }
INLINED ints ints_add(ints a, ints b) { return a + b; }
INLINED vec vec_of_ints(ints x) { return __builtin_convertvector(x, vec); }

INLINED ints ints_mul(ints a, ints b) { return a * b; }
INLINED ints low_halves(ints x) { return (ints)((words_t)x << 16) >> 16; }
INLINED ints high_halves(ints x) { return x >> 16; }

INLINED ints
load_ints(const int32_t *from)
{
    ints x;
    memcpy(&x, from, sizeof x);
    return x;
}

/* 16 numbers of 16 bits, with or without a sign. */
INLINED ints
load_shorts(const int16_t *from, int has_sign)
{
    int16_t shorts __attribute__((vector_size(32)));
    memcpy(&shorts, from, sizeof shorts);
    const ints x = __builtin_convertvector(shorts, ints);
    return has_sign ? x : x & 0xffff;
}

/* The lower halves of words and the upper half of a number whose lower half is 0. */
INLINED ints join_halves(ints low, const int32_t *high) { return (low & 0xffff) | *high; }

/* Adds the products of both halves of words, which have signs. */
INLINED ints
add_pairs(int has_dot, ints sum, ints a, ints b)
{
    (void)has_dot;
    return sum + low_halves(a) * low_halves(b) + high_halves(a) * high_halves(b);
}

/* Code number `index` of each of 16 words: of 4 bits without a sign, or of 8 with one. */
INLINED vec
code_of(words_t w, int bits, int index)
{
    const words_t top = w << (32 - bits - bits * index);
    return vec_of_ints(bits == 4 ? (ints)(top >> 28) : (ints)top >> 24);
}

/* Bits 0 to 3 of each byte (part 0), or 4 to 7. */
INLINED words_t
split_nibbles(words_t w, int part)
{
    return w >> 4 * part & 0x0f0f0f0f;
}

/* Numbers of e2m1, twice, in the bits that `split_nibbles` takes; as `add_bytes` reads them. */
INLINED words_t
split_e2m1(int has_dot, words_t w, int part)
{
    (void)has_dot;
    static const int8_t numbers[] = {E2M1_TWICE};
    uint8_t bytes[sizeof w];
    w = split_nibbles(w, part);
    memcpy(bytes, &w, sizeof bytes);
    for (size_t i = 0; i < sizeof bytes; i++)
        bytes[i] = (uint8_t)numbers[bytes[i]];
    memcpy(&w, bytes, sizeof bytes);
    return w;
}

INLINED ints
add_bytes(int has_dot, ints sum, words_t bytes, const int8_t *codes)
{
    (void)has_dot;
    const int32_t word = word_at(codes);
    for (int i = 0; i < 4; i++)
        sum += ((ints)(bytes << (24 - 8 * i)) >> 24) * (int8_t)((uint32_t)word >> 8 * i);
    return sum;
}

#define NIBBLES_ARE_BYTES 1

/* 16 codes, from -127 to 127; if they `are_paired`, of each eight those with even indices first. */
INLINED void
store_codes(int8_t *to, vec codes, int are_paired)
{
    for (int i = 0; i < LANES; i++)
        to[are_paired ? i / 8 * 8 + i % 2 * 4 + i % 8 / 2 : i] = (int8_t)codes[i];
}

/* 16 whole numbers as ones of 16 bits. */
INLINED void
store_shorts(int16_t *to, vec numbers)
{
    for (int i = 0; i < LANES; i++)
        to[i] = (int16_t)numbers[i];
}

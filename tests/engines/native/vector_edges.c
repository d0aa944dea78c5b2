/* Calls each function of `vector.h` with numbers at the edges of float32: subnormal, infinite, no numbers, ties. Prints a
 * digest of the results, in which all that is not a number is one: its bits are the processor's. It is compiled by
 * `test_arm.py`, and is the same for every path and processor.
 */
#include <stdio.h>
#include <stdlib.h>

#include "fuzz_numbers.h"
#include "rounding.h"

static uint64_t digest = 14695981039346656037u;

/* FNV-1a, word by word. */
static void
add_word(uint32_t word)
{
    digest = (digest ^ word) * 1099511628211u;
}

static void
add_float(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    add_word(x == x ? bits : 0x7fc00000);
}

static void
add_vec(vec x)
{
    float lanes[LANES];
    vec_store(lanes, x);
    for (int i = 0; i < LANES; i++)
        add_float(lanes[i]);
}

static float
float_of(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Any bits, or those of an edge or of its neighbour; with moderate exponents if it `is_finite`. */
static float
some_float(int is_finite)
{
    static const uint32_t edges[] = {0,          1,          0x007fffff, 0x00800000, 0x3f800000, 0x3f808000, 0x3f818000,
                                     0x4b000000, 0x40200000, 0x7f7fffff, 0x7f7f8000, 0x7f800000, 0x7f800001, 0x7fc00000};
    const uint32_t sign = (uint32_t)below(2) << 31, mantissa = (uint32_t)below(1 << 23);
    if (is_finite)
        return float_of(sign | (uint32_t)(below(40) + 107) << 23 | mantissa);
    if (below(2))
        return float_of(sign | (uint32_t)below(256) << 23 | mantissa);
    const uint32_t neighbour = (uint32_t)below(2);
    return float_of(sign | (edges[below(sizeof edges / sizeof *edges)] + neighbour));
}

static vec
some_vec(int is_finite)
{
    float lanes[LANES];
    for (int i = 0; i < LANES; i++)
        lanes[i] = some_float(is_finite);
    return vec_load(lanes);
}

/* Without positive infinity, whose power of 2 is infinite in AVX-512 and not a number in the others. */
static vec
some_powers(void)
{
    float lanes[LANES];
    for (int i = 0; i < LANES; i++) {
        lanes[i] = some_float(0);
        if (lanes[i] > FLT_MAX)
            lanes[i] = FLT_MAX;
    }
    return vec_load(lanes);
}

static void
arithmetic(void)
{
    const vec powers = some_powers();
    const vec a = some_vec(0), b = some_vec(0), c = some_vec(0), x = some_vec(1), y = some_vec(1), z = some_vec(1);
    const float bound = some_float(1);
    const uint32_t mask = (uint32_t)below(1 << LANES);
    const vec results[] = {
        vec_add(a, b), vec_sub(a, b), vec_mul(a, b), vec_div(a, b), vec_max(a, b), vec_min(a, b), vec_sqrt(a), vec_round(a),
        vec_fmadd(a, b, c), vec_fmsub(a, b, c), vec_fmadd(x, y, z), vec_fmsub(x, y, z), vec_div(x, y), vec_round(x),
        vec_exp2(powers), vec_exp2(x), vec_soft_cap(powers, 3.0f), vec_soft_cap(x, 30.0f), vec_all(vec_first(a)), vec_zero(),
        vec_zero_where_below(a, bound, b), vec_mul_where(mask, a, b, c), vec_where_greater(a, b, c, x),
        vec_max_magnitude(vec_max_magnitude(vec_zero(), a), b),
    };
    for (size_t i = 0; i < sizeof results / sizeof *results; i++)
        add_vec(results[i]);
    add_word(vec_at_least(a, bound));
    add_float(vec_sum(x));
    add_float(vec_highest(x));
    add_float(vec_highest_magnitude(vec_max_magnitude(vec_zero(), a)));
}

static void
conversions(void)
{
    uint16_t halves[LANES], stored[LANES + 1] = {0};
    element elements[LANES + 1] = {0};
    operand operands[LANES];
    int8_t bytes[LANES];
    float numbers[LANES];
    const int64_t count = 1 + below(LANES + 4);
    for (int i = 0; i < LANES; i++) {
        halves[i] = (uint16_t)below(0x10000);
        bytes[i] = (int8_t)below(256);
        numbers[i] = some_float(1);
    }
    add_vec(load_halves(halves));
    add_vec(load_bfloat16(halves, count));
    add_vec(load_bytes(bytes));
    const vec x = some_vec(0);
    store_bfloat16(stored, count, x);
    store_lanes(elements, count, x);
    store_operands(operands, x);
    for (int i = 0; i < LANES; i++)
        add_word((stored[i] & 0x7fff) > 0x7f80 ? 0x7fc0 : stored[i]);
    add_word(stored[LANES]);
    add_vec(load_lanes(elements, count));
    add_vec(load_lanes(elements + 1, LANES)); /* what is behind `count` is not written */
    for (int i = 0; i < LANES; i++) {
        uint32_t bits = 0;
        memcpy((char *)&bits + sizeof bits - sizeof *operands, operands + i, sizeof *operands); /* little-endian */
        add_float(float_of(bits));
    }
    const float scale = scale_of(magnitude_of(numbers, LANES), below(2) ? HIGHEST_BYTE : 2047);
    add_float(scale);
    add_vec(codes_of(vec_load(numbers), scale));
}

INLINED void
sums_of_products(int has_dot, words_t w, const int8_t *codes)
{
    const ints start = ints_all(-byte_excess(has_dot) * (codes[0] + codes[1] + codes[2] + codes[3]));
    add_vec(vec_of_ints(add_bytes(has_dot, start, split_bytes(has_dot, w), codes)));
    ints sum = start;
    for (int part = 0; part < 2; part++)
        sum = add_bytes(has_dot, sum, split_e2m1(has_dot, w, part), codes);
    add_vec(vec_of_ints(ints_add(sum, start))); /* each starts with its own excess */
    sum = ints_all(0);
    for (int i = 0; i < 8; i++) /* of 32 codes */
        sum = add_nibbles(has_dot, sum, split_nibbles(w, i % 2), codes + 4 * i);
    add_vec(vec_of_ints(nibble_sums(has_dot, sum)));
}

/* Functions, as in `integer.c`: in one with a condition, a compiler may compute what only some processors can. */
static __attribute__((noinline)) void add_sums(words_t w, const int8_t *codes) { sums_of_products(0, w, codes); }
static __attribute__((noinline)) void add_dot_sums(words_t w, const int8_t *codes) { sums_of_products(1, w, codes); }

static void
integers(void)
{
    element words[COLUMNS * PER_WORD];
    int8_t codes[2 * LANES], stored[LANES];
    for (size_t i = 0; i < sizeof words; i++)
        ((char *)words)[i] = (char)below(256);
    for (int i = 0; i < 2 * LANES; i++)
        codes[i] = (int8_t)(below(8) ? below(255) - 127 : below(2) ? 127 : -127);
    const words_t w = load_words(words);
    for (int index = 0; index < 8; index++)
        add_vec(nibbles_of(w, index)), add_vec(e2m1_of(w, index));
    add_sums(w, codes);
    if (processor_has_dot()) /* the same digest as where there is one way */
        add_dot_sums(w, codes);
    else
        add_sums(w, codes);
    float numbers[LANES];
    for (int i = 0; i < LANES; i++)
        numbers[i] = (float)codes[i];
    for (int are_paired = 0; are_paired < 2; are_paired++) {
        store_codes(stored, vec_load(numbers), are_paired);
        for (int i = 0; i < LANES; i++)
            add_word((uint32_t)stored[i]);
    }
    int16_t shorts[LANES];
    store_shorts(shorts, vec_mul(vec_load(numbers), vec_all(129.0f)));
    for (int i = 0; i < LANES; i++)
        add_word((uint32_t)shorts[i]);
}

/* Blocks of every size. */
static void
transpositions(void)
{
    element from[LANES * LANES * PER_WORD], to[LANES * LANES * PER_WORD];
    uint32_t words[LANES * LANES];
    for (int i = 0; i < LANES * LANES; i++)
        words[i] = (uint32_t)below(1 << 30);
    memcpy(from, words, sizeof from);
    memset(to, 0, sizeof to);
    const int rows = (int)(1 + below(LANES)), some_words = (int)(1 + below(LANES));
    transpose_words(from, LANES * PER_WORD, rows, some_words, to, LANES * PER_WORD);
    memcpy(words, to, sizeof words);
    for (int i = 0; i < LANES * LANES; i++)
        add_word(words[i]);
    uint16_t shorts[2 * COLUMNS], both[2 * COLUMNS];
    memcpy(shorts, from, sizeof shorts);
    const uint16_t *odd = below(2) ? shorts + COLUMNS : NULL;
    interleave(shorts, odd, 1 + below(COLUMNS + 4), both);
    for (int i = 0; i < 2 * COLUMNS; i++)
        add_word(both[i]);
}

int
main(int count, char **arguments)
{
    const int rounds = count > 1 ? atoi(arguments[1]) : 1000;
    state = count > 2 ? strtoull(arguments[2], NULL, 10) : 1;
    for (int i = 0; i < rounds; i++) {
        arithmetic();
        conversions();
        integers();
        transpositions();
    }
    printf("%016llx\n", (unsigned long long)digest);
    return 0;
}

/* Linear layers on quantised weights: GEMMs that unpack a weight's codes in registers, to float32.
 *
 * A weight is scale * code + offset, rounded once, with one scale and one offset for each group of consecutive weights
 * of a row. So a result has the bits of `linear` in float32 on the weight that is unpacked, whatever number of rows is
 * computed together: it is batch-invariant, and all paths have the same bits.
 *
 * Codes lie in panels of 32 columns, as the words of `panels.h`: [panels][inner / 8][32 columns] words of eight codes
 * of 4 bits, the first one lowest, or [panels][inner][32 columns] signed bytes. Scales and offsets are
 * [panels][groups][32 columns]. They belong to the kernels in float32; rows and results may be bfloat16 too.
 */
#ifdef FLOAT32
#include <stdlib.h>

#include "groups.h"
#include "panels.h"
#include "quantised.h"

enum {
    PART_ROWS = 192,                     /* rows that share a part of a panel once it is unpacked */
    PART = 256,                          /* weights of a column in such a part: 32 KiB */
#ifdef PLAIN_C                           /* a compiler takes long to unroll vectors that the processor has not got */
    FEW = 1,
    CODES_UNROLLED = 1,
#else
    FEW = WIDE_ROWS < 4 ? WIDE_ROWS : 4, /* rows up to which weights are used as they are unpacked */
    CODES_UNROLLED = 8,                  /* of a word */
#endif
};

/* The destination of a weight of each of 32 columns: written to `unpacked`, or, if that is NULL, multiplied by an element
 * of each of `rows` rows and added to `sum`.
 */
typedef struct {
    float *unpacked;
    const float *row;
    int64_t row_stride;
    vec sum[FEW][2];
} use_t;

INLINED void
use_codes(int rows, vec left, vec right, const group_t *g, int64_t index, use_t *use)
{
    const vec w[2] = {vec_fmadd(left, g->scale[0], g->offset[0]), vec_fmadd(right, g->scale[1], g->offset[1])};
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
        if (!rows)
            vec_store(use->unpacked + index * COLUMNS + half * LANES, w[half]);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++)
            use->sum[r][half] =
                vec_fmadd(vec_all(use->row[r * use->row_stride + index]), w[half], use->sum[r][half]);
    }
}

/* Unpacks the weights of a panel from `first` to `stop`, which for codes of 4 bits are multiples of 8. What is written to
 * memory is computed with before the next part is unpacked, which is fetched meanwhile.
 */
INLINED void
unpack(int rows, int bits, int is_e2m1, const quantised_t *q, int64_t panel, int64_t first, int64_t stop, use_t *use)
{
    const char *codes = q->codes + (panel * q->inner + first) * COLUMNS * bits / 8;
    const int64_t next = PART * COLUMNS * bits / 8;
    for (int64_t at = first; at < stop;) {
        const group_t g = load_group(q, panel, at / q->group);
        const int64_t end = smaller(stop, at - at % q->group + q->group);
        if (bits == 8)
            for (; at < end; at++, codes += COLUMNS) {
                if (!rows)
                    fetch_to_l2(codes + next);
                use_codes(rows, load_bytes((const int8_t *)codes), load_bytes((const int8_t *)codes + LANES), &g,
                          at - first, use);
            }
        else
            for (; at < end; at += 8, codes += COLUMNS * sizeof(uint32_t)) {
                const words_t left = load_words((const element *)codes);
                const words_t right = load_words((const element *)codes + LANES);
                for (int line = 0; !rows && line < 2; line++)
                    fetch_to_l2(codes + next + line * LANES * (int)sizeof(uint32_t));
#pragma GCC unroll CODES_UNROLLED
                for (int i = 0; i < 8; i++)
                    use_codes(rows, four_bits_of(left, i, is_e2m1), four_bits_of(right, i, is_e2m1), &g,
                              at - first + i, use);
            }
    }
}

/* Up to FEW rows from `row` on. */
INLINED void
multiply_few(int rows, int bits, int is_e2m1, const quantised_t *q, int64_t panel, const float *row, float *sums)
{
    use_t use = {.row = row, .row_stride = q->inner};
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
        use.sum[r][0] = use.sum[r][1] = vec_zero();
    unpack(rows, bits, is_e2m1, q, panel, 0, q->inner, &use);
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) {
        vec_store(sums + r * COLUMNS, use.sum[r][0]);
        vec_store(sums + r * COLUMNS + LANES, use.sum[r][1]);
    }
}

static void
multiply_a_few(const quantised_t *q, int64_t panel, int rows, const float *row, float *sums)
{
#define NUMBER(n)                                                                                                      \
    case n:                                                                                                            \
        if (n <= FEW && q->bits == 8)                                                                                  \
            multiply_few(n <= FEW ? n : 1, 8, 0, q, panel, row, sums);                                                 \
        else if (n <= FEW && q->is_e2m1)                                                                               \
            multiply_few(n <= FEW ? n : 1, 4, 1, q, panel, row, sums);                                                 \
        else if (n <= FEW)                                                                                             \
            multiply_few(n <= FEW ? n : 1, 4, 0, q, panel, row, sums);                                                 \
        break;
    switch (rows) {
        NUMBER(1) NUMBER(2) NUMBER(3) NUMBER(4)
    }
#undef NUMBER
}

/* Many rows: parts of a panel are unpacked once for all of them. */
static void
multiply_many(const quantised_t *q, int64_t panel, int64_t rows, const float *row, float *sums)
{
    float unpacked[PART * COLUMNS] ALIGNED;
    const int64_t blocks = (rows + ROWS - 1) / ROWS;
    for (int64_t part = 0; part < q->inner; part += PART) {
        const int64_t words = smaller(PART, q->inner - part);
        use_t use = {.unpacked = unpacked};
        if (q->bits == 8)
            unpack(0, 8, 0, q, panel, part, part + words, &use);
        else if (q->is_e2m1)
            unpack(0, 4, 1, q, panel, part, part + words, &use);
        else
            unpack(0, 4, 0, q, panel, part, part + words, &use);
        for (int64_t block = 0; block < blocks; block++) {
            const int64_t start = rows * block / blocks, stop = rows * (block + 1) / blocks;
            multiply((int)(stop - start), row + start * q->inner + part, q->inner, unpacked, PANEL_STRIDE,
                     words, sums + start * COLUMNS, COLUMNS, part > 0);
        }
    }
}

static void
compute_panel(const quantised_t *q, int64_t panel)
{
    float sums[PART_ROWS * COLUMNS] ALIGNED;
    for (int64_t first = 0; first < q->rows; first += PART_ROWS) {
        const int64_t count = smaller(PART_ROWS, q->rows - first);
        const float *row = (const float *)q->input + first * q->inner;
        if (count <= FEW)
            multiply_a_few(q, panel, (int)count, row, sums);
        else
            multiply_many(q, panel, count, row, sums);
        finish_rows(q->layer, q->is_bfloat16, first, count, panel * COLUMNS, NULL, sums);
    }
}

static void
compute_panels(const void *arguments, int64_t first, int64_t stop)
{
    for (int64_t panel = first; panel < stop; panel++)
        compute_panel(arguments, panel);
}

typedef struct {
    const void *input;
    int64_t inner;
    float *to;
} widening_t;

/* Rows of bfloat16, to float32. */
static void
widen(const void *arguments, int64_t first, int64_t stop)
{
    const widening_t *w = arguments;
    for (int64_t at = first * w->inner, end = stop * w->inner; at < end; at += LANES)
        store_floats(w->to + at, end - at, read_lanes(w->input, at, end - at, 1));
}

/* The rows of layers in float32; layers that read the same rows one after the other share them. */
static void
widen_rows(quantised_t *layers, const linear_t *given, int64_t count, float *to, ready_t *ready, const threads_t *threads)
{
    widening_t *widenings = (widening_t *)(ready + count);
    int64_t rows = 0, number = 0;
    for (int64_t i = 0; i < count; i++) {
        if (!given[i].is_bfloat16)
            continue;
        if (i && shares_rows(given + i, given + i - 1)) {
            layers[i].input = layers[i - 1].input;
            continue;
        }
        widenings[number] = (widening_t){given[i].input, layers[i].inner, to};
        ready[number] = (ready_t){widenings + number, layers[i].rows, 0};
        layers[i].input = to;
        to += layers[i].rows * layers[i].inner;
        rows += layers[i].rows;
        number++;
    }
    const group_job_t job = {ready, number, widen};
    parallel_for(threads, rows, rows > PART_ROWS ? 1 : PART_ROWS, compute_group, &job);
}

/* Returns 0, or -1 if there is no memory for rows in float32. */
int32_t
quantised_linear(const linear_t *given, int64_t count, const threads_t *threads)
{
    int64_t size = 0;
    for (int64_t i = 0; i < count; i++)
        size += given[i].is_bfloat16 ? given[i].rows * given[i].gemm->inner * (int64_t)sizeof(float) : 0;
    char *memory = malloc(count * (sizeof(quantised_t) + sizeof(ready_t) + sizeof(widening_t)) + size);
    if (!memory)
        return -1;
    quantised_t *layers = (quantised_t *)memory;
    ready_t *ready = (ready_t *)(layers + count);
    for (int64_t i = 0; i < count; i++)
        layers[i] = quantised_of(given + i);
    widen_rows(layers, given, count, (float *)((widening_t *)(ready + count) + count), ready, threads);
    for (int64_t i = 0; i < count; i++)
        ready[i] = (ready_t){layers + i, (layers[i].columns + COLUMNS - 1) / COLUMNS, given[i].follows};
    parallel_for_group(threads, ready, count, compute_panels);
    free(memory);
    return 0;
}

/* Codes from `at` on of a row, which is a column of its panel. Codes of 8 bits lie in words of four, or one by one. */
static inline void
read_codes(const gemm_t *g, int64_t row, int64_t at, int64_t count, float *codes)
{
    static const float numbers[] = {E2M1_TWICE};
    const int64_t column = row % COLUMNS, per_word = 32 / g->bits, words = (g->inner + per_word - 1) / per_word;
    for (int64_t k = at; k < at + count; k++) {
        const int64_t place = row / COLUMNS * words + k / per_word;
        if (g->bits == 8 && !g->has_words) {
            *codes++ = (float)((const int8_t *)g->weight)[(row / COLUMNS * g->inner + k) * COLUMNS + column];
            continue;
        }
        uint32_t word;
        memcpy(&word, (const char *)g->weight + (place * COLUMNS + column) * sizeof word, sizeof word);
        word >>= k % per_word * g->bits;
        *codes++ = g->is_e2m1 ? numbers[word & 15] : g->bits == 4 ? (float)(word & 15) : (float)(int8_t)word;
    }
}

/* A weight is a product and a sum of float32, each rounded; to bfloat16 it is rounded once more. */
int32_t
unpack_rows(const unpacking_t *arguments)
{
    const gemm_t *g = arguments->gemm;
    const int64_t inner = g->inner, group = g->group, groups = inner / group;
    for (int64_t i = 0; i < arguments->count; i++) {
        const int64_t row = arguments->ids[i];
        if (row < 0 || row >= g->columns)
            return -1;
        for (int64_t begin = 0; begin < inner; begin += group) {
            const int64_t place = (row / COLUMNS * groups + begin / group) * COLUMNS + row % COLUMNS, lane = place % LANES;
            float scale[LANES] ALIGNED, offset[LANES] ALIGNED;
            vec_store(scale, load_scales(g->scales, place - lane, g->is_half));
            offset[lane] = g->zero * scale[lane];
            if (g->offsets)
                vec_store(offset, load_scales(g->offsets, place - lane, g->is_half));
            for (int64_t at = begin; at < begin + group; at += LANES) {
                const int64_t some = smaller(begin + group - at, LANES);
                float lanes[LANES] ALIGNED = {0};
                read_codes(g, row, at, some, lanes);
                const vec element = vec_add(vec_mul(vec_load(lanes), vec_all(scale[lane])), vec_all(offset[lane]));
                if (arguments->is_bfloat16)
                    store_bfloat16((uint16_t *)arguments->output + i * inner + at, some, element);
                else
                    store_lanes((float *)arguments->output + i * inner + at, some, element);
            }
        }
    }
    return 0;
}
#endif

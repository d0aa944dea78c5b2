/* Linear layers: GEMMs of rows and a weight packed into panels, with an epilogue. */
#include "panels.h"

enum {
    TOGETHER = 192, /* rows that share a part of a panel while it is in the cache */
    WORDS = 1024,   /* of a panel in such a part: 128 KiB */
};

typedef enum { NOTHING, SILU, ADD, MULTIPLY } then_t;

typedef struct {
    const element *input; /* [rows, inner] */
    int64_t rows, inner;
    const element *panels; /* [ceil(columns / 32)][inner words][32 columns] */
    int64_t columns;
    const element *bias; /* [columns] or NULL */
    then_t then;
    const element *other; /* [rows, columns], the epilogue's operand */
    element *output;      /* [rows, columns] */
} linear_t;

/* The epilogue, element by element, and the only rounding. */
static inline void
finish(const linear_t *l, int64_t row, int64_t column, const float *sums)
{
    for (int half = 0; half < 2 && column < l->columns; half++, column += LANES, sums += LANES) {
        const __mmask16 mask = (__mmask16)first_lanes(l->columns - column);
        const int64_t at = row * l->columns + column;
        __m512 y = _mm512_loadu_ps(sums);
        if (l->bias)
            y = _mm512_add_ps(y, load_lanes(l->bias + column, mask));
        if (l->then == SILU) {
            const __m512 one = _mm512_set1_ps(1.0f);
            const __m512 power = exp2_lanes(_mm512_mul_ps(y, _mm512_set1_ps(-1.44269504f)));
            y = _mm512_div_ps(y, _mm512_add_ps(one, power));
        } else if (l->then == ADD) {
            y = _mm512_add_ps(y, load_lanes(l->other + at, mask));
        } else if (l->then == MULTIPLY) {
            y = _mm512_mul_ps(y, load_lanes(l->other + at, mask));
        }
        store_lanes(l->output + at, mask, y);
    }
}

static void
compute_panel(const linear_t *l, int64_t number)
{
    float sums[TOGETHER][COLUMNS] __attribute__((aligned(64)));
    const element *panel = l->panels + number * l->inner * COLUMNS;
    const int64_t words = l->inner / PER_WORD;
    for (int64_t first = 0; first < l->rows; first += TOGETHER) {
        const int64_t count = smaller(TOGETHER, l->rows - first);
        const int64_t blocks = (count + ROWS - 1) / ROWS;
        for (int64_t word = 0; word < words; word += WORDS) {
            for (int64_t block = 0; block < blocks; block++) {
                const int64_t start = count * block / blocks, stop = count * (block + 1) / blocks;
                multiply((int)(stop - start), l->input + (first + start) * l->inner + word * PER_WORD, l->inner,
                         panel + word * COLUMNS * PER_WORD, smaller(WORDS, words - word), sums[start], COLUMNS,
                         word > 0);
            }
        }
        for (int64_t row = 0; row < count; row++)
            finish(l, first + row, number * COLUMNS, sums[row]);
    }
}

int32_t
kernels_version(void)
{
    return 1; /* of the functions' arguments; native/__init__.py knows it, too */
}

void
linear(const element *input, int64_t rows, int64_t inner, const element *panels, int64_t columns, const element *bias,
       int32_t then, const element *other, element *output, int32_t threads)
{
    const linear_t l = {input, rows, inner, panels, columns, bias, (then_t)then, other, output};
    const int64_t number = (columns + COLUMNS - 1) / COLUMNS;
    const int64_t share = number / (8 * threads) + 1; /* panels at a time: few, since threads differ in speed */
#pragma omp parallel for schedule(dynamic, share) num_threads(threads)
    for (int64_t panel = 0; panel < number; panel++)
        compute_panel(&l, panel);
}

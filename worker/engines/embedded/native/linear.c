/* Linear layers: rows times a weight that lies in panels. */
#include "panels.h"

enum {
    TOGETHER = 192, /* rows that share a part of a panel while it is in the cache */
    PAIRS = 1024,   /* of a panel that are used at a time: 128 KiB of it */
};

typedef enum { NOTHING, SILU, ADD, MULTIPLY } then_t;

typedef struct {
    const bf16 *input; /* [rows, 2 * pairs] */
    int64_t rows, pairs;
    const bf16 *panels; /* [ceil(columns / 32)][pairs][32][2] */
    int64_t columns;
    const bf16 *bias; /* [columns] or NULL */
    then_t then;
    const bf16 *other; /* [rows, columns], what is added or multiplied */
    bf16 *output;      /* [rows, columns] */
} linear_t;

/* What follows a product, element by element, and the only rounding. */
static inline void
finish(const linear_t *l, int64_t row, int64_t column, const float *sums)
{
    for (int half = 0; half < 2 && column < l->columns; half++, column += LANES, sums += LANES) {
        const __mmask16 mask = (__mmask16)first_lanes(l->columns - column);
        const int64_t at = row * l->columns + column;
        __m512 y = _mm512_loadu_ps(sums);
        if (l->bias)
            y = _mm512_add_ps(y, load_bf16(l->bias + column, mask));
        if (l->then == SILU) {
            const __m512 one = _mm512_set1_ps(1.0f);
            const __m512 power = exp2_lanes(_mm512_mul_ps(y, _mm512_set1_ps(-1.44269504f)));
            y = _mm512_div_ps(y, _mm512_add_ps(one, power));
        } else if (l->then == ADD) {
            y = _mm512_add_ps(y, load_bf16(l->other + at, mask));
        } else if (l->then == MULTIPLY) {
            y = _mm512_mul_ps(y, load_bf16(l->other + at, mask));
        }
        store_bf16(l->output + at, mask, y);
    }
}

static void
compute_panel(const linear_t *l, int64_t number)
{
    float sums[TOGETHER][COLUMNS] __attribute__((aligned(64)));
    const bf16 *panel = l->panels + number * l->pairs * 2 * COLUMNS;
    for (int64_t first = 0; first < l->rows; first += TOGETHER) {
        const int64_t count = smaller(TOGETHER, l->rows - first);
        const int64_t blocks = (count + ROWS - 1) / ROWS;
        for (int64_t pair = 0; pair < l->pairs; pair += PAIRS) {
            for (int64_t block = 0; block < blocks; block++) {
                const int64_t start = count * block / blocks, stop = count * (block + 1) / blocks;
                multiply((int)(stop - start), l->input + (first + start) * 2 * l->pairs + 2 * pair, 2 * l->pairs,
                         panel + pair * 2 * COLUMNS, smaller(PAIRS, l->pairs - pair), sums[start], COLUMNS, pair > 0);
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
linear(const bf16 *input, int64_t rows, int64_t inner, const bf16 *panels, int64_t columns, const bf16 *bias,
       int32_t then, const bf16 *other, bf16 *output, int32_t threads)
{
    const linear_t l = {input, rows, inner / 2, panels, columns, bias, (then_t)then, other, output};
    const int64_t number = (columns + COLUMNS - 1) / COLUMNS;
    const int64_t share = number / (8 * threads) + 1; /* small ones, since threads are not equally fast */
#pragma omp parallel for schedule(dynamic, share) num_threads(threads)
    for (int64_t panel = 0; panel < number; panel++)
        compute_panel(&l, panel);
}

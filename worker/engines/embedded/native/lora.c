/* Rows times A of their adapters. */
#include "lora.h"

/* A row's element in float32. */
INLINED float
wide(element x)
{
#ifdef FLOAT32
    return x;
#else
    const uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, sizeof y);
    return y;
#endif
}

enum { MOST = 4 }; /* rows of a group: that many sums hide the latency of an addition */

/* Rows that meet a panel of A together, of one adapter or of several. */
typedef struct {
    const shrinking_t *s;
    const int64_t *tokens;
    const void *a[MOST]; /* [inner][16], of each row */
    int64_t column;      /* first of the panel's sums */
} group_t;

/* A few rows times 16 columns of A, each sum over the elements in order. */
INLINED void
multiply_rows(int rows, const group_t *g, int is_shared, int type)
{
    const shrinking_t *s = g->s;
    vec sum[MOST];
    const element *x[MOST];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
        sum[r] = vec_zero(), x[r] = s->x + g->tokens[r] * s->inner;
    for (int64_t i = 0; i < s->inner; i++) {
        const vec shared = load_lora(g->a[0], i * LANES, type);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            const vec weights = is_shared ? shared : load_lora(g->a[r], i * LANES, type);
            sum[r] = vec_fmadd(vec_all(wide(x[r][i])), weights, sum[r]);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
        vec_store(s->sums + g->tokens[r] * s->step->lora_width + g->column, sum[r]);
}

INLINED void
multiply_group_of(int64_t rows, const group_t *g, int is_shared, int type)
{
    if (rows == 4)
        multiply_rows(4, g, is_shared, type);
    else if (rows == 3)
        multiply_rows(3, g, is_shared, type);
    else if (rows == 2)
        multiply_rows(2, g, is_shared, type);
    else
        multiply_rows(1, g, is_shared, type);
}

INLINED void
multiply_group(int64_t rows, const group_t *g, int is_shared, int64_t type)
{
    if (type == LORA_FLOAT32)
        multiply_group_of(rows, g, is_shared, LORA_FLOAT32);
    else if (type == LORA_BFLOAT16)
        multiply_group_of(rows, g, is_shared, LORA_BFLOAT16);
    else
        multiply_group_of(rows, g, is_shared, LORA_FLOAT16);
}

/* Units are tokens with an adapter, for one panel of A after the other. */
static void
multiply_units(const void *arguments, int64_t first, int64_t stop)
{
    const shrinking_t *s = arguments;
    const int64_t number = s->step->num_adapted;
    int64_t count = 1;
    for (int64_t unit = first; unit < stop; unit += count) {
        const int64_t panel = unit / number, left = smaller(smaller(stop - unit, number - unit % number), MOST);
        group_t group = {.s = s, .tokens = s->step->adapted + unit % number, .column = panel * LANES};
        int64_t type = LORA_FLOAT32;
        int is_shared = 1;
        for (count = 0; count < left; count++) {
            const lora_input_t *input = &s->step->adapters[group.tokens[count]][s->layer].inputs[s->input];
            if (group.column >= input->width || (count && input->type != type))
                break;
            type = input->type;
            group.a[count] = (const char *)input->a + group.column * s->inner * lora_bytes(type);
            is_shared &= group.a[count] == group.a[0];
        }
        if (!count) /* its input has fewer sums */
            count = 1;
        else if (is_shared)
            multiply_group(count, &group, 1, type);
        else
            multiply_group(count, &group, 0, type);
    }
}

void
multiply_by_a(const shrinking_t *s, const threads_t *threads)
{
    const int64_t units = s->step->num_adapted * (s->step->lora_width / LANES);
    parallel_for(threads, units, panel_grain(units, threads), multiply_units, s);
}

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

/* A few rows times 16 columns of A, each sum over the elements in order. */
INLINED void
multiply_a_panel(int rows, const shrinking_t *s, const int64_t *tokens, const float *a, int64_t column)
{
    enum { MOST = 4 };
    vec sum[MOST];
    const element *x[MOST];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
        sum[r] = vec_zero(), x[r] = s->x + tokens[r] * s->inner;
    for (int64_t i = 0; i < s->inner; i++) {
        const vec weights = vec_load(a + i * LANES);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++)
            sum[r] = vec_fmadd(vec_all(wide(x[r][i])), weights, sum[r]);
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
        vec_store(s->sums + tokens[r] * s->step->lora_width + column, sum[r]);
}

/* Units are tokens with an adapter, for one panel of A after the other. */
static void
multiply_units(const void *arguments, int64_t first, int64_t stop)
{
    const shrinking_t *s = arguments;
    const int64_t number = s->step->num_adapted;
    int count = 1;
    for (int64_t unit = first; unit < stop; unit += count) {
        const int64_t panel = unit / number, *tokens = s->step->adapted + unit % number;
        const int64_t left = smaller(stop - unit, number - unit % number);
        const lora_layer_t *adapter = s->step->adapters[*tokens];
        for (count = 1; count < left && count < 4 && s->step->adapters[tokens[count]] == adapter; count++)
            ;
        const lora_input_t *input = &adapter[s->layer].inputs[s->input];
        if (panel * LANES >= input->width)
            continue;
        const float *a = input->a + panel * s->inner * LANES;
        if (count == 4)
            multiply_a_panel(4, s, tokens, a, panel * LANES);
        else if (count == 3)
            multiply_a_panel(3, s, tokens, a, panel * LANES);
        else if (count == 2)
            multiply_a_panel(2, s, tokens, a, panel * LANES);
        else
            multiply_a_panel(1, s, tokens, a, panel * LANES);
    }
}

void
multiply_by_a(const shrinking_t *s, const threads_t *threads)
{
    const int64_t units = s->step->num_adapted * (s->step->lora_width / LANES);
    parallel_for(threads, units, panel_grain(units, threads), multiply_units, s);
}

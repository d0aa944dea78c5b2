/* Epilogues: operations on the sums of a GEMM before they are stored. Each element is computed alone, by the same
 * operations wherever in a row or a vector it lies; torch's activations compute the last elements of a thread's part by others.
 */
#ifndef EPILOGUE_H
#define EPILOGUE_H

#include "vector.h"

#define SQRT_HALF 0.707106781f
#define TWICE_SQRT_2_PI 1.59576912f /* 2 * sqrt(2 / pi) */

#define CLAMPED_LIMIT 7.0f /* of GPT-OSS's gated MLP, as is the factor of its sigmoid */
#define CLAMPED_ALPHA 1.702f

typedef enum { NOTHING, SILU, ADD, MULTIPLY, GELU, GELU_TANH, RELU, CLAMPED, MULTIPLY_CLAMPED } epilogue_t;

INLINED int
takes_other(epilogue_t kind)
{
    return kind == ADD || kind == MULTIPLY || kind == MULTIPLY_CLAMPED;
}

/* y * sigmoid(x); NaN stays NaN, and an infinite x is none to `vec_exp2`. */
INLINED vec
gated(vec y, vec x)
{
    const vec power = vec_max(vec_all(-200.0f), vec_mul(x, vec_all(LOG2_E))); /* NaN stays */
    return vec_div(y, vec_add(vec_all(1.0f), vec_exp2(vec_sub(vec_zero(), power))));
}

/* erfc(z) for z >= 0, to a relative error of 1.2e-7 in exact arithmetic: Press et al., "Numerical Recipes in C", 6.2. */
INLINED vec
vec_erfc(vec z)
{
    const vec t = vec_div(vec_all(1.0f), vec_fmadd(z, vec_all(0.5f), vec_all(1.0f)));
    vec power = vec_all(0.17087277f);
    power = vec_fmadd(power, t, vec_all(-0.82215223f));
    power = vec_fmadd(power, t, vec_all(1.48851587f));
    power = vec_fmadd(power, t, vec_all(-1.13520398f));
    power = vec_fmadd(power, t, vec_all(0.27886807f));
    power = vec_fmadd(power, t, vec_all(-0.18628806f));
    power = vec_fmadd(power, t, vec_all(0.09678418f));
    power = vec_fmadd(power, t, vec_all(0.37409196f));
    power = vec_fmadd(power, t, vec_all(1.00002368f));
    power = vec_fmadd(power, t, vec_all(-1.26551223f));
    power = vec_sub(power, vec_mul(z, z));
    return vec_mul(t, vec_exp2(vec_mul(power, vec_all(LOG2_E))));
}

/* y * (1 + erf(y / sqrt(2))) / 2 as max(y, 0) - |y| * erfc(|y| / sqrt(2)) / 2, in which nothing cancels below 0. */
INLINED vec
gelu(vec y)
{
    const vec size = vec_max(y, vec_sub(vec_zero(), y));
    const vec half = vec_mul(vec_erfc(vec_mul(size, vec_all(SQRT_HALF))), vec_all(0.5f));
    return vec_sub(vec_max(vec_zero(), y), vec_mul(size, half));
}

/* y * (1 + tanh(u)) / 2 = y * sigmoid(2 * u) with u = sqrt(2 / pi) * (y + 0.044715 * y ** 3). */
INLINED vec
gelu_tanh(vec y)
{
    const vec cube = vec_mul(vec_mul(y, y), y);
    return gated(y, vec_mul(vec_fmadd(cube, vec_all(0.044715f), y), vec_all(TWICE_SQRT_2_PI)));
}

/* The epilogue of sums y; `other` is its operand, if it takes one. */
INLINED vec
epilogue(epilogue_t kind, vec y, vec other)
{
    switch (kind) {
    case SILU:
        return gated(y, y);
    case ADD:
        return vec_add(y, other);
    case MULTIPLY:
        return vec_mul(y, other);
    case GELU:
        return gelu(y);
    case GELU_TANH:
        return gelu_tanh(y);
    case RELU:
        return vec_max(vec_zero(), y);
    case CLAMPED: /* the gate: x * sigmoid(alpha * x) of x = min(y, limit) */
        y = vec_sub(vec_zero(), vec_max(vec_all(-CLAMPED_LIMIT), vec_sub(vec_zero(), y)));
        return gated(y, vec_mul(y, vec_all(CLAMPED_ALPHA)));
    case MULTIPLY_CLAMPED:
        y = vec_sub(vec_zero(), vec_max(vec_all(-CLAMPED_LIMIT), vec_sub(vec_zero(), y)));
        return vec_mul(vec_add(vec_max(vec_all(-CLAMPED_LIMIT), y), vec_all(1.0f)), other);
    default:
        return y;
    }
}

/* Up to `count` numbers; the other lanes are 0. */
INLINED vec
load_floats(const float *from, int64_t count)
{
    if (count >= LANES)
        return vec_load(from);
    float lanes[LANES] = {0};
    memcpy(lanes, from, count * sizeof *lanes);
    return vec_load(lanes);
}

/* `count` lanes of x, up to all of them. */
INLINED void
store_floats(float *to, int64_t count, vec x)
{
    if (count >= LANES) {
        vec_store(to, x);
        return;
    }
    float lanes[LANES];
    vec_store(lanes, x);
    memcpy(to, lanes, count * sizeof *to);
}

#endif

/* What a GEMM does with a sum before it is stored. */
#ifndef EPILOGUE_H
#define EPILOGUE_H

#include "vector.h"

typedef enum { NOTHING, SILU, ADD, MULTIPLY } then_t;

INLINED int
takes_other(then_t then)
{
    return then == ADD || then == MULTIPLY;
}

/* The epilogue of sums y; `other` is its operand, if it takes one. */
INLINED vec
epilogue(then_t then, vec y, vec other)
{
    switch (then) {
    case SILU:
        return vec_div(y, vec_add(vec_all(1.0f), vec_exp2(vec_mul(y, vec_all(-LOG2_E)))));
    case ADD:
        return vec_add(y, other);
    case MULTIPLY:
        return vec_mul(y, other);
    default:
        return y;
    }
}

/* `count` lanes of x, up to all of them. */
INLINED void
store_floats(float *to, int64_t count, vec x)
{
    float lanes[LANES];
    vec_store(lanes, x);
    memcpy(to, lanes, smaller(count, LANES) * sizeof *to);
}

#endif

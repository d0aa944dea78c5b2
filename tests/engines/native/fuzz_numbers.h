/* Numbers that look random, the same in every run. */
#ifndef FUZZ_NUMBERS_H
#define FUZZ_NUMBERS_H

#include <stdint.h>

static uint64_t state = 1;

/* From 0 to `limit` - 1. */
static int64_t
below(int64_t limit)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (int64_t)((state >> 33) % (uint64_t)limit);
}

#endif

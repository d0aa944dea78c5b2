/* Work that threads share. Each takes what lies behind what it took before: memory is read fastest from front to back.
 * Who has none left takes from another, since threads differ in speed.
 */
#ifndef WORK_STEALING_H
#define WORK_STEALING_H

#include "vector.h"

/* From `first` on, before `stop`. */
typedef void compute_t(const void *job, int64_t first, int64_t stop);

/* Computes 0 to `number` - 1 of a job, at most `most` at a time. */
static inline void
share_work(int64_t number, int64_t most, int32_t threads, compute_t *compute, const void *job)
{
    struct {
        int64_t next ALIGNED;
    } parts[threads];
    for (int32_t part = 0; part < threads; part++)
        parts[part].next = number * part / threads;
#pragma omp parallel for schedule(static, 1) num_threads(threads)
    for (int32_t own = 0; own < threads; own++)
        for (int32_t turn = 0; turn < threads; turn++) {
            const int32_t part = (own + turn) % threads;
            const int64_t stop = number * (part + 1) / threads;
            for (int64_t first = 0; first < stop;) {
#pragma omp atomic capture
                {
                    first = parts[part].next;
                    parts[part].next += most;
                }
                if (first < stop)
                    compute(job, first, smaller(first + most, stop));
            }
        }
}

#endif

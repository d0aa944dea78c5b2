/* Many jobs of a thread pool, of which each unit has to be computed once, and be done when the job is; also with more threads
 * than processors, after pauses in which they fall asleep, and where OpenMP gives fewer threads than are asked for.
 */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "fuzz_numbers.h"
#include "thread_pool.h"

enum { UNITS = 300 };

static void
fail(const char *why, int64_t number)
{
    fprintf(stderr, "job %lld: %s\n", (long long)number, why);
    exit(1);
}

typedef struct {
    int64_t number;
    int64_t *counts; /* [UNITS], of the jobs that computed a unit */
} counts_t;

static void
count(const void *argument, int64_t first, int64_t stop)
{
    const counts_t *job = argument;
    for (int64_t unit = first; unit < stop; unit++)
        if (job->counts[unit]++ != job->number)
            fail("a unit belongs to another job, or is computed twice", job->number);
}

static void
compute_jobs(const threads_t *threads, void *argument)
{
    int64_t counts[UNITS] = {0};
    const int64_t jobs = *(const int64_t *)argument;
    for (int64_t number = 0; number < jobs; number++) {
        const int64_t units = below(8) ? UNITS : UNITS - below(8);
        parallel_for_job(threads, &(job_t){count, &(counts_t){number, counts}, units, 1 + below(40), (int32_t)below(2)});
        for (int64_t unit = units; unit < UNITS; unit++)
            counts[unit]++;
        for (int64_t unit = 0; unit < UNITS; unit++)
            if (counts[unit] != number + 1)
                fail("a unit is not done", number);
        if (!below(200))
            nanosleep(&(struct timespec){.tv_nsec = 400000}, NULL);
    }
}

int
main(int arguments, char **values)
{
    const int64_t jobs = arguments > 1 ? atoi(values[1]) : 1000;
    for (int32_t number = 1; number <= 6; number++) {
        with_pool(number, compute_jobs, (void *)&jobs);
        compute_jobs(&(threads_t){number, NULL}, (void *)&jobs);
    }
    return 0;
}

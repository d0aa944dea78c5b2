/* Many jobs of a team, of which each unit has to be computed once, and be done when the job is; also with more threads
 * than processors, after pauses in which they fall asleep, and where OpenMP gives fewer threads than are asked for.
 */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "fuzz_numbers.h"
#include "team.h"

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
} job_t;

static void
count(const void *argument, int64_t first, int64_t stop)
{
    const job_t *job = argument;
    for (int64_t unit = first; unit < stop; unit++)
        if (job->counts[unit]++ != job->number)
            fail("a unit belongs to another job, or is computed twice", job->number);
}

static void
compute_jobs(const team_t *team, void *argument)
{
    int64_t counts[UNITS] = {0};
    const int64_t jobs = *(const int64_t *)argument;
    for (int64_t number = 0; number < jobs; number++) {
        const int64_t units = below(8) ? UNITS : UNITS - below(8);
        share_work(team, units, 1 + below(40), count, &(job_t){number, counts});
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
    for (int32_t threads = 1; threads <= 6; threads++) {
        with_crew(threads, compute_jobs, (void *)&jobs);
        compute_jobs(&(team_t){threads, NULL}, (void *)&jobs);
    }
    return 0;
}

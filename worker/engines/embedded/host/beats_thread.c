/* Ends the process when nothing beats any more, as where a thread keeps Python's interpreter to itself.
 *
 * Called in a thread of its own without the interpreter, which it never needs. Only time in which this thread could have
 * run counts: a process that is stopped (SIGSTOP, a frozen container) or starved finds that time has passed at once.
 */
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef struct {
    _Atomic int64_t beats;     /* changed by the watched process */
    _Atomic int64_t limit_ns;  /* time without a beat after which the process ends */
    _Atomic int64_t period_ns; /* between two looks */
    _Atomic int64_t is_over;   /* the watch ends */
} beats_t;

static int64_t
now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static void
sleep_ns(int64_t duration)
{
    const struct timespec time = {duration / 1000000000, duration % 1000000000};
    nanosleep(&time, NULL);
}

/* `number` is raised before the process ends with `status`: its handler shows the stacks. */
void
watch_beats(beats_t *watched, int32_t number, int32_t status)
{
    static const char line[] = "worker: error: engine broken: a step keeps the interpreter to itself\n";
    int64_t seen = watched->beats, last = now_ns(), quiet = 0;
    while (!watched->is_over) {
        const int64_t period = watched->period_ns;
        sleep_ns(period);
        const int64_t now = now_ns(), beats = watched->beats, passed = now - last;
        quiet = beats == seen ? quiet + (passed < 2 * period ? passed : period) : 0;
        seen = beats;
        last = now;
        if (quiet > watched->limit_ns && !watched->is_over) {
            const ssize_t written = write(STDERR_FILENO, line, strlen(line));
            (void)written;
            raise(number);
            _exit(status);
        }
    }
}

/* Peaks of this processor, for `roofline.py`: operations in registers, and reading of memory.
 *
 * Each function computes on as many threads as OpenMP has, and returns operations, or bytes, per second. What the
 * compiler was not allowed to use returns 0.
 */
#define _GNU_SOURCE
#include <immintrin.h>
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { ROUNDS = 4000000, CHAINS = 12 }; /* independent sums: a fused multiply-add takes 4 cycles, of which two begin in one */

#if defined(__AVX512F__)
typedef __m512 floats;
typedef __m512i integers;
#define FMA(sum, x, y) _mm512_fmadd_ps(x, y, sum)
#define SET(x) _mm512_set1_ps(x)
#define BYTES 64
#elif defined(__AVX2__) && defined(__FMA__)
typedef __m256 floats;
typedef __m256i integers;
#define FMA(sum, x, y) _mm256_fmadd_ps(x, y, sum)
#define SET(x) _mm256_set1_ps(x)
#define BYTES 32
#endif

#define EACH _Pragma("GCC unroll 12") for (int i = 0; i < CHAINS; i++)

/* `type` sums[CHAINS] = `zero`; ROUNDS times `step` each; operations per second at `operations` a step. */
#define MEASURE(type, zero, step, operations)                                                                        \
    double seconds = 0;                                                                                              \
    _Pragma("omp parallel reduction(max : seconds)")                                                                 \
    {                                                                                                                \
        type sums[CHAINS];                                                                                           \
        EACH sums[i] = zero;                                                                                         \
        _Pragma("omp barrier") const double began = omp_get_wtime();                                                 \
        for (int round = 0; round < ROUNDS; round++) {                                                               \
            EACH sums[i] = step;                                                                                     \
            EACH __asm__ volatile("" : "+v"(sums[i]));                                                               \
        }                                                                                                            \
        seconds = omp_get_wtime() - began;                                                                           \
    }                                                                                                                \
    return (double)(operations)*CHAINS * ROUNDS * omp_get_max_threads() / seconds

double
float32_peak(void)
{
    const floats x = SET(1.0f), y = SET(0.5f);
    MEASURE(floats, SET(0.0f), FMA(sums[i], x, y), 2 * BYTES / 4);
}

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define TILES

/* Operations per second of `product`, an instruction of AMX on four pairs of whole tiles, at `operations` a product. */
#define MEASURE_TILES(product, operations)                                                                           \
    const struct {                                                                                                   \
        uint8_t palette, start_row, reserved[14];                                                                    \
        uint16_t row_bytes[16];                                                                                      \
        uint8_t rows[16];                                                                                            \
    } config = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};                      \
    if (syscall(SYS_arch_prctl, 0x1023, 18)) /* the system keeps the state of tiles */                               \
        return 0;                                                                                                    \
    double seconds = 0;                                                                                              \
    _Pragma("omp parallel reduction(max : seconds)")                                                                 \
    {                                                                                                                \
        uint8_t numbers[1024];                                                                                       \
        for (int i = 0; i < 1024; i++)                                                                               \
            numbers[i] = (uint8_t)(i % 2 ? 0x3f : i * 37); /* of bfloat16 between a half and two */                  \
        __asm__ volatile("ldtilecfg %0" : : "m"(config));                                                            \
        _tile_loadd(4, numbers, 64);                                                                                 \
        _tile_loadd(5, numbers, 64);                                                                                 \
        _tile_loadd(6, numbers, 64);                                                                                 \
        _tile_loadd(7, numbers, 64);                                                                                 \
        _Pragma("omp barrier") const double began = omp_get_wtime();                                                 \
        for (int round = 0; round < ROUNDS; round++) {                                                               \
            product(0, 4, 6);                                                                                        \
            product(1, 4, 7);                                                                                        \
            product(2, 5, 6);                                                                                        \
            product(3, 5, 7);                                                                                        \
        }                                                                                                            \
        seconds = omp_get_wtime() - began;                                                                           \
        _tile_release();                                                                                             \
    }                                                                                                                \
    return (double)(operations)*4 * ROUNDS * omp_get_max_threads() / seconds
#endif

double
bfloat16_peak(void)
{
#if defined(TILES)
    MEASURE_TILES(_tile_dpbf16ps, 2 * 16 * 16 * 32);
#elif defined(__AVX512BF16__)
    const __m512bh x = (__m512bh)_mm512_set1_epi16(0x3f80), y = (__m512bh)_mm512_set1_epi16(0x3f00);
    MEASURE(__m512, _mm512_setzero_ps(), _mm512_dpbf16_ps(sums[i], x, y), 2 * 32);
#else
    return 0;
#endif
}

double
int8_peak(void)
{
#if defined(TILES)
    MEASURE_TILES(_tile_dpbssd, 2 * 16 * 16 * 64);
#elif defined(__AVX512VNNI__)
    const __m512i x = _mm512_set1_epi8(1), y = _mm512_set1_epi8(2);
    MEASURE(__m512i, _mm512_setzero_si512(), _mm512_dpbusd_epi32(sums[i], x, y), 2 * 64);
#else
    return 0;
#endif
}

enum { READ = 1 << 28, STREAMS = 4, LINE = 8, AHEAD = 256 }; /* bytes; then in numbers of 64 bits */

/* Bytes per second at which memory in huge pages is read by all threads, in several streams each; 0 if there is none. */
double
read_peak(void)
{
    static uint64_t *bytes;
    if (!bytes) {
        bytes = aligned_alloc(1 << 21, READ);
        if (!bytes)
            return 0;
        madvise(bytes, READ, MADV_HUGEPAGE);
        memset(bytes, 1, READ);
    }
    uint64_t total = 0;
    const double began = omp_get_wtime();
#pragma omp parallel reduction(+ : total)
    {
        const int64_t part = READ / sizeof *bytes / omp_get_num_threads() / STREAMS / LINE * LINE;
        const uint64_t *start = bytes + omp_get_thread_num() * part * STREAMS;
        uint64_t sums[LINE] = {0};
        for (int64_t at = 0; at < part; at += LINE)
            for (int stream = 0; stream < STREAMS; stream++) {
                const uint64_t *line = start + stream * part + at;
                __builtin_prefetch(line + AHEAD);
                for (int i = 0; i < LINE; i++)
                    sums[i] += line[i];
            }
        for (int i = 0; i < LINE; i++)
            total += sums[i];
    }
    const double seconds = omp_get_wtime() - began;
    return total == 1 ? 0 : READ / seconds; /* so that the sum is needed */
}

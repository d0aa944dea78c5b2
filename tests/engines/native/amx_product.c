/* One product of tiles, by the processor's instructions or, where EMULATED, by the functions of the emulator. */
#ifdef EMULATED

#include "../amx_emulator.c"

#define CONFIGURE(config) load_config(&state, config)
#define RELEASE() (void)(state.is_configured = 0)
#define LOAD(tile, from, stride) move_rows(&state, tile, (uint8_t *)(from), stride, 0)
#define STORE(tile, to, stride) move_rows(&state, tile, to, stride, 1)
#define MULTIPLY(name, opcode, prefix) multiply(&state, opcode, prefix, 0, 1, 2)

#else

#include <stdint.h>

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t colsb[16];
    uint8_t rows[16];
} config_t; /* as LDTILECFG reads it */

#define CONFIGURE(config) __asm__ volatile("ldtilecfg %0" : : "m"(*(config)))
#define RELEASE() __asm__ volatile("tilerelease")
#define LOAD(tile, from, stride)                                                                                       \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile : : "r"(from), "r"((int64_t)(stride)) : "memory")
#define STORE(tile, to, stride)                                                                                        \
    __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" : : "r"(to), "r"((int64_t)(stride)) : "memory")
#define MULTIPLY(name, opcode, prefix) __asm__ volatile(name " %%tmm2, %%tmm1, %%tmm0" : :)

#endif

enum { BFLOAT16, SIGNED, SIGNED_UNSIGNED, UNSIGNED_SIGNED, UNSIGNED };

/* `sums`, of `rows` rows and `columns` columns of four bytes, plus `a` of `rows` rows and `words` columns times `b` of
 * `words` rows. Rows are as many bytes apart as their strides say; what lies between them stays as it is. */
void
multiply_tiles(int kind, int rows, int columns, int words, const uint8_t *a, int64_t a_stride, const uint8_t *b,
               int64_t b_stride, uint8_t *sums, int64_t sums_stride)
{
    const config_t config = {.palette = 1,
                             .colsb = {(uint16_t)(4 * columns), (uint16_t)(4 * words), (uint16_t)(4 * columns)},
                             .rows = {(uint8_t)rows, (uint8_t)rows, (uint8_t)words}};
    CONFIGURE(&config);
    LOAD(0, sums, sums_stride);
    LOAD(1, a, a_stride);
    LOAD(2, b, b_stride);
    switch (kind) {
    case BFLOAT16:
        MULTIPLY("tdpbf16ps", 0x5c, 2);
        break;
    case SIGNED:
        MULTIPLY("tdpbssd", 0x5e, 3);
        break;
    case SIGNED_UNSIGNED:
        MULTIPLY("tdpbsud", 0x5e, 2);
        break;
    case UNSIGNED_SIGNED:
        MULTIPLY("tdpbusd", 0x5e, 1);
        break;
    case UNSIGNED:
        MULTIPLY("tdpbuud", 0x5e, 0);
        break;
    }
    STORE(0, sums, sums_stride);
    RELEASE();
}

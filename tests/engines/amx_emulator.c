/* AMX on processors without it, for tests: emulates the instructions that raised SIGILL.
 *
 * Loaded into a process, it takes the signal's place. What the instructions do is Intel's "Architecture Instruction Set
 * Extensions Programming Reference", chapter "AMX". It is strict where a processor raises an exception: sizes that do
 * not fit each other, or a tile that is not configured, end the process with a message.
 *
 * A processor that has AMX raises the signal in a process that did not ask the system for tiles, but not at LDTILECFG and
 * TILERELEASE: so the configuration is then what the signal's frame has of it.
 */
#define _GNU_SOURCE
#include <cpuid.h>
#include <immintrin.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

enum { TILES = 8, MOST_ROWS = 16, ROW_BYTES = 64 };

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t colsb[16];
    uint8_t rows[16];
} config_t; /* as LDTILECFG reads it: 64 bytes */

typedef struct {
    int is_configured;
    config_t config;
    uint8_t tile[TILES][MOST_ROWS][ROW_BYTES];
} state_t;

static __thread state_t state;
static atomic_long emulated;

/* Instructions emulated so far. */
long
amx_emulated(void)
{
    return atomic_load(&emulated);
}

static void
fail(const char *why)
{
    fprintf(stderr, "AMX: %s\n", why);
    abort();
}

static void
clear_tiles(state_t *s)
{
    memset(s->tile, 0, sizeof s->tile);
}

static void
load_config(state_t *s, const config_t *config)
{
    if (config->palette != 1 || config->start_row)
        fail("palette is not 1, or start_row not 0");
    for (int i = 0; i < (int)sizeof config->reserved; i++)
        if (config->reserved[i])
            fail("reserved bytes of a configuration are not 0");
    for (int i = 0; i < 16; i++) {
        if (i >= TILES && (config->rows[i] || config->colsb[i]))
            fail("a configuration of a tile above 7");
        if (config->rows[i] > MOST_ROWS || config->colsb[i] > ROW_BYTES || !config->rows[i] != !config->colsb[i])
            fail("a tile has up to 16 rows of up to 64 bytes, or neither");
    }
    s->config = *config;
    s->is_configured = 1;
    clear_tiles(s);
}

static void
ask_for(const state_t *s, int tile)
{
    if (!s->is_configured)
        fail("no configuration");
    if (tile >= TILES || !s->config.rows[tile])
        fail("a tile that is not configured");
    if (s->config.colsb[tile] % 4)
        fail("a row's bytes are not a multiple of 4");
}

/* Bytes behind a tile's rows and columns become 0. */
static void
zero_rest(state_t *s, int tile)
{
    for (int row = 0; row < MOST_ROWS; row++) {
        const int used = row < s->config.rows[tile] ? s->config.colsb[tile] : 0;
        memset(s->tile[tile][row] + used, 0, ROW_BYTES - used);
    }
}

/* Eight bfloat16 of words that follow each other, the first or the second one of each word. */
static __m256
widened(const uint8_t *words, int index)
{
    const __m256i w = _mm256_loadu_si256((const __m256i *)words);
    return _mm256_castsi256_ps(index ? _mm256_and_si256(w, _mm256_set1_epi32((int)0xffff0000)) : _mm256_slli_epi32(w, 16));
}

static void
multiply_bfloat16(state_t *s, int to, int a, int b)
{
    enum { ZERO_SUBNORMAL = 0x8040 };
    const unsigned before = _mm_getcsr();
    _mm_setcsr(_MM_MASK_MASK | ZERO_SUBNORMAL); /* to nearest, even */
    for (int m = 0; m < s->config.rows[to]; m++)
        for (int half = 0; half < ROW_BYTES; half += ROW_BYTES / 2) {
            __m256 sum[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
            for (int k = 0; k < s->config.colsb[a] / 4; k++) {
                int32_t word;
                memcpy(&word, s->tile[a][m] + 4 * k, sizeof word);
                const __m256 x[2] = {_mm256_castsi256_ps(_mm256_set1_epi32((int)((uint32_t)word << 16))),
                                     _mm256_castsi256_ps(_mm256_set1_epi32((int)((uint32_t)word & 0xffff0000)))};
                for (int i = 0; i < 2; i++)
                    sum[i] = _mm256_fmadd_ps(x[i], widened(s->tile[b][k] + half, i), sum[i]);
            }
            float *const at = (float *)(s->tile[to][m] + half);
            _mm256_storeu_ps(at, _mm256_add_ps(_mm256_loadu_ps(at), _mm256_add_ps(sum[0], sum[1])));
        }
    _mm_setcsr(before);
}

static inline __attribute__((always_inline)) void
multiply_bytes(state_t *s, int to, int a, int b, int is_signed_a, int is_signed_b)
{
    for (int m = 0; m < s->config.rows[to]; m++) {
        uint32_t sum[ROW_BYTES / 4];
        memcpy(sum, s->tile[to][m], sizeof sum);
        for (int k = 0; k < s->config.colsb[a] / 4; k++)
            for (int i = 0; i < 4; i++) {
                const uint8_t x = s->tile[a][m][4 * k + i];
                for (int n = 0; n < ROW_BYTES / 4; n++) {
                    const uint8_t y = s->tile[b][k][4 * n + i];
                    sum[n] += (uint32_t)((is_signed_a ? (int8_t)x : (int)x) * (is_signed_b ? (int8_t)y : (int)y));
                }
            }
        memcpy(s->tile[to][m], sum, sizeof sum);
    }
}

static void
multiply(state_t *s, int opcode, int prefix, int to, int a, int b)
{
    ask_for(s, to);
    ask_for(s, a);
    ask_for(s, b);
    if (to == a || to == b || a == b)
        fail("the three tiles of a product must differ");
    const config_t *c = &s->config;
    if (c->rows[to] != c->rows[a] || c->colsb[to] != c->colsb[b] || c->colsb[a] / 4 != c->rows[b])
        fail("the sizes of a product's tiles do not fit");
    if (opcode == 0x5c && prefix == 2)
        multiply_bfloat16(s, to, a, b);
    else if (opcode == 0x5e && prefix == 3)
        multiply_bytes(s, to, a, b, 1, 1);
    else if (opcode == 0x5e && prefix == 2)
        multiply_bytes(s, to, a, b, 1, 0);
    else if (opcode == 0x5e && prefix == 1)
        multiply_bytes(s, to, a, b, 0, 1);
    else if (opcode == 0x5e)
        multiply_bytes(s, to, a, b, 0, 0);
    else
        fail("an unknown product");
    zero_rest(s, to);
}

static void
move_rows(state_t *s, int tile, uint8_t *at, int64_t stride, int is_store)
{
    ask_for(s, tile);
    for (int row = 0; row < s->config.rows[tile]; row++, at += stride) {
        if (is_store)
            memcpy(at, s->tile[tile][row], s->config.colsb[tile]);
        else
            memcpy(s->tile[tile][row], at, s->config.colsb[tile]);
    }
    if (!is_store)
        zero_rest(s, tile);
}

static greg_t
read_register(const greg_t *registers, int number)
{
    static const int names[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
    return registers[names[number]];
}

/* Emulates the instruction at `at`; returns its length, or 0 if it is none of AMX. */
static int
emulate(const uint8_t *at, const greg_t *registers)
{
    if (at[0] != 0xc4 || (at[1] & 0x1f) != 2 || at[2] & 0x84) /* VEX.128, map 0F38, W0 */
        return 0;
    const int opcode = at[3], prefix = at[2] & 3, more = ~at[1] >> 5; /* inverted R, X, B, from the highest bit */
    const int third = ~(at[2] >> 3) & 15, modrm = at[4], mode = modrm >> 6, middle = (modrm >> 3 & 7) | (more & 4) << 1;
    if (opcode != 0x49 && opcode != 0x4b && opcode != 0x5c && opcode != 0x5e)
        return 0;
    state_t *s = &state;
    atomic_fetch_add(&emulated, 1);
    if (mode == 3) {
        const int last = (modrm & 7) | (more & 1) << 3;
        if (opcode == 0x49 && !prefix)
            memset(&s->config, 0, sizeof s->config), s->is_configured = 0, clear_tiles(s);
        else if (opcode == 0x49 && prefix == 3)
            ask_for(s, middle), memset(s->tile[middle], 0, sizeof s->tile[middle]);
        else if (opcode >= 0x5c)
            multiply(s, opcode, prefix, middle, last, third);
        else
            return 0;
        return 5;
    }
    int length = 5, base = (modrm & 7) | (more & 1) << 3;
    int64_t stride = 0, address = 0;
    if ((modrm & 7) == 4) {
        const int sib = at[length++], index = (sib >> 3 & 7) | (more & 2) << 2;
        base = (sib & 7) | (more & 1) << 3;
        stride = index == 4 ? 0 : (int64_t)read_register(registers, index) * (1 << (sib >> 6));
    } else if (opcode == 0x4b)
        fail("a tile's address has no index");
    const int is_bare = mode == 0 && (base & 7) == 5; /* a displacement of 32 bits, from the next instruction */
    const int size = is_bare || mode == 2 ? 4 : mode;
    int32_t displacement = 0;
    if (size == 1)
        displacement = (int8_t)at[length];
    else if (size == 4)
        memcpy(&displacement, at + length, 4);
    length += size;
    if (is_bare && length != 9)
        fail("an address that is not emulated");
    address = displacement + (is_bare ? (int64_t)(at + length) : (int64_t)read_register(registers, base));
    if (opcode == 0x49 && !prefix)
        load_config(s, (const config_t *)address);
    else if (opcode == 0x4b && prefix)
        move_rows(s, middle, (uint8_t *)address, stride, prefix == 2);
    else
        fail("an instruction that is not emulated");
    return length;
}

enum { TILE_CONFIG = 17 }; /* number of this state component */

static int64_t config_offset; /* of it in a signal's frame, or 0 if the system keeps none */

static void
find_config(void)
{
    enum { STATES = 13 };
    unsigned low, high, size, offset, c, d;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if (low >> TILE_CONFIG & 1 && __get_cpuid_count(STATES, TILE_CONFIG, &size, &offset, &c, &d))
        config_offset = offset;
}

/* Takes over what the processor itself was configured with, if it was since the last time. */
static void
read_config(state_t *s, const ucontext_t *context)
{
    enum { HEADER = 512 };
    const uint8_t *area = (const uint8_t *)context->uc_mcontext.fpregs;
    uint64_t states;
    memcpy(&states, area + HEADER, sizeof states);
    config_t config = {0};
    if (states >> TILE_CONFIG & 1)
        memcpy(&config, area + config_offset, sizeof config);
    if (!config.palette)
        s->is_configured = 0;
    else if (!s->is_configured || memcmp(&config, &s->config, sizeof config) != 0)
        load_config(s, &config);
}

static struct sigaction before;

static void
on_illegal_instruction(int number, siginfo_t *info, void *context)
{
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    if (config_offset)
        read_config(&state, context);
    const int length = emulate((const uint8_t *)registers[REG_RIP], registers);
    if (length)
        registers[REG_RIP] += length;
    else { /* raised again, for whoever was there before */
        sigaction(number, &before, NULL);
        (void)info;
    }
}

__attribute__((constructor)) static void
take_signal(void)
{
    find_config();
    struct sigaction action = {.sa_sigaction = on_illegal_instruction, .sa_flags = SA_SIGINFO | SA_NODEFER};
    sigaction(SIGILL, &action, &before);
}

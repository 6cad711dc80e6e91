// Kernels that pool rows into samples (gather_pool, gather_raw) or sum gradients per unique id (segment_sum).
//
// All three kernels run the same loop. Each sum adds rows in the order of its uses, element by element. A use is an
// occurrence of a row in a sum. No operation is fused or reordered, and there are no atomic operations. On every
// device, the results are therefore bit-identical to those of the CPU's loops (persia_kernels). One launch processes
// all features that need its kernel and may run concurrently. Each feature has a Job, and as many blocks as it needs.
//
// NVRTC compiles this file as CUDA C, without any header. Tests compile it as C++17, with THREADS as a loop over the
// threads of a block (tests/shim.h). A thread must therefore keep no variable from one THREADS to the next, except one
// that it sets to 1 for SYNC_ANY. SYNC_ANY returns whether any thread has set it.

#ifdef __CUDACC__
#define THREADS
#define SYNC __syncthreads()
#define SYNC_ANY(has) __syncthreads_or(has)
#define ROLLED _Pragma("unroll 1")
#define UNROLLED _Pragma("unroll 8")
#endif

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// The same values as in kernels.rs.
enum : u32 {
    BLOCK = 256,  // threads of a block
    COLUMNS = 32, // maximum number of columns that a block works on
    F32 = 0,
    F16 = 1,
    BF16 = 2
};

enum : u32 {
    UNROLL = 4, // rows that a thread reads before it adds them
    LONG = 256, // uses above which all threads of a block compute a sum, because one thread would take too long
    TILE = 128  // uses that such a block reads at a time
};

// One feature. A pointer may be null only where its comment says so.
struct Job {
    const void *rows;      // rows to add: [*, dim] of type `from`
    const u32 *places;     // row of each use; null: use i has row i
    const u32 *map;        // gather: maps places to rows; segment_sum: maps sums to rows of `out`; null: identity
    const u32 *starts;     // start of each sum's uses, and the end of the last; null: one use each
    const float *weights;  // factor of each use; null: 1
    const float *divisors; // gather: divisor of each sum; segment_sum: divisor of each row; null: 1
    void *out;             // [sums, dim] of type `to`
    u8 *mask;              // gather_raw: whether each sum has a use
    float scale;           // segment_sum: factor of each sum
    u32 sums;
    u32 dim;
    u32 from, to;          // element types
    u32 onto;              // segment_sum: 1 adds to the content of `out`, which is then F32
    u32 width;             // columns of a thread: 4 if rows and `out` are aligned for it, otherwise 1
    u32 lanes;             // binary logarithm of the number of threads of a row, which is at most COLUMNS / width
    u32 first;             // first block of the job
};

struct Shared {
    float tile[TILE * COLUMNS];
    float sums[COLUMNS];
};

__device__ inline u32 bits_of(float value) { return __float_as_uint(value); }

// Widen an f16 exactly (persia_kernels::half). This is in C, because with inline assembly the compiler does not know
// that all pointers are to global memory.
__device__ inline float widen_f16(u16 half) {
    // The exponent bias of a float is larger by 112. The product is also exact for subnormal numbers.
    float value = __uint_as_float((u32)(half & 0x7FFF) << 13) * 5192296858534827628530496329220096.0f;
    u32 special = value >= 65536.0f ? 0x7F800000 : 0; // infinity or NaN
    return __uint_as_float(bits_of(value) | special | (u32)(half & 0x8000) << 16);
}

__device__ inline float widen_bf16(u16 half) { return __uint_as_float((u32)half << 16); }

// Narrow a float to the nearest f16, ties to even. A magnitude above the largest finite number becomes that
// number.
__device__ inline u16 narrow_f16(float value) {
    u32 sign = bits_of(value) >> 16 & 0x8000, magnitude = bits_of(value) & 0x7FFFFFFF;
    u32 least = magnitude < 0x477FE000 ? magnitude : 0x477FE000;
    u32 tiny = bits_of(__uint_as_float(least) + 0.5f) - bits_of(0.5f); // rounded to multiples of 2^-24
    u32 normal = (least - (112u << 23) + 0xFFF + (least >> 13 & 1)) >> 13;
    u32 number = least < 0x38800000 ? tiny : normal;
    return (u16)(sign | (magnitude > 0x7F800000 ? 0x7E00 : number));
}

__device__ inline u16 narrow_bf16(float value) {
    u32 sign = bits_of(value) >> 16 & 0x8000, magnitude = bits_of(value) & 0x7FFFFFFF;
    u32 least = magnitude < 0x7F7F0000 ? magnitude : 0x7F7F0000;
    u32 number = (least + 0x7FFF + (least >> 16 & 1)) >> 16;
    return (u16)(sign | (magnitude > 0x7F800000 ? 0x7FC0 : number));
}

struct AsF32 {
    template <u32 W> __device__ static void load(const void *from, u64 at, float *to) {
        const float *place = (const float *)from + at;
        if constexpr (W == 4) {
            float4 four = *(const float4 *)place;
            to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
        } else {
            to[0] = *place;
        }
    }
};

template <float WIDEN(u16)> struct AsHalf {
    template <u32 W> __device__ static void load(const void *from, u64 at, float *to) {
        const u16 *place = (const u16 *)from + at;
        if constexpr (W == 4) {
            ushort4 four = *(const ushort4 *)place;
            to[0] = WIDEN(four.x), to[1] = WIDEN(four.y), to[2] = WIDEN(four.z), to[3] = WIDEN(four.w);
        } else {
            to[0] = WIDEN(*place);
        }
    }
};

template <u32 W> __device__ inline void store(void *out, u32 type, u64 at, const float *from) {
    if (type == F32) {
        float *place = (float *)out + at;
        if constexpr (W == 4) *(float4 *)place = float4{from[0], from[1], from[2], from[3]};
        else *place = from[0];
        return;
    }
    u16 half[W];
    for (u32 i = 0; i < W; i++) half[i] = type == F16 ? narrow_f16(from[i]) : narrow_bf16(from[i]);
    u16 *place = (u16 *)out + at;
    if constexpr (W == 4) *(ushort4 *)place = ushort4{half[0], half[1], half[2], half[3]};
    else *place = half[0];
}

// The offset in `out` of the row to which a sum is written.
template <bool GATHER> __device__ inline u64 target_of(const Job &job, u32 sum) {
    return (u64)(!GATHER && job.map ? job.map[sum] : sum) * job.dim;
}

template <bool GATHER> __device__ inline float start_of(const Job &job, u32 sum, u32 column) {
    return !GATHER && job.onto ? ((const float *)job.out)[target_of<GATHER>(job, sum) + column] : 0.0f;
}

// The lists that a job has, as bits.
enum : u32 { PLACES = 1, MAP = 2, WEIGHTS = 4, DIVISORS = 8 };

template <bool GATHER> __device__ inline u32 has(const Job &job) {
    u32 given = 0;
    if (job.places) given |= PLACES;
    if (GATHER && job.map) given |= MAP;
    if (job.weights) given |= WEIGHTS;
    if (!GATHER && job.divisors) given |= DIVISORS;
    return given;
}

// Load the rows of up to UNROLL uses (`use`, `use + stride`, ... before `end`) and their factors. All loads of
// one kind are issued before those of the next kind, which depend on them.
template <bool GATHER, class From, u32 W>
__device__ inline void fetch(const Job &job, u32 has, u32 use, u32 stride, u32 end, u32 column,
                             float (&values)[UNROLL][W], float (&factors)[UNROLL]) {
#define EACH for (u32 i = 0, at = use; i < UNROLL; i++, at += stride) if (at < end)
    u32 rows[UNROLL];
    EACH rows[i] = at;
    if (has & PLACES) EACH rows[i] = job.places[at];
    if (GATHER && has & MAP) EACH rows[i] = job.map[rows[i]];
    EACH From::template load<W>(job.rows, (u64)rows[i] * job.dim + column, values[i]);
    EACH factors[i] = 1.0f;
    if (has & WEIGHTS) EACH factors[i] = job.weights[at];
    if (!GATHER && has & DIVISORS) EACH factors[i] = 1.0f / job.divisors[rows[i]] * factors[i];
#undef EACH
}

// Divide or scale a sum, and write it. A sum of gradients that is not finite sets the flag.
template <bool GATHER, u32 W>
__device__ inline void finish(const Job &job, u32 sum, u32 column, float *values, u32 *flag) {
    bool finite = true;
    for (u32 k = 0; k < W; k++) {
        if (GATHER) {
            if (job.divisors) values[k] /= job.divisors[sum];
        } else {
            values[k] *= job.scale;
            finite = finite && (bits_of(values[k]) & 0x7F800000) != 0x7F800000;
        }
    }
    if (!finite) *flag = 1;
    store<W>(job.out, job.to, target_of<GATHER>(job, sum) + column, values);
}

// Compute one block: BLOCK >> lanes sums, and W << lanes columns of each.
template <bool GATHER, bool RAW, class From, u32 W>
__device__ inline void block(const Job &job, u32 *flag, Shared &shared) {
    u32 columns = W << job.lanes, column_blocks = (job.dim + columns - 1) / columns;
    u32 number = blockIdx.x - job.first, rows = BLOCK >> job.lanes, lane = (1u << job.lanes) - 1;
    u32 column = number % column_blocks * columns, first = number / column_blocks * rows;
    u32 end = first + rows < job.sums ? first + rows : job.sums;
    columns = column + columns < job.dim ? columns : job.dim - column;
    u32 given = has<GATHER>(job), has_long = 0;

    THREADS {
        u32 sum = first + (threadIdx.x >> job.lanes), mine = (threadIdx.x & lane) * W;
        if (sum < end && mine < columns) {
            u32 from = job.starts ? job.starts[sum] : sum, to = job.starts ? job.starts[sum + 1] : sum + 1;
            if (RAW && column + mine == 0) job.mask[sum] = to > from;
            if (!RAW && to - from > LONG) {
                has_long = 1;
            } else {
                float total[W], values[UNROLL][W], factors[UNROLL];
                for (u32 k = 0; k < W; k++) total[k] = start_of<GATHER>(job, sum, column + mine + k);
                ROLLED for (u32 use = from; use < to; use += UNROLL) {
                    fetch<GATHER, From, W>(job, given, use, 1, to, column + mine, values, factors);
                    for (u32 i = 0; i < UNROLL; i++)
                        if (use + i < to)
                            for (u32 k = 0; k < W; k++) total[k] += values[i][k] * factors[i];
                }
                // A copy keeps the sign of a zero.
                if (GATHER && !job.starts && !job.weights)
                    for (u32 k = 0; k < W; k++) total[k] = values[0][k];
                finish<GATHER, W>(job, sum, column + mine, total, flag);
            }
        }
    }
    if (RAW) return;
    if (!SYNC_ANY(has_long)) return;

    // All threads fill a tile with products. Then one thread for each column adds them in order.
    ROLLED for (u32 sum = first; sum < end; sum++) {
        u32 from = job.starts[sum], to = job.starts[sum + 1];
        if (to - from <= LONG) continue;
        THREADS if (threadIdx.x < columns)
            shared.sums[threadIdx.x] = start_of<GATHER>(job, sum, column + threadIdx.x);
        ROLLED for (u32 use = from; use < to; use += TILE) {
            u32 uses = to - use < TILE ? to - use : TILE;
            THREADS {
                u32 line = threadIdx.x >> job.lanes, mine = (threadIdx.x & lane) * W;
                ROLLED for (; mine < columns && line < uses; line += rows * UNROLL) {
                    float values[UNROLL][W], factors[UNROLL];
                    fetch<GATHER, From, W>(job, given, use + line, rows, to, column + mine, values, factors);
                    for (u32 i = 0, at = line; i < UNROLL && at < uses; i++, at += rows)
                        for (u32 k = 0; k < W; k++) shared.tile[at * COLUMNS + mine + k] = values[i][k] * factors[i];
                }
            }
            SYNC;
            THREADS if (threadIdx.x < columns) {
                float value = shared.sums[threadIdx.x];
                UNROLLED for (u32 line = 0; line < uses; line++) value += shared.tile[line * COLUMNS + threadIdx.x];
                shared.sums[threadIdx.x] = value;
            }
            SYNC;
        }
        THREADS if (threadIdx.x < columns) {
            float value = shared.sums[threadIdx.x];
            finish<GATHER, 1>(job, sum, column + threadIdx.x, &value, flag);
        }
    }
}

template <bool GATHER, bool RAW> __device__ inline void run(const Job *jobs, u32 count, u32 *flag, Shared &shared) {
    u32 low = 0, high = count; // the block belongs to a job from `low` on, before `high`
    while (high - low > 1) {
        u32 middle = (low + high) / 2;
        if (jobs[middle].first <= blockIdx.x) low = middle;
        else high = middle;
    }
    const Job job = jobs[low];
    switch (job.from * 2 + (job.width == 4)) {
    case F32 * 2: return block<GATHER, RAW, AsF32, 1>(job, flag, shared);
    case F32 * 2 + 1: return block<GATHER, RAW, AsF32, 4>(job, flag, shared);
    case F16 * 2: return block<GATHER, RAW, AsHalf<widen_f16>, 1>(job, flag, shared);
    case F16 * 2 + 1: return block<GATHER, RAW, AsHalf<widen_f16>, 4>(job, flag, shared);
    case BF16 * 2: return block<GATHER, RAW, AsHalf<widen_bf16>, 1>(job, flag, shared);
    case BF16 * 2 + 1: return block<GATHER, RAW, AsHalf<widen_bf16>, 4>(job, flag, shared);
    }
}

// Pool rows into samples: out[s] = (sum over uses of rows[use] * weight) / divisor.
extern "C" __global__ void __launch_bounds__(BLOCK, 5) gather_pool(const Job *jobs, u32 count) {
    __shared__ Shared shared;
    run<true, false>(jobs, count, nullptr, shared);
}

// Copy rows to the positions of a sequence, and write a mask of the positions with a row. The uses of a position are
// those of one id, so they are few, and no shared memory is needed.
extern "C" __global__ void __launch_bounds__(BLOCK, 5) gather_raw(const Job *jobs, u32 count) {
    run<true, true>(jobs, count, nullptr, *(Shared *)nullptr);
}

// Sum gradients of samples per unique id: out[id] = (sum over uses of gradient[sample] / divisor * weight) * scale.
extern "C" __global__ void __launch_bounds__(BLOCK, 5) segment_sum(const Job *jobs, u32 count, u32 *flag) {
    __shared__ Shared shared;
    run<false, false>(jobs, count, flag, shared);
}

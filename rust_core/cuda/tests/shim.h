// Lets a C++ compiler compile kernels.cu. The blocks of a launch and the threads of a block run in loops.
#pragma once
#include <cstring>

#define __device__
#define __global__
#define __shared__ static
#define __launch_bounds__(...)
#define THREADS for (threadIdx.x = 0; threadIdx.x < BLOCK; threadIdx.x++)
#define SYNC static_cast<void>(0)
#define SYNC_ANY(has) (has)
#define ROLLED
#define UNROLLED

struct Index {
    unsigned int x;
};
static Index blockIdx, threadIdx;

struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) ushort4 {
    unsigned short x, y, z, w;
};

static inline unsigned int __float_as_uint(float value) {
    unsigned int bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float __uint_as_float(unsigned int bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

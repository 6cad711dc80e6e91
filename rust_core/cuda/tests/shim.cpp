// The kernels, compiled for the CPU by means of shim.h. Each `run_` function runs one kernel.
#include "shim.h"

#include "../src/kernels.cu"

extern "C" void run_gather_pool(const Job *jobs, u32 count, u32 blocks) {
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) gather_pool(jobs, count);
}

extern "C" void run_gather_raw(const Job *jobs, u32 count, u32 blocks) {
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) gather_raw(jobs, count);
}

extern "C" void run_segment_sum(const Job *jobs, u32 count, u32 *flag, u32 blocks) {
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) segment_sum(jobs, count, flag);
}

extern "C" u32 size_of_job() { return sizeof(Job); }

// What this processor can run.
#pragma once

namespace pyps {

#ifdef PYPS_HAS_AVX
inline bool has_avx2() { return __builtin_cpu_supports("avx2"); }

// The kernels need no VBMI2, but processors without it slow down over vectors of 512 bits.
inline bool has_avx512() { return __builtin_cpu_supports("avx512vbmi2"); }
#endif

}  // namespace pyps

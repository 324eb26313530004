// Sixteen floats at a time, in AVX-512, AVX2 or plain loops: what a kernel includes before the files
// of lanes, and which of them this processor runs.
//
// A kernel includes each cpu_lanes_*.h in a namespace of its own, with ZEN_TARGET saying for which
// processor, and after it the code that is written over them.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define ZEN_LANES ZEN_TARGET inline __attribute__((always_inline))

namespace zen {

constexpr int64_t kLanes = 16;
constexpr float kLowest = -3.402823466e38f;

// The sum across sixteen: both halves added up, then quarters, and so on.
inline float across(const float* lanes) {
  float sum[kLanes];
  std::memcpy(sum, lanes, sizeof(sum));
  for (int64_t width = kLanes / 2; width; width /= 2)
    for (int64_t i = 0; i < width; i++) sum[i] += sum[i + width];
  return sum[0];
}

inline float widen(uint16_t bfloat16) {
  const uint32_t bits = uint32_t{bfloat16} << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}
inline float widen(float same) { return same; }

enum Level : int64_t { kPlain, kAvx2, kAvx512 };

// The widest lanes that this processor has, of those up to `level`.
inline Level widest(int64_t level) {
#if defined(__x86_64__)
  static const bool has_avx512 =
      __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  static const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (has_avx512 && level >= kAvx512) return kAvx512;
  if (has_avx2 && level >= kAvx2) return kAvx2;
#endif
  return kPlain;
}

}  // namespace zen

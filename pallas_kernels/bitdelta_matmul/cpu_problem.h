// One product, as the kernels see it, and the order of sums that they all keep.
//
// A sum over the inputs runs in 16 lanes and then across the lanes in a tree. Over a float32 weight
// lane l takes the inputs i with i % 16 = l in turn. Over a bfloat16 weight 32 inputs make a step:
// lane l takes input 32 s + 2 l and then 32 s + 2 l + 1, since a shift and a mask are all that
// turn a register of bfloat16 into two of float32.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#define ZEN_AVX2 __attribute__((target("avx2,fma")))
#endif
#define ZEN_INLINE inline __attribute__((always_inline))

namespace zen {

constexpr int64_t kLanes = 16;
constexpr int64_t kStep = 32;    // inputs of one step
constexpr int64_t kBlock = 64;   // outputs that one task takes
constexpr int64_t kChunk = 1024; // inputs that a product of many rows sums before it goes on

struct Problem {
  const float* x;       // [rows, inputs]; null where x16 is not
  const uint16_t* x16;  // the rows in bfloat16 where they are used as they came
  const void* w;        // [outputs, inputs]
  bool w_bf16;
  const uint8_t* bits;  // [variants, levels, outputs, bytes]
  const float* scale;   // [variants, levels, outputs]
  const int32_t* slots; // [rows]; null when all rows are the base's
  float* y;             // [rows, outputs]
  int64_t rows, inputs, outputs, bytes, variants, levels;
  int64_t threads;      // that share the outputs, block by block

  // A row's variant, or -1 for the base.
  int32_t slot(int64_t row) const {
    const int32_t s = slots ? slots[row] : -1;
    return s >= 0 && s < variants && levels > 0 ? s : -1;
  }
  // Where a variant's signs and scales of one output begin.
  int64_t at(int64_t slot, int64_t level, int64_t output) const {
    return (slot * levels + level) * outputs + output;
  }
  int64_t steps() const { return (inputs + kStep - 1) / kStep; }
};

inline float widen(uint16_t half) {
  const uint32_t wide = uint32_t{half} << 16;
  float value;
  std::memcpy(&value, &wide, sizeof(value));
  return value;
}

inline float weight(const Problem& p, int64_t o, int64_t i) {
  const int64_t at = o * p.inputs + i;
  return p.w_bf16 ? widen(static_cast<const uint16_t*>(p.w)[at]) : static_cast<const float*>(p.w)[at];
}

// The sum of 16 lanes: halves are added to each other until one lane is left.
inline float across(const float* lanes) {
  float sum[kLanes];
  std::memcpy(sum, lanes, sizeof(sum));
  for (int64_t width = kLanes / 2; width; width /= 2)
    for (int64_t i = 0; i < width; i++) sum[i] += sum[i + width];
  return sum[0];
}

}  // namespace zen

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
constexpr int64_t kStep = 32;       // inputs of one step
constexpr int64_t kBlock = 64;      // outputs that one task takes
constexpr int64_t kFar = 24 << 10;  // bytes of weights that are on their way while others are used
constexpr int64_t kChunk = 1024;    // inputs that a product of many rows sums before it goes on

// What is fetched into the cache beside a product: so many lines from `from` on.
struct Ahead {
  const uint8_t* from = nullptr;
  int64_t lines = 0;

  // The lines [done, done + count) of them, as far as they go. (A compiler drops calls of functions
  // that do nothing else, so it may not be one.)
  ZEN_INLINE void fetch(int64_t done, int64_t count) const {
    for (int64_t i = done; i < std::min(done + count, lines); i++)
      __builtin_prefetch(from + i * 64, 0, 2);
  }
  // How many are due in each of so many steps.
  int64_t each(int64_t steps) const { return (lines + steps - 1) / std::max<int64_t>(steps, 1); }
  // Part `i` of `parts` of them.
  Ahead part(int64_t i, int64_t parts) const {
    const int64_t begin = lines * i / parts;
    return {from + begin * 64, lines * (i + 1) / parts - begin};
  }
};

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
  int64_t weight_bytes(int64_t outs) const { return outs * inputs * (w_bf16 ? 2 : 4); }
  // How many outputs ahead weights are asked for: whole fours of them.
  int64_t far() const { return std::clamp<int64_t>(kFar / weight_bytes(4), 1, kBlock / 4) * 4; }
  // The weights of outputs [begin, end), to be fetched.
  Ahead weights_ahead(int64_t begin, int64_t end) const {
    if (begin >= end) return {};
    return {static_cast<const uint8_t*>(w) + weight_bytes(begin), weight_bytes(end - begin) / 64};
  }
};

struct Block {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};

// A product's blocks of outputs: whole ones, and so that threads end together what is left over in
// as many parts as there are threads. Those behind the last are empty.
class Blocks {
 public:
  explicit Blocks(const Problem& p) : outputs_(p.outputs) {
    whole_ = p.outputs / (p.threads * kBlock) * p.threads;
    const int64_t left = outputs_ - whole_ * kBlock, each = (left + p.threads - 1) / p.threads;
    part_ = (each + kLanes - 1) / kLanes * kLanes;
    count_ = whole_ + (left ? (left + part_ - 1) / part_ : 0);
  }
  int64_t count() const { return count_; }
  Block operator[](int64_t i) const { return {begin(i), begin(i + 1)}; }

 private:
  int64_t begin(int64_t i) const {
    return std::min(outputs_, std::min(i, whole_) * kBlock + std::max<int64_t>(i - whole_, 0) * part_);
  }

  int64_t outputs_, whole_, part_, count_;
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

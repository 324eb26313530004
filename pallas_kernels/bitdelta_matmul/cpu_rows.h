// Rows of x laid out for the product with a weight: tiles of up to six rows, each a single stream.

#pragma once

#include <cstdlib>
#include <new>

#include "cpu_problem.h"

namespace zen {

constexpr int64_t kTileRows = 6;

// Memory that starts at a multiple of 64 bytes and is kept from call to call: asking the system
// for some hundred kB anew costs as much as filling them. One a thread and use; it only grows.
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  ~Scratch() { std::free(memory_); }

  template <typename T>
  T* get(int64_t count) {
    const size_t bytes = (count * sizeof(T) + 63) / 64 * 64;
    if (bytes > size_) {
      std::free(memory_);
      memory_ = std::aligned_alloc(64, bytes);
      size_ = memory_ ? bytes : 0;
      if (!memory_) throw std::bad_alloc();
    }
    return static_cast<T*>(memory_);
  }

 private:
  void* memory_ = nullptr;
  size_t size_ = 0;
};

// T float: [tile][step][row of the tile][2][16], as two registers of a weight's step want it.
// T uint16_t: [tile][step][row of the tile][32] in bfloat16.
template <typename T>
class Rows {
 public:
  // Every row has to be filled before use.
  Rows(const Problem& p, Scratch& scratch)
      : p_(p), memory_(scratch.get<T>(p.rows * p.steps() * kStep)) {}

  void fill(int64_t row) {
    int64_t t = row * tiles() / p_.rows;
    while (begin(t + 1) <= row) t++;
    while (begin(t) > row) t--;
    const int64_t count = begin(t + 1) - begin(t), whole = p_.inputs / kStep;
    const T* x = source() + row * p_.inputs;
    T* to = memory_ + begin(t) * p_.steps() * kStep + (row - begin(t)) * kStep;
    for (int64_t s = 0; s < whole; s++, to += count * kStep, x += kStep) put(to, x);
    if (whole == p_.steps()) return;
    T last[kStep] = {};
    std::memcpy(last, x, (p_.inputs - whole * kStep) * sizeof(T));
    put(to, last);
  }

  int64_t tiles() const { return (p_.rows + kTileRows - 1) / kTileRows; }
  // The first row of a tile; tiles differ by one row at most.
  int64_t begin(int64_t tile) const { return tile * p_.rows / tiles(); }
  const T* data(int64_t tile) const { return memory_ + begin(tile) * p_.steps() * kStep; }

 private:
  void put(float* to, const float* x) const {
    if (!p_.w_bf16) {
      std::memcpy(to, x, kStep * sizeof(float));
      return;
    }
    for (int64_t k = 0; k < kLanes; k++) {
      to[k] = x[2 * k];
      to[kLanes + k] = x[2 * k + 1];
    }
  }
  void put(uint16_t* to, const uint16_t* x) const { std::memcpy(to, x, kStep * sizeof(*to)); }

  const T* source() const {
    if constexpr (sizeof(T) == 4) return p_.x;
    else return p_.x16;
  }

  const Problem& p_;
  T* memory_;
};

}  // namespace zen
